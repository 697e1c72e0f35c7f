"""The same twice: do two trainings end with the same bytes, and two passes with the same gradients?

    python benchmarks/gpu/determinism.py

Trainings are short ones of a model with all parts, in a process each; the gradients are spider-1b's, of one
micro-batch of the headline's shape, three times in one process. A parameter whose gradient differs names the
kernel to look at: sums of floats by atomics come in another order each time.
"""

from __future__ import annotations

import gc
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import questions
import torch
from questions import ROOT, corpus
from steps import spec_of
from train_throughput import HEADLINE, PRESET
from trainings import (
    bytes_of,
    differences,
    finish,
    folder_for,
    goals_of,
    precisions,
    said,
    spec_for,
    start,
    undisturbed,
)

from spider.config import StageSpec
from spider.data.loader import Loader, to_device
from spider.data.shards import Shards
from spider.model import build_model, choose_kernels
from spider.processes.parallel import compile_forward
from spider.training.determinism import one_order
from spider.training.precision import compiles, decide


def main() -> None:
    chosen = questions.parser(__doc__).parse_args()
    question = questions.Question("determinism", chosen, goals_of)
    data = corpus()[1]
    for precision in precisions(chosen.rehearse):
        call = partial(twice, precision, chosen.rehearse, data)
        question.measure(f"training, {precision}", 200, call, said)
    configuration, changes = PRESET, {"precision": "bf16", "defaults": {**HEADLINE, "grad_accum": 1}}
    if chosen.rehearse:
        configuration, changes = ROOT / "presets/smoke.yaml", {"precision": "fp32", "compile": False}
    spec = spec_of(configuration, **changes)
    question.measure("gradients", 330, partial(gradients, spec, data), said)
    question.end()


def twice(precision: str, rehearse: bool, data: Path) -> dict[str, Any]:
    """Two trainings, and what differs in their bytes."""
    first = undisturbed(precision, rehearse, data)
    shutil.rmtree(folder := folder_for(f"again, {precision}"), ignore_errors=True)
    finish(start(spec_for(precision, rehearse), folder, data))
    second = bytes_of(folder)
    return {"compared": len(first), "differ": differences(first, second)}


def gradients(spec: StageSpec, data: Path) -> dict[str, Any]:
    """Of one micro-batch three times: the parameters whose gradients differ, by how much of their norm."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choose_kernels(spec.kernels)
    one_order(device)
    model = build_model(spec.model).to(device).train()
    precision = decide(spec.precision, spec.fp8_recipe, device, None)
    precision.prepare(model)
    if compiles(spec, precision.kind, device):
        compile_forward(model, spec.depths)
    shape = {"seq_len": spec.settings.seq_len, "rows": spec.settings.micro_batch}
    loader = Loader(Shards(data, "train"), seed=0, **shape)
    tokens_BT, labels_BT = to_device(next(loader), device, model.tokens.pad)
    loader.close()

    def once() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        with precision.autocast(device):
            loss = model(tokens_BT, labels_BT, n_loops=spec.settings.n_loops).loss
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    first, off = once(), {}
    for _ in range(2):
        for name, gradient in once().items():
            if not torch.equal(gradient, first[name]):
                by = (torch.dist(gradient, first[name]) / first[name].norm()).item()
                off[name] = max(by, off.get(name, 0.0))
    found = {"compared": len(first), "differ": [f"{n} by {by:.1e}" for n, by in sorted(off.items())]}
    first.clear()
    model.zero_grad()
    model.to("meta")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    main()
