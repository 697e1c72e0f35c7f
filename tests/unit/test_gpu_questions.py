"""Test the questions to a GPU: rehearse them at tiny sizes on a CPU, and check what is kept and refused."""

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks/gpu"
#: A training at a tiny size without a compiler.
SMALL = {"precision": "fp32", "compile": False}
PACKED = {"seq_len": 64, "micro_batch": 2, "grad_accum": 2, "packing": "best_fit", "attend": "document"}


@pytest.fixture
def everything(gpu_benchmarks, monkeypatch, tmp_path):
    """all.py, whose text and logs lie in a folder of the test."""
    import all as everything
    import others
    import texts
    import trainings

    for module in (everything, others, texts, trainings):
        monkeypatch.setattr(module, "FOLDER", tmp_path / "gpu")
    return everything


@pytest.fixture
def bundle(everything, monkeypatch, tmp_path):
    import bundle

    monkeypatch.setattr(bundle, "FOLDER", tmp_path / "gpu")
    monkeypatch.setattr(bundle, "MODULES", ["thing_that_was_bundled"])
    return bundle


# ------------------------------------------------------------------------------------------------ the rows


def test_the_first_steps_of_a_training_are_measured(everything):
    import train_throughput

    (row,) = train_throughput.measure("smoke", SMALL, steps=2, settle=1)
    assert len(row["steps"]) == 3 and 0 < row["host_seconds"] < row["seconds"] * 1.5
    assert row["described_memory"] > 0 and row["unit"] == "bytes" and row["mfu"] is None
    assert row["line"].startswith(row["shape"]) and "the host returns after" in row["line"]
    (again,) = train_throughput.measure("smoke", SMALL, steps=2, settle=1)
    assert again["weights"] == row["weights"] != 0
    (other,) = train_throughput.measure("smoke", {**SMALL, "defaults": {"lr": 1e-5}}, steps=2, settle=1)
    assert other["weights"] != row["weights"]


def test_a_gpt_on_packed_rows_of_made_up_ids_is_measured(everything, monkeypatch):
    import texts
    import train_throughput

    monkeypatch.setattr(texts.made_ids, "__defaults__", (80_000,))
    size = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "short_window": 16}
    changes = {**SMALL, "model": size, "defaults": PACKED}
    (row,) = train_throughput.measure("gpt-d12", changes, steps=2, settle=1)
    assert (row["unit"], row["compiled_again"], row["shape"]) == ("tokens", 0, "2 x 2 x 64")


def test_every_op_that_the_model_calls_is_timed_forward_and_backward(everything, monkeypatch):
    import kernel_speed

    # On a CPU the model takes torch's way around some ops; here it calls some.
    monkeypatch.setattr("spider.model.spider.chunking.use_triton", lambda x: True)
    *_, row = kernel_speed.measure("smoke", SMALL, repeats=2)
    names = {name.removeprefix("spider::") for name in row["ops"]}
    assert names >= {"segment_sum", "segment_expand"}  # each is the other's backward
    assert all(of.keys() == {"bytes", "kernel", "torch", "copy"} for of in row["ops"].values())
    assert all(of["bytes"] > 0 for of in row["ops"].values())


def test_the_host_and_a_warm_up_are_measured(everything, monkeypatch):
    import others

    monkeypatch.setattr("spider.training.warmup._STEP_SECONDS", 0.05)
    (row,) = others.measure("host", size=32)
    assert row["ns_of_a_turn"] > 0 and row["tflops"] > 0
    (row,) = others.measure("warm-up", what="smoke", changes={"compile": False})
    # The faster one of this processor: some multiply matrices in bf16.
    assert row["precision"] in ("fp32", "bf16") and "a micro-batch" in row["line"]


def test_every_row_can_be_trained_with_its_settings(everything):
    import rows
    import trainings

    from spider.config import Run

    new = {"graphs", "deterministic"} - set(Run.model_fields)  # an older checkout has none
    for name, row in rows.ROWS.items():
        if "what" in row.arguments and not new & row.arguments.get("changes", {}).keys():
            config = trainings.config_of(row.arguments["what"], row.arguments.get("changes"))
            spec = trainings.spec_of(config)
            assert spec.settings.max_steps == 10**6, name
            if name.startswith("headline"):
                assert spec.tokens_per_step == 448 * 256
            if name.startswith("gpt-d12"):
                assert spec.tokens_per_step == 524_288 and spec.settings.grad_accum == (
                    4 if "4 x" in name else 8
                )
        assert row.seconds < 8 * 60 and not (row.same and row.same not in rows.ROWS)
    spec = trainings.spec_of(trainings.config_of("gpt-d12"))
    assert spec.tokens_per_step == 524_288 and spec.settings.seq_len == 2048 and spec.compile
    assert (spec.model.vocab_size, spec.model.windows, spec.model.short_window) == (32_768, "SSSL", 1024)
    with pytest.raises(SystemExit, match=r"nothing: no preset; choose headline or one of .*spider-1b"):
        trainings.config_of("nothing")


