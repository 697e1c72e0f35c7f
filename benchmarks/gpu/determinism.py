"""The same twice: do two trainings end with the same bytes, and two passes with the same gradients?

    python benchmarks/gpu/determinism.py

Trainings are short ones of a model with all parts, and of a GPT over packed documents, in a process each; the
gradients are spider-1b's, of one micro-batch of the headline's shape, and gpt-d12's, of 8 packed rows and not
compiled, three times in one process. A parameter whose gradient differs names the kernel to look at: sums of
floats by atomics come in another order each time.
"""

from __future__ import annotations

import gc
import shutil
from functools import partial
from typing import Any

import questions
import torch
from questions import ROOT
from steps import spec_of
from texts import text_for
from train_throughput import GPT, HEADLINE, PRESET
from trainings import (
    GPT_SHAPE,
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
from spider.data.loader import Loader, beside, to_device
from spider.data.packing import PackedRows
from spider.data.shards import Shards
from spider.model import build_model, choose_kernels
from spider.processes.parallel import compile_forward
from spider.training.determinism import one_order
from spider.training.precision import compiles, decide


def main() -> None:
    chosen = questions.parser(__doc__).parse_args()
    question = questions.Question("determinism", chosen, goals_of)
    several = precisions(chosen.rehearse)
    for name in (*several, f"gpt, {several[0]}"):
        question.measure(f"training, {name}", 200, partial(twice, name, chosen.rehearse), said)
    size = {"hidden": 64, "layers": 2, "heads": 2} if chosen.rehearse else {}
    shape = {**GPT_SHAPE, "seq_len": 64 if chosen.rehearse else 2048, "micro_batch": 8, "grad_accum": 1}
    gpt = spec_of(GPT, precision=several[0], compile=False, model=size, defaults=shape)
    question.measure("gradients, gpt", 60, partial(gradients, gpt), said)
    configuration, changes = PRESET, {"precision": "bf16", "defaults": {**HEADLINE, "grad_accum": 1}}
    if chosen.rehearse:
        configuration, changes = ROOT / "presets/smoke.yaml", {"precision": "fp32", "compile": False}
    question.measure("gradients", 330, partial(gradients, spec_of(configuration, **changes)), said)
    question.end()


def twice(name: str, rehearse: bool) -> dict[str, Any]:
    """Two trainings, and what differs in their bytes."""
    first = bytes_of(undisturbed(name, rehearse))
    shutil.rmtree(folder := folder_for(f"again, {name}"), ignore_errors=True)
    finish(start(spec_for(name, rehearse), folder))
    second = bytes_of(folder)
    return {"compared": len(first), "differ": differences(first, second)}


def gradients(spec: StageSpec) -> dict[str, Any]:
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
    shards, rows = Shards(data := text_for(spec), "train"), None
    if spec.settings.packing == "best_fit":
        rows = PackedRows.open(data, shards, spec.settings.seq_len)
        model.most_documents = rows.packing.most_pieces
    loader = Loader(shards, seed=0, packed=rows, **shape)
    batch = next(loader)
    tokens_BT, labels_BT = to_device(batch, device, model.tokens.pad)
    given = beside(batch, device, spec.settings.attend == "document")
    loader.close()

    def once() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        with precision.autocast(device):
            loss = model(tokens_BT, labels_BT, n_loops=spec.settings.n_loops, **given).loss
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
