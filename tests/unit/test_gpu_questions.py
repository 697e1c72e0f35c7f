"""Test the questions to a GPU: rehearse all of them on a CPU, and check what is kept, skipped and refused."""

import json
import math
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.forkserver import python

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks/gpu"


@pytest.fixture
def questions(gpu_benchmarks):
    import questions

    return questions


@pytest.fixture
def bundle(questions, monkeypatch, tmp_path):
    import bundle

    monkeypatch.setattr(bundle, "FOLDER", tmp_path / "gpu")
    monkeypatch.setattr(bundle, "MODULES", ["thing_that_was_bundled"])
    return bundle


def ask(folder, script, *options):
    """Run a script that works in ``folder``; return its exit status and output."""
    command = [python(), GPU / f"{script}.py", "--json", folder / "figures.json", *options]
    environment = {**os.environ, "GPU_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Rehearse all questions once; return the folder and the output."""
    folder = tmp_path_factory.mktemp("gpu")
    status, output = ask(folder, "all", "--rehearse")
    assert status == 0, output
    return folder, output


def kept(folder):
    return json.loads((folder / "figures.json").read_text())["questions"]


def assert_every_kernel_is_measured(rows):
    found = {name.removeprefix("odd, "): row["ways"] for name, row in rows.items()}
    assert found.keys() >= {"layer", "experts", "expand backward", "reduce backward", "cast_rows_fp8"}
    assert found["expand"].keys() == {"twin", "kernel", "loop", "compiled", "copy"}
    assert found["layer"].keys() >= {"loop", "torch", "torch compiled", "kernels", "kernels fp8 compiled"}
    assert found["experts"].keys() == {"bf16", "bf16 compiled", "fp8", "fp8 compiled"}
    for ways in found.values():
        assert all(of["us"] > 0 and of["replayed_us"] is None for of in ways.values())


def test_every_question_is_rehearsed_on_a_cpu(rehearsed):
    folder, output = rehearsed
    rows = kept(folder)
    scripts = {path.stem for path in GPU.glob("*.py") if "questions.Question(" in path.read_text()}
    assert rows.keys() == scripts and all(rows.values())
    assert output.count("These figures mean nothing") == len(scripts) and "FAILED" not in output
    assert_every_kernel_is_measured(rows["kernel_speed"])
    compared = rows["determinism"]
    trained = {"training, fp32", "training, gpt, fp32", "killed, fp32"}
    assert compared.keys() == trained | {"gradients", "gradients, gpt"}
    assert all(row["differ"] == [] and row["compared"] > 4 for row in compared.values())
    assert compared["killed, fp32"]["kills"] == 1
    *slices, evaluation = rows["training"].values()
    assert [row["finished"] for row in slices] == [False] * (len(slices) - 1) + [True]
    assert slices[-1]["to_step"] == 20 and evaluation["bpb"] > 0
    assert rows["train_throughput"]["smoke, bf16, parts"]["described_memory"]["total"] > 0
    small = rows["train_throughput"]["small gpt, bf16, documents"]
    assert (small["unit"], small["compiled_again"], small["shape"]) == ("tokens", 0, "2 x 2 x 64")


def test_a_script_alone_measures_nothing_again(rehearsed):
    folder, _ = rehearsed
    before = kept(folder)
    status, output = ask(folder, "training", "--rehearse")
    assert status == 0 and kept(folder) == before
    assert output.count("there already") == 1  # the evaluation; a finished training begins no slice


def test_a_function_that_runs_apart_returns_its_result_or_its_error(questions):
    assert questions.apart(math.sqrt, 4.0) == 2.0
    with pytest.raises(RuntimeError, match=r"expected a nonnegative input|math domain error"):
        questions.apart(math.sqrt, -1.0)
    with pytest.raises(RuntimeError, match="ended with exit status 3"):
        questions.apart(os._exit, 3)
    with pytest.raises(RuntimeError, match=r"hangs: not done in 1 s"):
        questions.apart(time.sleep, 60.0, seconds=1)


def test_a_training_that_is_to_be_killed_saves_by_steps_whatever_the_preset_does(questions):
    import trainings

    for rehearse in (False, True):
        settings = trainings.short_training("bf16", rehearse).settings
        assert settings.ckpt_minutes is None and settings.ckpt_every * 4 <= settings.max_steps


def no_goals(rows):
    return []


def chosen(questions, path, *options):
    return questions.parser("Asks.").parse_args(["--rehearse", "--json", str(path), *options])


def test_a_row_is_kept_as_it_ends_and_a_failed_one_tried_again_when_the_code_has_changed(
    questions, tmp_path, capsys, monkeypatch
):
    path, calls = tmp_path / "figures.json", []

    def once(name, fails=False):
        calls.append(name)
        if fails:
            raise ValueError("first line\nout of memory")
        return {"figure": 1}

    def all_rows():
        question = questions.Question("asked", chosen(questions, path), no_goals)
        question.measure("a", 1, lambda: once("a"), lambda row: "one")
        assert "a" in json.loads(path.read_text())["questions"]["asked"]
        question.measure("b", 1, lambda: once("b", fails=True), lambda row: "two")
        assert question.end() == 0

    all_rows()
    all_rows()
    assert calls == ["a", "b"]
    assert "b: FAILED, ValueError: out of memory" in capsys.readouterr().out
    monkeypatch.setattr(questions, "code_digest", lambda: "changed")
    all_rows()
    assert calls == ["a", "b", "b"] and "a: there already, of other code: one" in capsys.readouterr().out


def test_a_row_that_would_not_end_in_time_is_left_for_another_call(questions, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(questions, "device", lambda rehearse: {"device": "a GPU", "torch": "2.11"})
    asked = questions.parser("Asks.").parse_args(["--json", str(tmp_path / "f.json"), "--minutes", "1"])
    question = questions.Question("asked", asked, no_goals)
    assert question.measure("long", 90, dict, str) is None
    assert question.measure("short", 5, lambda: {"figure": 1}, str) is not None
    assert question.end() == questions.MISSING
    assert "long: left for another call, it takes up to 90 s" in capsys.readouterr().out


def test_a_test_that_fails_on_the_device_is_named(questions, tmp_path):
    import kernel_speed

    (tmp_path / "test_it.py").write_text("def test_that(): assert 1 == 2\ndef test_fine(): pass\n")
    found = kernel_speed.tests(str(tmp_path), workers=1)
    assert "1 failed, 1 passed" in found["summary"] and "test_it.py::test_that" in found["error"]


def test_rows_of_two_devices_never_share_a_file(questions, tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"machine": {"device": "NVIDIA H200"}, "questions": {}}))
    with pytest.raises(SystemExit, match="holds figures of NVIDIA H200, this is cpu; move it away or name"):
        questions.Question("asked", chosen(questions, path), no_goals)


