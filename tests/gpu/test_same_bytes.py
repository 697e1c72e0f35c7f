"""Trainings on a GPU end with the same bytes: trained twice, and killed and resumed.

Each is a process of its own, compiled, so that the device's arithmetic and the compiled code start again.
``benchmarks/torture.py`` kills more and on any machine. Large models are compared by `benchmarks/gpu`.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spider.checkpoints import records
from spider.common.files import read_json
from spider.common.results import StageFolder
from spider.config import StageSpec, load_config
from spider.data.sources.mock import make_mock_data
from spider.training import stage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: no training ran on a device")

PROCESSES = multiprocessing.get_context("spawn")
#: Each has all parts of its family, and runs every kernel that a large one runs.
MODELS: dict[str, dict[str, Any]] = {
    "spider": {
        "preset": "spider-1b",
        "hidden": 512,
        "ffn_hidden": 1024,
        "attention": {"heads": 4, "kv_lora_rank": 128},
        "moe": {"experts": 16, "expert_hidden": 256, "shared_hidden": 256},
        "engram": {"layers": [1], "table_size": 5003, "byte_orders": [3, 4]},
        "recurrence": {"layers": 3, "loops": 3},
        "ngram": None,
    },
    "gpt": {"preset": "gpt-d12", "hidden": 512, "layers": 4, "heads": 4, "kv_heads": 2, "short_window": 64},
}
MODELS["gpt"]["vocab_size"] = None
STEPS, EVERY = 20, 5


def spec_of(family: str, precision: str) -> StageSpec:
    """Return a training on bytes that saves every few steps; the GPT's rows are packed."""
    packed = {"packing": "best_fit", "attend": "document"} if family == "gpt" else {}
    run = {
        "data": "mock",
        "model": MODELS[family],
        "precision": precision,
        "compile": True,
        "defaults": {"seq_len": 256, "micro_batch": 32, "grad_accum": 2, "lr": 1e-3, **packed},
        "stages": [{"name": "main", "max_steps": STEPS, "ckpt_every": EVERY, "ckpt_minutes": None}],
    }
    run["stages"][0] |= {"log_every": EVERY, "warmup_steps": 2}
    raw = {"results": "results", "datasets": {"mock": {"source": {"kind": "mock"}}}, "runs": {"run": run}}
    return load_config(raw).stage("run", "main")


def start(spec: StageSpec, folder: Path, text: Path) -> Any:
    """Begin a training, or go on with it, in a process of its own."""
    process = PROCESSES.Process(target=stage.train, args=(spec, folder, text))
    process.start()
    return process


def result_of(folder: Path) -> dict[str, Any]:
    """Return the digest of each tensor file of a finished training, and its curve."""
    stage_folder = StageFolder(folder)
    manifest = read_json(folder / read_json(stage_folder.receipt)["checkpoint"] / "manifest.json")
    digests = {name: of["sha256"] for name, of in manifest["files"].items() if "safetensors" in name}
    curve = [json.loads(line) for line in stage_folder.metrics.read_text().splitlines()]
    named = {
        row["step"]: [row["metrics"][name] for name in ("train/loss", "train/grad_norm")] for row in curve
    }
    return {**digests, **named}


@pytest.mark.parametrize(("family", "precision"), [("spider", "bf16"), ("spider", "fp8"), ("gpt", "bf16")])
def test_trained_twice_and_killed_and_resumed_gives_the_same_bytes(family, precision, tmp_path):
    text = tmp_path / "text"
    make_mock_data(text)
    spec = spec_of(family, precision)
    if family == "gpt":
        from spider.data.packing import pack

        pack(text, spec.settings.seq_len)
    killed = start(spec, tmp_path / "killed", text)
    while killed.is_alive() and not records.steps(StageFolder(tmp_path / "killed").checkpoints):
        time.sleep(0.01)
    killed.kill()
    killed.join()
    assert records.step_of(records.steps(StageFolder(tmp_path / "killed").checkpoints)[-1]) < STEPS
    for name in ("killed", "first", "second"):
        process = start(spec, tmp_path / name, text)
        process.join()
        assert process.exitcode == 0
    first = result_of(tmp_path / "first")
    assert len(first) > STEPS // EVERY
    assert result_of(tmp_path / "second") == first == result_of(tmp_path / "killed")