# ------------------------------------------------------------------------------------------- what is kept


@pytest.fixture
def machine(everything, monkeypatch, tmp_path):
    """A machine whose rows are small scripts; return a function that calls all.py there."""
    rows_of_all = dict(everything.ROWS)
    monkeypatch.setattr(everything.bundle, "unpack", lambda device: [])
    monkeypatch.setattr(everything, "device", lambda: {"device": "a GPU", "memory": 50e9})
    monkeypatch.setattr(everything, "nvidia_smi", lambda query: ["12, python, 300"])

    def call(rows, *options, **parts):
        table = {name: rows_of_all["headline"]._replace(module=code, **parts) for name, code in rows.items()}
        monkeypatch.setattr(everything, "ROWS", table)
        scripts = tmp_path / "all.py"
        scripts.write_text(f"import sys, time, os\nexec({rows!r}[sys.argv[2]])\n")
        monkeypatch.setattr(everything, "__file__", str(scripts))
        monkeypatch.setattr(sys, "argv", ["all.py", "--json", str(tmp_path / "f.json"), *options])
        return everything.main()

    return call


GOOD = 'print("FIGURES", \'{"figure": 1, "line": "one"}\')'


def kept(tmp_path):
    return json.loads((tmp_path / "f.json").read_text())["rows"]


def test_a_row_is_kept_with_the_machines_state_and_a_failed_one_tried_again_when_the_code_has_changed(
    everything, machine, tmp_path, capsys, monkeypatch
):
    table = {"a": GOOD, "b": 'sys.exit("first line\\nout of memory")'}
    assert machine(table) == 1
    row = kept(tmp_path)["a"]
    assert row["figure"] == 1 and row["took"] >= 0 and row["gpu_processes"] == ["12, python, 300"]
    assert "cores" in row["cpu"] and len(row["load"]) == 3
    out = capsys.readouterr().out
    assert "b: FAILED, out of memory" in out and "beside other processes on the GPU: 12, python, 300" in out
    assert machine(table) == 1
    assert "a: there already: one" in (out := capsys.readouterr().out) and "b: there already" in out
    monkeypatch.setattr(everything, "code_digest", lambda tree: "changed")
    assert machine({**table, "b": GOOD}) == 0
    assert "a: there already" in (out := capsys.readouterr().out) and "b: one (" in out


def test_a_row_that_outlasts_its_time_is_killed_with_what_it_started_and_keeps_its_figures(
    machine, tmp_path, capsys
):
    child = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n{GOOD}\nsys.stdout.flush()\n"
    assert (
        machine({"a": child + "time.sleep(60)", "b": "print(1, flush=True); time.sleep(60)"}, seconds=3) == 1
    )
    assert kept(tmp_path)["a"]["line"] == "one" and "error" not in kept(tmp_path)["a"]
    assert "b: FAILED, ended with status -9 after 3 s" in capsys.readouterr().out
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    for _ in range(100):
        if not stat.exists() or "Z" in stat.read_text().split():
            return
        time.sleep(0.05)
    pytest.fail("what the row started still runs")


# ------------------------------------------------------------------------------------------------ the bundle


def small_bundle(bundle, folder, python=None, **more):
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
    manifest = {"python": python or here, "machine": platform.machine(), "text": text, "files": files, **more}
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


def test_what_a_bundle_holds_is_pinned_and_enough_to_train_with(bundle):
    lines = (ROOT / "constraints.txt").read_text().splitlines()

    def plain(name):
        return name.lower().replace("_", "-").replace(".", "-")

    pinned = {plain(line.partition("==")[0]) for line in lines if "==" in line}
    wheels = bundle.WHEELS.read_text().splitlines()
    assert {plain(name) for name in wheels if not name.startswith("#")} <= pinned
    left_out = ["pyarrow", "numba", "mlflow", "snakemake", "datasets", "huggingface_hub", "scipy", "pandas"]
    code = f"import sys\nfor name in {left_out}: sys.modules[name] = None\n"
    code += "import spider.cli, spider.training.stage, spider.training.warmup, spider.evaluation.evaluate\n"
    code += "import spider.workflow.describe, spider.report.figures, spider.evaluation.text\n"
    code += "for name in ('tokenizers', 'regex', 'requests'): sys.modules[name] = None\n"
    code += "from spider.tokens.stored import BpeTokens\n"  # to generate from a prompt
    code += "assert len(BpeTokens([(104, 101)]).encode('hehe')) == 4\n"
    code += "from importlib import metadata\n"
    code += "metadata.distribution = None\n"  # Spider is not installed there
    code += "from spider.provenance.codefiles import processor\n"
    code += "assert processor()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