def test_without_a_gpu_a_question_says_why_and_what_to_do(questions, tmp_path, monkeypatch):
    def driver():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    monkeypatch.setattr("torch.cuda.init", driver)
    asked = questions.parser("Asks.").parse_args(["--json", str(tmp_path / "f.json")])
    with pytest.raises(SystemExit, match=r"finds no GPU: The NVIDIA driver .* is too old .*--rehearse runs"):
        questions.Question("asked", asked, no_goals)


def test_goals_are_told_beside_the_figures_of_a_device(questions, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(questions, "device", lambda rehearse: {"device": "a GPU", "torch": "2.11"})
    asked = questions.parser("Asks.").parse_args(["--json", str(tmp_path / "f.json")])

    def goals(rows):
        figure = rows["a"]["figure"] if "a" in rows else None
        return [questions.goal("at least 2", figure, lambda x: x >= 2)]

    question = questions.Question("asked", asked, goals)
    question.measure("a", 1, lambda: {"figure": 3}, lambda row: "three")
    assert "    goal: at least 2: met (3)" in capsys.readouterr().out
    assert questions.goal("x", None, bool)["outcome"] == "not measured"
    assert questions.goal("x", 1.0, lambda x: x > 1)["outcome"] == "missed (1)"


def test_a_script_that_outlasts_its_time_is_killed_with_what_it_started(questions, tmp_path, capsys):
    import all as everything

    script = tmp_path / "slow.py"
    script.write_text(
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "pid")]
    assert everything.run(command, dict(os.environ), 3) == questions.MISSING
    assert "slow: killed, its time is over" in capsys.readouterr().out
    child = Path("/proc") / (tmp_path / "pid").read_text()
    for _ in range(100):
        if not child.exists() or "Z" in (child / "stat").read_text().split():
            return
        time.sleep(0.05)
    pytest.fail("what the script started still runs")


