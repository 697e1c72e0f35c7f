"""Configurations of trainings, and the short trainings of determinism.py.

One model has all parts of the Spider; the other is a GPT on packed rows of documents. Each is large enough to
run every kernel that a large one runs, and small enough to have small checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import questions
import yaml
from questions import FOLDER, ROOT, code_digest
from texts import text_for

from spider.config import Config, StageSpec, load_config, merged
from spider.results import StageFolder
from spider.training import stage

PRESET = ROOT / "presets/spider-1b.yaml"
SMOKE = ROOT / "presets/smoke.yaml"
GPT = ROOT / "benchmarks/gpu/gpt.yaml"
#: The shape of the original's headline figure.
HEADLINE = {"micro_batch": 112, "seq_len": 256, "grad_accum": 4, "n_loops": 6}
#: What rehearsals change: no compiler.
SLOW = {"precision": "fp32", "compile": False}
STAGE = "steps"

MODEL: dict[str, Any] = {
    "hidden": 512,
    "ffn_hidden": 1024,
    "attention": {"heads": 4, "kv_lora_rank": 128},
    "moe": {"experts": 16, "expert_hidden": 256, "shared_hidden": 256},
    "engram": {"layers": [1], "table_size": 5003, "byte_orders": [3, 4]},
    "recurrence": {"layers": 3, "loops": 3},
}
#: The GPT's windows are shorter than its rows, and its heads share keys. It reads bytes of real text.
GPT_MODEL = {"hidden": 512, "layers": 4, "heads": 4, "kv_heads": 2, "short_window": 64}
GPT_SHAPE = {"seq_len": 256, "micro_batch": 32, "grad_accum": 2, "packing": "best_fit", "attend": "document"}
SECONDS = 240
"""Longest time of one short training."""


def config_of(configuration: Path, *, stage: dict[str, Any] | None = None, **changes: Any) -> Config:
    """Return a configuration with its first run changed, without an n-gram index and with one stage.

    Args:
        stage: settings of the stage (default: it never ends and never saves).
        changes: merged into the run.
    """
    raw = yaml.safe_load(configuration.read_text())
    name, run = next(iter(raw["runs"].items()))
    if isinstance(run["model"], str):
        run["model"] = {"preset": run["model"]}
    run["model"]["ngram"] = None
    endless = {
        "max_steps": 10**6,
        "ckpt_every": 10**6,
        "ckpt_minutes": None,
        "log_every": 10**6,
        "schedule": "constant",
    }
    run = merged(run, changes) | {"stages": [{"name": STAGE, **(stage or endless)}]}
    return load_config(raw | {"runs": {name: run}})


def spec_of(configuration: Path, **changes: Any) -> StageSpec:
    """Return the stage of `config_of`."""
    config = config_of(configuration, **changes)
    return config.stage(next(iter(config.runs)), STAGE)


def short_training(name: str, rehearse: bool) -> StageSpec:
    """Return a training that saves every few steps.

    Args:
        name: its precision, or for the GPT ``gpt`` and its precision: ``gpt, bf16``.
    """
    family, _, precision = name.rpartition(", ")
    steps, every = (12, 3) if rehearse else (60, 10)
    stage = {
        "max_steps": steps,
        "ckpt_every": every,
        "ckpt_minutes": None,
        "log_every": every,
        "warmup_steps": 5,
        "keep_last": 2,
    }
    changes: dict[str, Any]
    if family == "gpt" and rehearse:
        path = GPT
        size = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "short_window": 16}
        shape = {**GPT_SHAPE, "seq_len": 64, "micro_batch": 2}
        changes = {"data": "text", "model": size, "defaults": shape}
    elif family == "gpt":
        path = GPT
        changes = {"data": "text", "model": GPT_MODEL, "defaults": GPT_SHAPE}
    elif rehearse:
        path = SMOKE
        changes = {"model": {"engram": {"table_size": 500}}, "defaults": {"micro_batch": 2}}
    else:
        path = PRESET
        shape = {"seq_len": 256, "micro_batch": 32, "grad_accum": 2, "n_loops": None, "lr": 1e-3}
        changes = {"model": MODEL, "defaults": shape}
    return spec_of(path, stage=stage, precision=precision, compile=not rehearse, **changes)


def folder_for(name: str) -> Path:
    """Return the folder of a training, which is another for each state of the code."""
    return FOLDER / "work" / f"{name.replace(', ', '-')}-{code_digest()}"


def start(spec: StageSpec, folder: Path) -> tuple[Any, Any]:
    """Begin a training, or go on with it, in a process of its own; `questions.finish` waits for it."""
    return questions.start(_train, spec, folder, text_for(spec))


def _train(spec: StageSpec, folder: Path, text: Path) -> None:
    stage.train(spec, folder, text)


def undisturbed(name: str, rehearse: bool) -> Path:
    """Return the folder of a finished short training, which is trained once."""
    folder = folder_for(f"undisturbed, {name}")
    if not StageFolder(folder).receipt.exists():
        questions.finish(*start(short_training(name, rehearse), folder), seconds=SECONDS)
    return folder
