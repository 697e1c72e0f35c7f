"""Presets that are whole runs: each is planned without a network, and a small version of each is run."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from spider.common.files import read_json
from tests.forkserver import python
from tests.unit.config.test_task_files import bundle
from tests.unit.data.published import SIZE, publish

from .conftest import PATIENCE, ROOT, SNAKEMAKE, jobs_in

STAGES = {"gpt-d12": 4, "gpt-d20": 4, "golf-16mb": 2, "golf-seed": 1, "spider-seed": 1, "mixture-cpu": 2}
RUNS = {"ladder-gpt": 35, "miniseries-gpt": 11}
TINY = {
    "gpt-d12": {"depth": 2},
    "gpt-d20": {"depth": 2},
    "golf-16mb": {"hidden": 64, "heads": 2, "kv_heads": 1},
    "golf-seed": {"hidden": 64, "heads": 2, "kv_heads": 1},
    "spider-seed": {"preset": "tiny", "recurrence": {"loops": 2}},
    "mixture-cpu": {"hidden": 64, "heads": 2},
}


def own_files(folder: Path) -> None:
    """Write small files at the paths that the presets name."""
    data = folder / "data"
    bundle(data / "eval_bundle")
    talk = [
        [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"It is {i}."}]
        for i in range(400)
    ]
    sums = [(f"{i} + {j}?", f"It is {i + j}.\n#### {i + j}") for i in range(20) for j in range(20)]
    for name in ("smoltalk", "gsm8k"):
        (data / name).mkdir()
    (data / "smoltalk/train.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in talk))
    rows = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in sums]
    (data / "gsm8k/train.jsonl").write_text("".join(rows[:380]))
    (data / "gsm8k/test.jsonl").write_text("".join(rows[380:384]))
    shards = data / "fineweb10B_sp8192"
    publish(shards, count=400, size=9000)
    for split in ("train_000", "train_001", "val_000"):
        (shards / f"{split}.bin").rename(shards / f"fineweb_{split}.bin")
    (data / "tokenizers").mkdir()
    (shards / "m.model").rename(data / "tokenizers/fineweb_8192_bpe.model")


def snakemake(folder: Path, configuration: Path, *arguments: str) -> str:
    """Run Snakemake in a folder, where no hub can be reached, and return what it printed."""
    command = [python(), SNAKEMAKE, "--snakefile", ROOT / "Snakefile", "--profile", ROOT / "profiles/default"]
    command += ["--cores", "2", "--configfile", configuration, *arguments]
    environment = {"PATH": "/usr/bin:/bin", "HF_ENDPOINT": "http://127.0.0.1:9", "LANG": "C.UTF-8"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("preset", [*STAGES, *RUNS])
def test_a_whole_run_is_planned_without_a_network(preset, tmp_path):
    own_files(tmp_path)
    planned = jobs_in(snakemake(tmp_path, ROOT / f"presets/{preset}.yaml", "--dry-run"))
    assert planned["train"] == STAGES.get(preset) or RUNS.get(preset)
    assert planned.get("compress", 0) == preset.startswith("golf")
    assert planned.get("ladders", 0) == planned.get("forecast", 0) == (preset == "ladder-gpt")


def small(preset: str) -> dict:
    """Return the preset with a tiny model, a few short steps, and local text instead of the hub's."""
    plain = yaml.safe_load((ROOT / f"presets/{preset}.yaml").read_text())
    plain["tracking"] = {"enabled": False}
    for dataset in plain["datasets"].values():
        if dataset["source"]["kind"] == "hub":
            dataset |= {"source": {"kind": "mock"}, "validation": 0.1}
        elif dataset["source"]["kind"] == "tokens":
            dataset["source"]["vocab_size"] = SIZE
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
def test_a_small_version_of_a_whole_run_ends_with_its_scores(preset, tmp_path):
    own_files(tmp_path)
    plain = small(preset)
    (tmp_path / "small.json").write_text(json.dumps(plain))
    snakemake(tmp_path, tmp_path / "small.json")
    results = tmp_path / plain["results"]
    ((name, run),) = plain["runs"].items()
    for stage in run["stages"]:
        assert 0 < read_json(results / "runs" / name / stage["name"] / "evaluation.json")["bpb"] < 20
    assert (results / "report/table.md").stat().st_size > 0
    if "compress" in run:
        compressed = results / "runs" / name / run["stages"][-1]["name"] / "compressed"
        assert read_json(compressed / "evaluation.json")["results"]["adapt"]
