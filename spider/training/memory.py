"""Estimate the memory of a training process before it starts, and check that a GPU has it.

Weights, gradients and optimizer state are exact, because model and optimizer are built on the meta device.
Under FSDP a process holds a share of these three. While a micro-batch runs, it also holds all weights and
gradients (fp8 weights would be smaller than counted here). The family estimates the activations. Temporaries,
the framework and the allocator's overhead come on top.

A training that cannot fit is refused before it starts, because its first step would fail only after minutes
of compiling. The estimate may be too high. Only a training whose lower bound does not fit is refused; one
whose estimate does not fit gets a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import psutil
import torch
from rich.filesize import decimal

from spider.config import StageSpec, merged
from spider.errors import TrainingError
from spider.model import build_model
from spider.model.interface import Model
from spider.training.optim import build_optimizer, narrow_weights
from spider.training.precision import device_name
from spider.training.warmup_record import Kind

log = logging.getLogger(__name__)

#: Lower bound of the activations, as a fraction of the estimate.
_LEAST = 0.9


def meta_model(spec: StageSpec) -> Model:
    """Return the model of a stage on the meta device, with the dtypes that its weights train in."""
    with torch.device("meta"):
        model = build_model(spec.model)
    narrow_weights(model, spec.optimizer)
    return model


def fixed_memory(model: Model, spec: StageSpec, narrow: bool) -> dict[str, int]:
    """Return the bytes, by part, that a process holds for any batch size.

    ``narrow`` means that matrix products run in two bytes a value.
    """
    state = build_optimizer(model, spec.optimizer, spec.settings.lr).tensors(model)
    fixed = {
        "weights": _size([*model.parameters(), *model.buffers()]),
        "gradients": _size([p for p in model.parameters() if p.requires_grad]),
        "optimizer": _size(state.values()),
    }
    if narrow and spec.optimizer.master_weights == "fp32":
        fixed["autocast_copies"] = 2 * (model.num_parameters() - model.looked_up())
    shares = _shares(spec)
    if shares > 1:
        gathered = fixed["weights"] + fixed["gradients"]
        fixed |= {name: fixed[name] // shares for name in ("weights", "gradients", "optimizer")}
        fixed["gathered"] = gathered
    return fixed


def stage_memory(
    model: Model, spec: StageSpec, fixed: dict[str, int], *, narrow: bool, compiled: bool
) -> dict[str, int]:
    """Return ``fixed`` with the bytes of the stage's batch and the ``total``."""
    s = spec.settings
    memory = dict(fixed)
    if s.ema:
        memory["average"] = 4 * model.num_parameters() // _shares(spec)
    windows = spec.micro_batch(spec.processes)
    memory["activations"] = model.activation_bytes(
        windows, s.seq_len, spec.loops, narrow=narrow, compiled=compiled
    )
    return {**memory, "total": sum(memory.values())}


def _shares(spec: StageSpec) -> int:
    return spec.processes if spec.parallel == "fsdp" else 1


def _size(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def check_fits(spec: StageSpec, kind: Kind, device: torch.device, processes: int = 1) -> None:
    """Check that this training fits into the GPU's memory, and log a warning if it may not fit.

    On a CPU other programs may free memory. There a training is refused only if its estimate is more than
    twice all memory and swap of the machine.

    Raises:
        TrainingError: the training does not fit; the message names a change that fits.
    """
    spec = spec.model_copy(update={"processes": processes})
    if device.type != "cuda":
        _check_machine(spec, kind)
        return
    free, total = torch.cuda.mem_get_info(device)
    least, likely = _needs(spec, kind, "cuda")
    has = f"{device_name(device)} has {decimal(total)}"
    if total - free > total // 20:
        taken = decimal(total - free)
        has += f", of which another process holds {taken} (nvidia-smi says which; end it)"
    if least > free:
        raise TrainingError(
            f"this training needs {decimal(likely)} of GPU memory, {decimal(least)} at least, "
            f"and {has}; {_what_fits(spec, kind, free)}"
        )
    if likely > free:
        log.warning("memory: this training may need %s, and %s", decimal(likely), has)


def _check_machine(spec: StageSpec, kind: Kind) -> None:
    """Raise `TrainingError` if a training needs far more than the memory and swap of this machine."""
    _, likely = _needs(spec, kind, "cpu")
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    if likely > 2 * total:
        s = spec.settings
        raise TrainingError(
            f"this training needs about {decimal(likely)} of memory, and this machine has "
            f"{decimal(total)} with swap; lower seq_len ({s.seq_len}) or micro_batch "
            f"({s.micro_batch}), or take a smaller model"
        )


def _needs(spec: StageSpec, kind: Kind, device_type: str) -> tuple[int, int]:
    """Return a lower bound and the estimate of the bytes that a training needs."""
    model = meta_model(spec)
    narrow = kind != "fp32"
    fixed = fixed_memory(model, spec, narrow)
    memory = stage_memory(model, spec, fixed, narrow=narrow, compiled=spec.compiled_on(device_type, kind))
    spare = memory["activations"] * (1 - _LEAST)
    # With one micro-batch a step, gradients appear as activations are freed.
    if spec.windows_per_step == spec.processes * spec.micro_batch(spec.processes):
        spare += memory["gradients"]
    return int(memory["total"] - spare), memory["total"]


def _what_fits(spec: StageSpec, kind: Kind, free: int) -> str:
    """Return the smallest change whose estimate fits into the free memory.

    The changes in order: fewer windows at once (a step is then the same windows in more pieces),
    recomputation, a quantized optimizer.
    """
    s, recompute = spec.settings, spec.model.recomputing()
    narrow = kind != "fp32"
    for optimizer in ({}, {"kind": "adamw8bit"}):
        for block in ({}, recompute) if recompute else ({},):
            changed = _changed(spec, optimizer=optimizer, model=block)
            model = meta_model(changed)
            fixed = fixed_memory(model, changed, narrow)
            compiled = spec.compiled_on("cuda", kind)
            for micro in (m for m in range(s.micro_batch, 0, -1) if s.micro_batch % m == 0):
                batch = {"micro_batch": micro, "grad_accum": s.grad_accum * s.micro_batch // micro}
                candidate = _changed(changed, settings=batch)
                likely = stage_memory(model, candidate, fixed, narrow=narrow, compiled=compiled)["total"]
                if likely <= free:
                    changes = [f"{name}: {value}" for name, value in batch.items()]
                    changes += (
                        [f"model.{spec.model.RECOMPUTE}: {spec.model.most_recomputed}"] if block else []
                    )
                    changes += [f"optimizer.kind: {kind}" for kind in optimizer.values()]
                    return f"what would fit: {', '.join(changes)} ({decimal(likely)})"
    return "no change that keeps the model would fit: take a smaller model, or a larger GPU"


def out_of_memory(spec: StageSpec, step: int, error: BaseException) -> str:
    """Return the error message for a step that ran out of memory."""
    s, model = spec.settings, spec.model
    more = model.most_recomputed if model.recomputes else "true"
    hint = f" or set model.{model.RECOMPUTE}: {more}" if model.recomputing() else ""
    return (
        f"out of memory at step {step} with micro_batch {s.micro_batch}, seq_len {s.seq_len}, grad_accum "
        f"{s.grad_accum}: halve micro_batch and double grad_accum (the same batch in more pieces), or lower "
        f"seq_len{hint} ({error})"
    )


def _changed(spec: StageSpec, **blocks: Any) -> StageSpec:
    return StageSpec.model_validate(merged(spec.model_dump(), blocks))