# ------------------------------------------------------------------------------------------------ the bundle


def small_bundle(bundle, folder, python=None):
    """A bundle of one wheel and one file of text, as `make gpu-bundle` leaves it."""
    import platform

    shards, wheels = folder / "shards", folder / "bundle/wheels"
    (shards / "train").mkdir(parents=True)
    wheels.mkdir(parents=True)
    (shards / "train/000.bin").write_bytes(b"text")
    (shards / "metadata.json").write_text(json.dumps({"digest": "d"}))
    with zipfile.ZipFile(wheels / "thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing_that_was_bundled.py", "VALUE = 3\n")
    text = bundle.pack(shards, folder / "bundle/text.tar.xz")
    names = ["wheels/thing-1.0-py3-none-any.whl", "text.tar.xz"]
    files = {name: (folder / "bundle" / name).stat().st_size for name in names}
    here = ".".join(map(str, sys.version_info[:2]))
    manifest = {"python": python or here, "machine": platform.machine(), "text": text, "files": files}
    (folder / "bundle/manifest.json").write_text(json.dumps(manifest))
    return folder / "bundle"


def test_a_bundle_is_unpacked_once_and_found(bundle, tmp_path):
    packed = small_bundle(bundle, tmp_path)
    found = bundle.unpack(packed)
    assert found[0] == str(ROOT) and found[-1] == str(tmp_path / "gpu/site")
    assert (tmp_path / "gpu/site/thing_that_was_bundled.py").read_text() == "VALUE = 3\n"
    there = tmp_path / "gpu/results/shards/pydocs/train/000.bin"
    assert there.read_bytes() == b"text"
    there.write_bytes(b"mine")
    bundle.unpack(packed)
    assert there.read_bytes() == b"mine"


def test_wheels_stay_packed_where_their_packages_are_here(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MODULES", ["pydantic"])
    packed = small_bundle(bundle, tmp_path, python="3.7")
    assert "site" not in bundle.unpack(packed)[-1]
    assert (tmp_path / "gpu/results/shards/pydocs/train/000.bin").exists()
    assert not (tmp_path / "gpu/site").exists()


def test_without_a_bundle_nothing_is_unpacked(bundle, tmp_path):
    assert str(ROOT) in bundle.unpack(tmp_path / "none")
    assert not (tmp_path / "gpu").exists()


def test_a_bundle_for_another_python_is_refused_in_words(bundle, tmp_path):
    packed = small_bundle(bundle, tmp_path, python="3.7")
    here = ".".join(map(str, sys.version_info[:2]))
    said = rf"holds wheels for Python 3\.7 on .*make gpu-bundle GPU_PYTHON={here} .*call this with python3\.7"
    with pytest.raises(SystemExit, match=said):
        bundle.unpack(packed)


def test_a_bundle_that_is_cut_short_is_refused(bundle, tmp_path):
    packed = small_bundle(bundle, tmp_path)
    (packed / "text.tar.xz").write_bytes(b"half")
    with pytest.raises(SystemExit, match=r"text\.tar\.xz: missing or cut short; bring the bundle here again"):
        bundle.unpack(packed)


def test_what_a_bundle_holds_is_pinned_and_enough_to_train_with(bundle):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {bundle.plain(line.partition("==")[0]) for line in lines if "==" in line}
    assert {bundle.plain(name) for name in bundle.PACKAGES} <= pinned
    left_out = ["pyarrow", "numba", "mlflow", "snakemake", "datasets", "huggingface_hub", "scipy", "pandas"]
    code = f"import sys\nfor name in {left_out}: sys.modules[name] = None\n"
    code += "import spider.cli, spider.training.stage, spider.training.warmup, spider.evaluation.evaluate\n"
    code += "import spider.describe, spider.report.figures, spider.evaluation.training_text\n"
    code += "for name in ('tokenizers', 'regex', 'requests'): sys.modules[name] = None\n"
    code += "from spider.tokens.bpe import BpeTokens\n"  # to generate from a prompt
    code += "assert len(BpeTokens([(104, 101)]).encode('hehe')) == 4\n"
    code += "from importlib import metadata\n"
    code += "metadata.distribution = None\n"  # Spider is not installed there
    code += "from spider.tracking import records\n"
    code += "assert records.origin()['spider.version']"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
