"""Memory of a process that trains, counted before any is taken, and whether a GPU has it.

Weights, gradients and optimizer state are exact: the model is built on the meta device, and its optimizer as
well. Under FSDP a process holds a share of these three, and while a micro-batch runs all weights and
gradients (fp8 weights would be smaller than what is counted here). Activations are the family's estimate;
temporaries, the framework and the allocator's rest come on top.

A training that cannot fit is refused before it begins, and not by its first step, minutes of compiling later.
The estimate may be too high: what is too much by the lowest figure that it can mean is refused, and the log
warns of what is likely to be too much.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import psutil
import torch

from spider.config import StageSpec, merged
from spider.errors import TrainingError
from spider.model import build_model
from spider.model.interface import Model
from spider.report.formatting import quantity
from spider.training.optim import build_optimizer, narrow_weights
from spider.training.precision import device_name
from spider.training.warmup_record import Kind

log = logging.getLogger(__name__)

#: Of the estimated activations, as much is kept at least.
_LEAST = 0.9


def meta_model(spec: StageSpec) -> Model:
    """The model of a stage with no memory behind its weights, which have the dtypes that they train in."""
    with torch.device("meta"):
        model = build_model(spec.model)
    narrow_weights(model, spec.optimizer)
    return model


def fixed_memory(model: Model, spec: StageSpec, narrow: bool) -> dict[str, int]:
    """Bytes by part that a process holds whatever the batch; ``narrow``: products run in two bytes."""
    state = build_optimizer(model, spec.optimizer, spec.settings.lr).tensors(model)
    fixed = {
        "weights": _size([*model.parameters(), *model.buffers()]),
        "gradients": _size([p for p in model.parameters() if p.requires_grad]),
        "optimizer": _size(state.values()),
    }
    if narrow and spec.optimizer.master_weights == "fp32":
        fixed["autocast_copies"] = 2 * (model.num_parameters() - model.looked_up())
    if (shares := _shares(spec)) > 1:
        gathered = fixed["weights"] + fixed["gradients"]
        fixed |= {name: fixed[name] // shares for name in ("weights", "gradients", "optimizer")}
        fixed["gathered"] = gathered
    return fixed


def stage_memory(
    model: Model, spec: StageSpec, fixed: dict[str, int], *, narrow: bool, compiled: bool
) -> dict[str, int]:
    """``fixed`` and what the stage's batch takes, and the ``total``."""
    s, memory = spec.settings, dict(fixed)
    if s.ema:
        memory["average"] = 4 * model.num_parameters() // _shares(spec)
    windows = spec.micro_batch(spec.processes)
    how = {"narrow": narrow, "compiled": compiled}
    memory["activations"] = model.activation_bytes(windows, s.seq_len, spec.loops, **how)
    return {**memory, "total": sum(memory.values())}


def _shares(spec: StageSpec) -> int:
    return spec.processes if spec.parallel == "fsdp" else 1


def _size(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def check_fits(spec: StageSpec, kind: Kind, device: torch.device, processes: int = 1) -> None:
    """Raise `TrainingError` where a GPU cannot hold this training, with a change that would fit. Where it is
    only likely not to, log a warning.

    On a CPU other programs may free memory, so only a training is refused whose estimate is twice as high as
    all memory and swap of the machine.
    """
    if device.type != "cuda":
        _check_machine(spec.model_copy(update={"processes": processes}), kind)
        return
    spec = spec.model_copy(update={"processes": processes})
    free, total = torch.cuda.mem_get_info(device)
    least, likely = _needs(spec, kind)
    has = f"{device_name(device)} has {quantity(total, 'B')}"
    if (taken := total - free) > total // 20:
        has += f", of which another process holds {quantity(taken, 'B')} (nvidia-smi says which; end it)"
    if least > free:
        needs = f"this training needs {quantity(likely, 'B')} of GPU memory, {quantity(least, 'B')} at least"
        raise TrainingError(f"{needs}, and {has}; {_what_fits(spec, kind, free)}")
    if likely > free:
        log.warning("memory: this training may need %s, and %s", quantity(likely, "B"), has)


def _check_machine(spec: StageSpec, kind: Kind) -> None:
    """Raise `TrainingError` where a training needs far more than the memory and swap of this machine."""
    _, likely = _needs(spec, kind, "cpu")
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    if likely > 2 * total:
        s = spec.settings
        needs = f"this training needs about {quantity(likely, 'B')} of memory"
        remedy = f"lower seq_len ({s.seq_len}) or micro_batch ({s.micro_batch}), or take a smaller model"
        raise TrainingError(f"{needs}, and this machine has {quantity(total, 'B')} with swap; {remedy}")


def _needs(spec: StageSpec, kind: Kind, device_type: str = "cuda") -> tuple[int, int]:
    """Return the bytes that a training needs at least, and those of the estimate."""
    model, how = meta_model(spec), _how(spec, kind, device_type)
    memory = stage_memory(model, spec, fixed_memory(model, spec, how["narrow"]), **how)
    spare = memory["activations"] * (1 - _LEAST)
    # The first gradients are made when activations go.
    if spec.windows_per_step == spec.processes * spec.micro_batch(spec.processes):
        spare += memory["gradients"]
    return int(memory["total"] - spare), memory["total"]


def _how(spec: StageSpec, kind: Kind, device_type: str = "cuda") -> dict[str, bool]:
    """Return how a device of this type runs a training: in two bytes, compiled."""
    return {"narrow": kind != "fp32", "compiled": spec.compiled_on(device_type, kind)}


def _what_fits(spec: StageSpec, kind: Kind, free: int) -> str:
    """The first of ever greater changes with which the estimate is within what is free: fewer windows at once
    (a step is then the same windows in more pieces), recomputation, a quantized optimizer."""
    s, recompute, how = spec.settings, spec.model.recomputing(), _how(spec, kind)
    for optimizer in ({}, {"kind": "adamw8bit"}):
        for block in ({}, recompute) if recompute else ({},):
            changed = _changed(spec, optimizer=optimizer, model=block)
            model = meta_model(changed)
            fixed = fixed_memory(model, changed, how["narrow"])
            for micro in (m for m in range(s.micro_batch, 0, -1) if s.micro_batch % m == 0):
                batch = {"micro_batch": micro, "grad_accum": s.grad_accum * s.micro_batch // micro}
                likely = stage_memory(model, _changed(changed, settings=batch), fixed, **how)["total"]
                if likely <= free:
                    said = [f"{name}: {value}" for name, value in batch.items()]
                    said += [f"model.{spec.model.RECOMPUTE}: {spec.model.most_recomputed}"] if block else []
                    said += [f"optimizer.kind: {kind}" for kind in optimizer.values()]
                    return f"what would fit: {', '.join(said)} ({quantity(likely, 'B')})"
    return "nothing that leaves the model as it is would fit: take a smaller model, or a larger GPU"


def out_of_memory(spec: StageSpec, step: int, error: BaseException) -> str:
    """What to say of a step that took more than there was."""
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
