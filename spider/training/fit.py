"""Choose what ``auto`` leaves to the device: the windows of a micro-batch, and what its backward pass
recomputes.

A larger micro-batch has fewer and larger kernels, and recomputation multiplies again what it saves in memory.
Both are limited by the estimate of `spider.training.memory`, which may reach `SHARE` of the device. The
warm-up chooses, its record keeps the choice, and a stage that resumes keeps what it began with, because
another micro-batch draws other noise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spider.checkpoints.records import Manifest
from spider.config import StageSpec, merged
from spider.config.spec import largest_divisor
from spider.processes.bounds import memory_bytes
from spider.training.memory import meta_model, training_memory
from spider.training.precision import decide, device_name
from spider.training.warmup_record import Kind, Warmup

log = logging.getLogger(__name__)

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

        return _largest(most, fits) if is_auto else most * fits(most)

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


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``most`` that fits; 0 if 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory of a device, or of the machine or the container for a CPU."""
    if device.type != "cuda":
        return memory_bytes()
    _, total = torch.cuda.mem_get_info(device)
    return int(total)
