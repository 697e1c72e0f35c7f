"""Compare trainings by their bytes: two alike, and one that is killed; and gradients of one micro-batch.

    python benchmarks/gpu/determinism.py

Rows:
    training   Two short trainings, each in a process of its own: of the Spider and of a GPT on packed rows.

    killed     A training that SIGKILL ends `KILLS` times, each soon after a new checkpoint. torture.py kills
               more and on any machine. Here the device's arithmetic and compiled code have to start again.

    gradients  Those of one micro-batch, three times: spider-1b's at the headline's shape, and gpt-d12's on 8
               packed rows, not compiled. A parameter whose gradient differs names the kernel to look at.
               Sums by atomics come in another order each time.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import questions
import torch
from questions import Row, goal
from texts import text_for
from trainings import (
    GPT,
    GPT_SHAPE,
    HEADLINE,
    PRESET,
    SECONDS,
    SLOW,
    SMOKE,
    folder_for,
    short_training,
    spec_of,
    start,
    undisturbed,
)

from spider.checkpoints import records
from spider.config import StageSpec
from spider.data.loader import Loader, model_arguments, to_device
from spider.data.packing import PackedRows
from spider.data.shards import Shards
from spider.files import read_json
from spider.model import build_model, choose_kernels
from spider.processes.device import make_deterministic
from spider.processes.parallel import compile_forward
from spider.results import StageFolder
from spider.training.precision import compiles, decide

KILLS = 2


def main(chosen: argparse.Namespace) -> int:
    rehearse = chosen.rehearse
    question = questions.Question("determinism", chosen, goals_of)
    precisions = ("fp32",) if rehearse else ("bf16", "fp8")
    for name in (*precisions, f"gpt, {precisions[0]}"):
        question.measure(f"training, {name}", 200, partial(twice, name, rehearse), describe)
    shape = {**GPT_SHAPE, "seq_len": 64 if rehearse else 2048, "micro_batch": 8, "grad_accum": 1}
    size = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2} if rehearse else {}
    data = "text" if rehearse else "ids"
    gpt = spec_of(GPT, data=data, precision=precisions[0], compile=False, model=size, defaults=shape)
    question.measure("gradients, gpt", 60, partial(gradients, gpt), describe)
    if rehearse:
        spec = spec_of(SMOKE, **SLOW)
    else:
        spec = spec_of(PRESET, precision="bf16", defaults={**HEADLINE, "grad_accum": 1})
    question.measure("gradients", 330, partial(gradients, spec), describe)
    for precision in precisions:
        question.measure(f"killed, {precision}", 300, partial(killed, precision, rehearse), describe)
    return question.end()


def twice(name: str, rehearse: bool) -> dict[str, Any]:
    """Train twice and compare the bytes."""
    first = result_of(undisturbed(name, rehearse))
    folder = folder_for(f"again, {name}")
    shutil.rmtree(folder, ignore_errors=True)
    questions.finish(*start(short_training(name, rehearse), folder), seconds=SECONDS)
    return {"compared": len(first), "differ": differences(first, result_of(folder))}


def killed(precision: str, rehearse: bool) -> dict[str, Any]:
    """Kill a training, finish it, and compare it with one that was left alone."""
    alone = result_of(undisturbed(precision, rehearse))
    spec, folder = short_training(precision, rehearse), folder_for(f"killed, {precision}")
    shutil.rmtree(folder, ignore_errors=True)
    rng = random.Random(0)
    struck = [kill(spec, folder, rng) for _ in range(1 if rehearse else KILLS)]
    steps = [step for step in struck if step is not None]
    if not steps:
        raise RuntimeError("it ended before it could be killed")
    questions.finish(*start(spec, folder), seconds=SECONDS)
    differ = differences(alone, result_of(folder))
    return {"compared": len(alone), "differ": differ, "kills": len(steps), "killed_after_steps": steps}


def kill(spec: StageSpec, folder: Path, rng: random.Random) -> int | None:
    """Train until there is a new checkpoint and a moment longer, then kill the training.

    Returns:
        The step of the checkpoint, or None if the training ended before.
    """
    checkpoints = StageFolder(folder).checkpoints
    known = newest(checkpoints)
    process, result = start(spec, folder)
    deadline = time.monotonic() + SECONDS
    while newest(checkpoints) == known and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))
    if not process.is_alive():
        questions.finish(process, result, seconds=1)
        return None
    process.kill()
    process.join()
    return newest(checkpoints)


def newest(checkpoints: Path) -> int | None:
    found = records.steps(checkpoints)
    return records.step_of(found[-1]) if found else None


def result_of(folder: Path) -> dict[str, Any]:
    """Return the digest of each tensor file of a finished training, and its curve."""
    stage = StageFolder(folder)
    receipt = read_json(stage.receipt)
    files = read_json(folder / receipt["checkpoint"] / "manifest.json")["files"]
    found: dict[str, Any] = {name: of["sha256"] for name, of in files.items() if "safetensors" in name}
    for line in stage.metrics.read_text().splitlines():
        row = json.loads(line)
        found[f"step {row['step']}"] = [row["metrics"][name] for name in ("train/loss", "train/grad_norm")]
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names whose values differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def gradients(spec: StageSpec) -> dict[str, Any]:
    """Compute the gradients of one micro-batch three times; name the parameters whose gradients differ."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choose_kernels(spec.kernels)
    make_deterministic(device)
    model = build_model(spec.model).to(device).train()
    precision = decide(spec.precision, spec.fp8_recipe, device, None)
    precision.prepare(model)
    if compiles(spec, precision.kind, device):
        compile_forward(model)
    settings = spec.settings
    data = text_for(spec)
    shards, rows = Shards(data, "train"), None
    if settings.packing == "best_fit":
        rows = PackedRows.open(data, shards, settings.seq_len)
        model.most_documents = rows.packing.most_pieces
    loader = Loader(shards, seq_len=settings.seq_len, rows=settings.micro_batch, seed=0, packed=rows)
    batch = next(loader)
    loader.close()
    tokens_BT, labels_BT = to_device(batch, device, model.tokens.pad)
    packed = model_arguments(batch, device, settings.attend == "document")

    def once() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        with precision.autocast(device):
            loss = model(tokens_BT, labels_BT, n_loops=settings.n_loops, **packed).loss
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    first = once()
    distance: dict[str, float] = {}
    for _ in range(2):
        for name, gradient in once().items():
            if not torch.equal(gradient, first[name]):
                share = (torch.dist(gradient, first[name]) / first[name].norm()).item()
                distance[name] = max(share, distance.get(name, 0.0))
    differ = [f"{name} by {share:.1e} of its norm" for name, share in sorted(distance.items())]
    compared = len(first)
    first.clear()
    model.zero_grad()
    model.to("meta")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"compared": compared, "differ": differ}


def describe(row: Row) -> str:
    same = "the same bytes" if not row["differ"] else f"DIFFERENT: {', '.join(row['differ'][:6])}"
    kills = f" after {row['kills']} SIGKILLs" if "kills" in row else ""
    return f"{same}{kills} ({row['compared']} compared)"


def goals_of(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    return [
        goal(f"{name}: no difference", float(len(row["differ"])), lambda x: not x)
        for name, row in rows.items()
    ]


if __name__ == "__main__":
    sys.exit(main(questions.parser(__doc__).parse_args()))
