"""Short trainings of a model with all of the Spider's parts, and of a GPT on packed rows of documents, each
in a process of its own, and their bytes.

determinism.py   two of them end with the same
resume.py        one that is killed ends with the same as one that is not
gpt_in_bf16.py   the GPT that was trained writes on the GPU what it writes on the CPU
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from questions import FOLDER, ROOT, code_digest, goal
from steps import spec_of
from texts import text_for

from spider.config import StageSpec
from spider.files import read_json
from spider.results import StageFolder

#: Large enough for every kernel that a large one runs, small enough that its checkpoints are.
MODEL: dict[str, Any] = {
    "hidden": 512,
    "ffn_hidden": 1024,
    "attention": {"heads": 4, "kv_lora_rank": 128},
    "moe": {"experts": 16, "expert_hidden": 256, "shared_hidden": 256},
    "engram": {"layers": [1], "table_size": 5003, "byte_orders": [3, 4]},
    "recurrence": {"layers": 3, "loops": 3},
}
#: The same of the GPT: windows that are shorter than rows, and heads that share keys. It reads bytes, which
#: are text, so that what it writes is likelier than the rest.
GPT_MODEL = {"hidden": 512, "layers": 4, "heads": 4, "kv_heads": 2, "short_window": 64}
GPT_SHAPE = {"seq_len": 256, "micro_batch": 32, "grad_accum": 2, "packing": "best_fit", "attend": "document"}
PATIENCE = 240
"""Seconds that one may take."""


def spec_for(name: str, rehearse: bool) -> StageSpec:
    """The training of this name, a precision or, of the GPT, ``gpt`` and one: compiled, with a checkpoint
    every few steps."""
    family, _, precision = name.rpartition(", ")
    steps, every = (12, 3) if rehearse else (60, 10)
    stage = {"max_steps": steps, "ckpt_every": every, "log_every": every, "warmup_steps": 5, "keep_last": 2}
    stage["ckpt_minutes"] = None
    if family == "gpt":
        size = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "short_window": 16}
        smaller = {"seq_len": 64, "micro_batch": 2} if rehearse else {}
        given = {"model": size if rehearse else GPT_MODEL, "defaults": {**GPT_SHAPE, **smaller}}
        given |= {"data": "text", "precision": precision, "compile": not rehearse}
        return spec_of(ROOT / "benchmarks/gpu/gpt.yaml", stage=stage, **given)
    if rehearse:
        return spec_of(ROOT / "presets/smoke.yaml", stage=stage, precision=precision, compile=False)
    shape = {"seq_len": 256, "micro_batch": 32, "grad_accum": 2, "n_loops": None, "lr": 1e-3}
    given = {"model": MODEL, "defaults": shape, "precision": precision, "compile": True}
    return spec_of(ROOT / "presets/spider-1b.yaml", stage=stage, **given)


def folder_for(name: str) -> Path:
    """Where one trains, apart for each state of the code."""
    return FOLDER / "work" / f"{name.replace(', ', '-')}-{code_digest()}"


def start(spec: StageSpec, folder: Path) -> subprocess.Popen[str]:
    """Begin a training, or go on with it."""
    order = json.dumps([spec.model_dump(mode="json"), str(folder), str(text_for(spec))])
    said: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__, order], **said)


def finish(process: subprocess.Popen[str]) -> None:
    """Wait until it has ended well; `RuntimeError` with its last line."""
    try:
        _, said = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise RuntimeError(f"hangs: not done in {PATIENCE} s") from None
    if process.returncode:
        lines = [line for line in said.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit status {process.returncode}")


def bytes_of(folder: Path) -> dict[str, Any]:
    """What a finished training came to: the digest of every tensor file, and its curve."""
    stage = StageFolder(folder)
    receipt = read_json(stage.receipt)
    held = read_json(folder / receipt["checkpoint"] / "manifest.json")["files"]
    rows = [json.loads(line) for line in stage.metrics.read_text().splitlines()]
    shown = ("train/loss", "train/grad_norm")
    curve = {f"step {row['step']}": [row["metrics"][name] for name in shown] for row in rows}
    return {name: of["sha256"] for name, of in held.items() if "safetensors" in name} | curve


def undisturbed(name: str, rehearse: bool) -> Path:
    """The folder of a training that nothing happens to, done once."""
    folder = folder_for(f"undisturbed, {name}")
    if not StageFolder(folder).receipt.exists():
        finish(start(spec_for(name, rehearse), folder))
    return folder


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same in both."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def said(row: dict[str, Any]) -> str:
    """Of a row that compares two."""
    same = "the same bytes" if not row["differ"] else f"DIFFERENT: {', '.join(map(str, row['differ'][:6]))}"
    kills = f" after {row['kills']} SIGKILLs" if "kills" in row else ""
    return f"{same}{kills} ({row['compared']} compared)"


def goals_of(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """That nothing differs in any row."""
    goals = []
    for name, row in rows.items():
        kills = f" after {row['kills']} kills" if "kills" in row else ""
        goals.append(goal(f"{name}: nothing differs{kills}", float(len(row["differ"])), lambda x: not x))
    return goals


def precisions(rehearse: bool) -> tuple[str, ...]:
    return ("fp32",) if rehearse else ("bf16", "fp8")


if __name__ == "__main__":
    from spider.training.stage import train

    given, at, text = json.loads(sys.argv[1])
    train(StageSpec.model_validate(given), Path(at), Path(text))
