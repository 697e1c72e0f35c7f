"""Presets that are whole runs: each is planned without a network, and a small version of each is run."""

import hashlib
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from spider.common.files import read_json, write_json
from tests.forkserver import python
from tests.unit.config.test_task_files import bundle
from tests.unit.data.hub_server import REPO, Handler, Hub, serving
from tests.unit.data.published import SIZE, publish
from tests.unit.tokens.texts import texts

from .conftest import PATIENCE, ROOT, SNAKEMAKE, jobs_in

STAGES = {"gpt-d12": 4, "gpt-d20": 4, "golf-16mb": 2, "golf-seed": 1, "spider-seed": 1, "mixture-cpu": 2}
RUNS = {"ladder-gpt": 35, "miniseries-gpt": 11}
MODEL = "tokenizers/fineweb_8192_bpe.model"
TINY = {
    "gpt-d12": {"depth": 2},
    "gpt-d20": {"depth": 2},
    "golf-16mb": {"hidden": 64, "heads": 2, "kv_heads": 1},
    "golf-seed": {"hidden": 64, "heads": 2, "kv_heads": 1},
    "spider-seed": {"preset": "tiny", "recurrence": {"loops": 2}},
    "mixture-cpu": {"hidden": 64, "heads": 2},
}


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def stand_ins(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return small files by their repositories and names in the presets. The bundle is of the web."""
    web = [
        [{"text": f"{i} {j} {text}", "id": f"{i}-{j}"} for j, text in enumerate(texts(80))] for i in range(14)
    ]
    talk = [
        [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"It is {i}."}]
        for i in range(400)
    ]
    sums = [(f"{i} + {j}?", f"It is {i + j}.\n#### {i + j}") for i in range(20) for j in range(20)]
    rows = [{"question": question, "answer": answer} for question, answer in sums]
    bundle(folder / "eval_bundle")
    archive = shutil.make_archive(str(folder / "zipped"), "zip", folder, "eval_bundle")
    publish(folder / "shards", count=400, size=9000)
    golf = {f"{split}_000000": f"{split}_000" for split in ("train", "val")} | {"train_000001": "train_001"}
    below = "datasets/datasets/fineweb10B_sp8192/fineweb_"
    return {
        "HuggingFaceFW/fineweb-edu": {
            f"sample/10BT/{i:03d}_00000.parquet": parquet(one) for i, one in enumerate(web)
        },
        "HuggingFaceTB/smol-smoltalk": {
            f"data/train-{i:05d}-of-00004.parquet": parquet([{"messages": one} for one in talk[i::4]])
            for i in range(4)
        },
        "openai/gsm8k": {
            "main/train-00000-of-00001.parquet": parquet(rows[:380]),
            "main/test-00000-of-00001.parquet": parquet(rows[380:384]),
        },
        "kevclark/parameter-golf": {
            f"datasets/{MODEL}": (folder / "shards/m.model").read_bytes(),
            **{f"{below}{to}.bin": (folder / f"shards/{of}.bin").read_bytes() for to, of in golf.items()},
        },
        REPO: {"eval_bundle.zip": Path(archive).read_bytes()},
    }


class Repositories(Handler):
    """Several repositories on one server."""

    hubs: ClassVar[dict[str, Hub]]

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        own = (one for name, one in self.hubs.items() if f"/datasets/{name}" in path)
        self.hub = next(own, self.hub)
        super()._answer(body)


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[dict[str, Hub]]:
    """Return the repositories of the presets by name, with stand-ins for their files."""
    made = {name: Hub(files, repo=name) for name, files in stand_ins(tmp_path / "published").items()}
    handler = type("Published", (Repositories,), {"hubs": made})
    with serving({}, handler=handler) as server:
        for one in made.values():
            one.endpoint = server.endpoint
        yield made


def snakemake(
    folder: Path, configuration: Path, *arguments: str, endpoint: str = "http://127.0.0.1:9"
) -> subprocess.CompletedProcess[str]:
    """Run Snakemake in a folder, by default where no hub can be reached."""
    command = [python(), SNAKEMAKE, "--snakefile", ROOT / "Snakefile", "--profile", ROOT / "profiles/default"]
    command += ["--cores", "2", "--configfile", configuration, *arguments]
    environment = {"PATH": "/usr/bin:/bin", "HF_ENDPOINT": endpoint, "LANG": "C.UTF-8"}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


def printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("preset", [*STAGES, *RUNS])
def test_a_whole_run_is_planned_without_a_network(preset, tmp_path):
    planned = jobs_in(printed(snakemake(tmp_path, ROOT / f"presets/{preset}.yaml", "--dry-run")))
    assert planned["train"] == STAGES.get(preset) or RUNS.get(preset)
    assert planned.get("compress", 0) == preset.startswith("golf")
    assert planned.get("ladders", 0) == planned.get("forecast", 0) == (preset == "ladder-gpt")


def small(preset: str, hubs: dict[str, Hub]) -> dict:
    """Return the preset with a tiny model, a few short steps, and little text of the same repositories."""
    plain = yaml.safe_load((ROOT / f"presets/{preset}.yaml").read_text())
    plain["tracking"] = {"enabled": False}
    for dataset in plain["datasets"].values():
        source = dataset["source"]
        if source["kind"] == "hub":
            hubs[source["repo"]].revision = source["revision"]
            dataset["validation"] = 0.1
        if "take" in source:
            source["take"] = "100 kB"
        if source["kind"] == "tokens":
            source |= {"vocab_size": SIZE, "train": source["train"][:2]}
    for place, origin in plain.get("downloads", {}).items():
        if not origin.startswith("hf://"):
            (name, content), endpoint = *hubs[REPO].files.items(), hubs[REPO].endpoint
            assert origin.partition("#")[0].endswith(f"/{name}")
            digest = hashlib.sha256(content).hexdigest()
            plain["downloads"][place] = f"{endpoint}/datasets/{REPO}/resolve/main/{name}#sha256={digest}"
    for tokenizer in plain.get("tokenizers", {}).values():
        tokenizer |= {"vocab_size": 300, "max_bytes": 200_000}
    (run,) = plain["runs"].values()
    model = run["model"] if isinstance(run["model"], dict) else {"preset": run["model"]}
    precision = "bf16" if preset == "spider-seed" else "fp32"  # fp32 does not take its bf16 weights
    run |= {"model": model | TINY[preset], "precision": precision}
    run["resources"] = {"threads": 1}
    for stage in (run.setdefault("defaults", {}), *run["stages"]):
        stage |= {
            key: value
            for key, value in {"seq_len": 64, "micro_batch": 2, "grad_accum": 2}.items()
            if key in stage
        }
    for stage in run["stages"]:
        for limit in ("tokens", "tokens_per_parameter", "max_hours"):
            stage.pop(limit, None)
        stage["max_steps"] = 6
        if "ema" in stage:
            stage["ema"]["start_step"] = 0
        stage |= {
            key: 3 for key in ("tasks_every", "samples_every", "val_every", "ckpt_every") if key in stage
        }
        if "rollouts" in stage:
            stage["rollouts"] |= {"samples": 4, "max_bytes": 16, "val_prompts": 4}
    evaluation = run["evaluation"]
    if "ttt" in evaluation:
        evaluation["ttt"]["chunk"] = min(64, evaluation["ttt"]["chunk"])
    if evaluation.get("ttt", {}).get("objective"):
        evaluation["ttt"]["chunk"] = 32
    if "train_bytes" in evaluation:
        evaluation["train_bytes"] = 1000
    run["evaluation"] |= {"max_bytes": 2000, "seq_len": 64, "sample_bytes": 20, "loops_bytes": 0}
    return plain


@pytest.mark.long
@pytest.mark.parametrize("preset", TINY)
def test_a_small_version_of_a_whole_run_ends_with_its_scores(preset, tmp_path, hubs):
    plain = small(preset, hubs)
    (tmp_path / "small.json").write_text(json.dumps(plain))
    printed(snakemake(tmp_path, tmp_path / "small.json", endpoint=hubs[REPO].endpoint))
    results = tmp_path / plain["results"]
    ((name, run),) = plain["runs"].items()
    for stage in run["stages"]:
        assert 0 < read_json(results / "runs" / name / stage["name"] / "evaluation.json")["bpb"] < 20
    assert (results / "report/table.md").stat().st_size > 0
    if "compress" in run:
        compressed = results / "runs" / name / run["stages"][-1]["name"] / "compressed"
        assert read_json(compressed / "evaluation.json")["results"]["adapt"]


@pytest.mark.parametrize("preset", ["gpt-d12", "gpt-d20", "golf-16mb", "golf-seed"])
def test_all_files_of_a_preset_are_downloaded_from_where_it_says(preset, tmp_path, hubs):
    golf = preset.startswith("golf")
    repo, name = ("kevclark/parameter-golf", f"datasets/{MODEL}") if golf else (REPO, "eval_bundle.zip")
    file = tmp_path / "data" / (f"golf/{name}" if golf else name)
    plain = small(preset, hubs)
    (tmp_path / "small.json").write_text(json.dumps(plain))

    def downloads() -> subprocess.CompletedProcess[str]:
        words = ("--until", "download", "fetch")
        return snakemake(tmp_path, tmp_path / "small.json", *words, endpoint=hubs[repo].endpoint)

    content = hubs[repo].files[name]
    if preset in ("gpt-d12", "golf-seed"):
        del hubs[repo].files[name]  # it moved
        refused = downloads()
        assert refused.returncode and not (tmp_path / "data").exists()
        (line,) = [one for one in refused.stderr.splitlines() if one.strip().startswith("downloads: ")]
        assert name in line and ("no such file in the repository" if golf else "correct its address") in line
        hubs[repo].files[name] = content
    file.parent.mkdir(parents=True)  # as a killed process leaves it
    file.with_name(f".{file.name}.partial").write_bytes(content[:100])
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    write_json(file.with_name(f".{file.name}.partial.json"), {"size": len(content), "hash": digest})
    done = downloads()
    printed(done)
    assert done.stderr.count(" done fetch ") == (4 if golf else 2)
    assert done.stderr.count(" done download ") == (0 if golf else 6)
    assert file.read_bytes() == content
    (log,) = (tmp_path / plain["results"] / "logs/fetch").glob(f"**/{file.name}.log")
    assert "resuming at 100 of" in log.read_text()
    record = read_json(tmp_path / plain["results"] / "downloads" / f"{file.relative_to(tmp_path)}.json")
    assert record["name"].startswith(("http://", "hf://")) and f"sha256:{record['sha256']}" == digest
    if preset == "golf-16mb":
        plain["downloads"]["data/golf"] = f"hf://datasets/{repo}@{'2' * 40}"
        (tmp_path / "small.json").write_text(json.dumps(plain))
        refused = downloads()
        assert refused.returncode and "no such revision; take a commit from" in refused.stderr
        assert file.read_bytes() == content
