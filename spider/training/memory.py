"""Estimate the memory of a training process before it starts; check that a device has it, and fill it.

Weights, gradients and optimizer state are exact, because model and optimizer are built on the meta device.
Under FSDP a process holds a share of these three. While a micro-batch runs, it also holds two units and the
gradients of one, which are copied in fp32 to be sent. It holds all of what no unit has. (fp8 weights would be
smaller than counted here.) The family estimates the activations. Temporaries, the framework and the
allocator's overhead come on top.

Nothing is measured, because it would cost a compilation for each number of windows and each kind of
recomputation. torch's ``MemTracker`` counts a pass of fake tensors instead, in half a minute for a small GPT,
and not where a size depends on the data, as the Spider's do.

A training that cannot fit is refused before it starts, because its first step would fail only after minutes
of compiling. The estimate may be too high. Only a training whose lower bound does not fit is refused; one
whose estimate does not fit gets a warning.

``auto`` leaves the windows of a micro-batch, and what its backward pass recomputes, to the device (`fitted`).
A larger micro-batch has fewer and larger kernels, and recomputation multiplies again what it saves in memory.
The warm-up chooses, its record keeps the choice, and a stage that resumes keeps what it began with, because
another micro-batch draws other noise.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import psutil
import torch
from rich.filesize import decimal

from spider.checkpoints.records import Kind, Manifest, Warmup
from spider.common.errors import TrainingError
from spider.config import StageSpec, merged
from spider.config.spec import largest_divisor
from spider.model import build_model
from spider.model.interface import Model
from spider.processes.gpus import memory_bytes
from spider.processes.parallel import unit_parameters
from spider.training.optim import build_optimizer, narrow_weights
from spider.training.precision import decide, device_name

log = logging.getLogger(__name__)

#: Lower bound of the activations, as a fraction of the estimate.
_LEAST = 0.9


def meta_model(spec: StageSpec) -> Model:
    """Return the model of a stage on the meta device, with the dtypes that its weights train in."""
    with torch.device("meta"):
        model = build_model(spec.model)
    narrow_weights(model, spec.optimizer)
    return model


def training_memory(model: Model, spec: StageSpec, kind: Kind, device_type: str) -> dict[str, int]:
    """Return the bytes of each part that a process of a stage holds on a device, and their ``total``.

    Args:
        model: the stage's model; it may be on the meta device.
        kind: precision of the matrix products.
    """
    s = spec.settings
    narrow = kind != "fp32"
    state = build_optimizer(model, spec.optimizer, s.lr).tensors(model)
    memory = {
        "weights": _size([*model.parameters(), *model.buffers()]),
        "gradients": _size([p for p in model.parameters() if p.requires_grad]),
        "optimizer": _size(state.values()),
    }
    if narrow and "matrices" not in spec.optimizer.narrow:
        memory["autocast_copies"] = 2 * (model.num_parameters() - model.looked_up())
    shares = spec.processes if spec.parallel == "fsdp" else 1
    if shares > 1:
        sizes = [[_size(part) for part in parts] for parts in unit_parameters(model).values()]
        rest = memory["weights"] + memory["gradients"] - 2 * sum(map(sum, sizes))
        unit = 3 * max(map(sum, sizes), default=0) // (2 if narrow else 1)
        memory["gathered"] = rest + unit + max(chain(*sizes), default=0)
        if "autocast_copies" in memory:
            memory["autocast_copies"] = min(memory["autocast_copies"], rest // 4)
        memory |= {name: memory[name] // shares for name in ("weights", "gradients", "optimizer")}
    if s.ema:
        memory["average"] = 4 * model.num_parameters() // shares
    memory["activations"] = model.activation_bytes(
        spec.micro_batch(spec.processes),
        s.seq_len,
        spec.loops,
        narrow=narrow,
        compiled=spec.compiled_on(device_type, kind),
    )
    return {**memory, "total": sum(memory.values())}


def _size(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def check_fits(spec: StageSpec, kind: Kind, device: torch.device, processes: int = 1) -> None:
    """Check that this training fits into the device's memory, and log a warning if it may not fit.

    On a CPU other programs may free memory. There a training is refused only if its estimate is more than
    twice all memory and swap of the machine.

    Raises:
        TrainingError: the training does not fit; the message names what needs less.
    """
    spec = spec.model_copy(update={"processes": processes})
    least, likely = _needs(spec, kind, device.type)
    if device.type != "cuda":
        total = memory_bytes() + psutil.swap_memory().total
        if likely > 2 * total:
            s = spec.settings
            raise TrainingError(
                f"this training needs about {decimal(likely)} of memory, and this machine has "
                f"{decimal(total)} with swap; lower seq_len ({s.seq_len}) or micro_batch "
                f"({s.micro_batch}), or take a smaller model"
            )
        return
    free, total = torch.cuda.mem_get_info(device)
    has = f"{device_name(device)} has {decimal(total)}"
    if total - free > total // 20:
        taken = decimal(total - free)
        has += f", of which another process holds {taken} (nvidia-smi says which; end it)"
    if least > free:
        smaller = {}
        if spec.micro_batch(processes) > 1:
            smaller = {"windows_per_step": spec.windows_per_step, "micro_batch": "auto"}
        if spec.model.recomputing():
            smaller[f"model.{spec.model.RECOMPUTE}"] = spec.model.most_recomputed
        remedy = "take optimizer.kind: adamw8bit, a smaller model, or a larger GPU"
        if smaller:
            settings = ", ".join(f"{key}: {value}" for key, value in smaller.items())
            remedy = f"set {settings}; or {remedy}"
        needs = f"{decimal(likely)} of GPU memory, {decimal(least)} at least"
        raise TrainingError(f"this training needs {needs}, and {has}; {remedy}")
    if likely > free:
        log.warning("memory: this training may need %s, and %s", decimal(likely), has)


def _needs(spec: StageSpec, kind: Kind, device_type: str) -> tuple[int, int]:
    """Return a lower bound and the estimate of the bytes that a training needs."""
    memory = training_memory(meta_model(spec), spec, kind, device_type)
    spare = memory["activations"] * (1 - _LEAST)
    # With one micro-batch a step, gradients appear as activations are freed.
    if spec.windows_per_step == spec.processes * spec.micro_batch(spec.processes):
        spare += memory["gradients"]
    return int(memory["total"] - spare), memory["total"]


def ran_out(error: RuntimeError) -> bool:
    """Return whether a device or the machine had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def out_of_memory(spec: StageSpec, processes: int, where: str, error: object) -> str:
    """Return the error message for a step that ran out of memory."""
    s, model = spec.settings, spec.model
    more = model.most_recomputed if model.recomputes else "true"
    hint = f" or set model.{model.RECOMPUTE}: {more}" if model.recomputing() else ""
    remedy = ""
    if (held := spec.micro_batch(processes)) > 1:
        smaller = largest_divisor(held, held // 2)
        remedy = (
            f"set {' and '.join(f'{name}: {value}' for name, value in spec.cut(smaller).items())}. The stage "
            "then goes on from its last checkpoint with the same windows in a step. More passes take longer, "
            "and the result is not bit-equal: each micro-batch has its own noise and limit on patches. "
        )
    return (
        f"out of memory {where} with micro_batch {s.micro_batch}, seq_len {s.seq_len}, grad_accum "
        f"{s.grad_accum}: {remedy}A new training can lower seq_len{hint} ({error})"
    )


#: Share of the device's memory that the estimate may reach. Workspaces, the allocator's rounding and the
#: validation beside a captured graph take the rest.
SHARE = 0.85
#: Tokens of a micro-batch that less recomputation must leave, because smaller products fill no GPU.
_LEAST_TOKENS = 16_384
#: What a backward pass may recompute, the least first.
_WAYS = ("none", "selective", "full")


class Choice(NamedTuple):
    """What ``auto`` stands for."""

    micro_batch: int
    checkpointing: str | bool | None
    """None for a family that recomputes nothing."""


def is_open(spec: StageSpec) -> bool:
    """Return whether a stage leaves something to the device."""
    return "auto" in (spec.settings.micro_batch, spec.model.recomputes)


def fitted(
    spec: StageSpec,
    processes: int,
    device: torch.device,
    *,
    began: Manifest | None = None,
    warmup: Warmup | None = None,
) -> StageSpec:
    """Return a stage with numbers in the place of ``auto``.

    Args:
        processes: processes that share the windows of a step.
        began: manifest of the stage's own checkpoint, whose choice it keeps.
        warmup: record of the warm-up, which counts if it ran on such a device.
    """
    if not is_open(spec):
        return spec
    if began is not None:
        own = StageSpec.model_validate(began.spec)
        choice = Choice(own.micro_batch(began.processes), own.model.recomputes)
        why = "as the stage began"
    elif warmup is not None and warmup.micro_batch is not None and warmup.device == device_name(device):
        choice = Choice(warmup.micro_batch, warmup.checkpointing)
        why = "as the warm-up chose"
    else:
        total = memory_of(device)
        kind = decide(spec.precision, device, None).kind
        choice = choose(spec, processes, kind, device.type, total)
        why = f"the most that fits into {SHARE:.0%} of {total / 1e9:.1f} GB"
    way = choice.checkpointing or "none"
    log.info("micro_batch: %d windows, checkpointing: %s; %s", choice.micro_batch, way, why)
    return with_choice(spec, choice)


def with_choice(spec: StageSpec, choice: Choice) -> StageSpec:
    """Return a stage with a choice in the place of what it leaves open."""
    changes: dict[str, Any] = {}
    if spec.settings.micro_batch == "auto":
        changes["settings"] = {"micro_batch": choice.micro_batch}
    if spec.model.recomputes == "auto":
        changes["model"] = spec.model.recomputing(choice.checkpointing)
    return StageSpec.model_validate(merged(spec.model_dump(), changes))


def choose(spec: StageSpec, processes: int, kind: Kind, device_type: str, memory: int) -> Choice:
    """Return the largest micro-batch that fits, with the least recomputation that leaves it `_LEAST_TOKENS`.

    If nothing fits, the choice is the smallest. `spider.training.memory.check_fits` says what would.

    Args:
        memory: bytes of the device.
    """
    spec = spec.model_copy(update={"processes": processes})
    share = spec.windows_per_step // processes
    is_auto = spec.settings.micro_batch == "auto"
    most = spec.micro_batch(processes)
    ways = _WAYS if spec.model.recomputes == "auto" else (spec.model.recomputes,)

    def limit(way: str | bool) -> int:
        """Return the most windows that fit, of `most` or below; 0 if none do."""
        changed = with_choice(spec, Choice(most, way))
        model = meta_model(changed)

        def fits(windows: int) -> bool:
            only = {"micro_batch": windows, "grad_accum": 1, "windows_per_step": windows * processes}
            alone = changed.model_copy(update={"settings": changed.settings.model_copy(update=only)})
            return training_memory(model, alone, kind, device_type)["total"] <= SHARE * memory

        if not is_auto:
            return most * fits(most)
        return bisect_left(range(1, most + 1), True, key=lambda windows: not fits(windows))

    limits = list(map(limit, ways))
    cuts = [largest_divisor(share, max(1, limit)) for limit in limits]
    least = min(share, -(-_LEAST_TOKENS // spec.settings.seq_len))
    enough = [i for i, cut in enumerate(cuts) if limits[i] and cut >= least]
    fitting = [i for i, limit in enumerate(limits) if limit]
    chosen = (enough or fitting[-1:] or [-1])[0] if is_auto else (fitting or [-1])[0]
    if is_auto and 2 * cuts[chosen] < limits[chosen]:
        passes = -(-share // limits[chosen])
        log.warning(
            "micro_batch: auto has %d windows, because no number from there to the %d that would fit divides "
            "the %d windows of each process; windows_per_step: %d would have %d passes of %d",
            cuts[chosen], limits[chosen], share, limits[chosen] * passes * processes, passes, limits[chosen],
        )  # fmt: skip
    return Choice(cuts[chosen] if is_auto else most, ways[chosen])


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory of a device, or of the machine or the container for a CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else memory_bytes()
