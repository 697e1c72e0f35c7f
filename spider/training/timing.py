"""How the warm-up times things: the least of several calls, and the most memory in use meanwhile."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from spider.training.allocator import return_freed_memory
from spider.training.precision import Kind, Precision


def seconds_of(once: Callable[[], None], device: torch.device, budget: float) -> float:
    """Least time of one call, over calls until ``budget`` seconds are spent, one at least."""
    best, deadline = float("inf"), time.perf_counter() + budget
    while True:
        began = time.perf_counter()
        once()
        wait(device)
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended > deadline:
            return best


def milliseconds(part: nn.Module, x_MK: Tensor, kind: Kind, compiled: bool, budget: float) -> float:
    """Of forward and backward of a part of the model, for as many random rows as ``x_MK`` has."""
    if compiled:
        # Else the shapes count as recompilations of one function, which soon falls back to eager.
        torch.compiler.reset()
        part.compile()
    # Under autocast a real layer meets bf16 activations: the cast of its input is not its own cost.
    x_MK = x_MK.to(torch.float32 if kind == "fp32" else torch.bfloat16).requires_grad_()
    precision = Precision("fp32" if kind == "fp32" else "bf16", "measured")
    with precision.autocast(x_MK.device):
        dy_MN = torch.randn_like(part(x_MK))

    def once() -> None:
        with precision.autocast(x_MK.device):
            y_MN = part(x_MK)
        y_MN.backward(dy_MN)

    once()
    wait(x_MK.device)
    return round(1000 * seconds_of(once, x_MK.device, budget), 4)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Start counting the most memory in use anew; the process's goes on where the kernel does not
    let it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        return_freed_memory()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(device: torch.device) -> float:
    """Of the allocator on a GPU; of the whole process on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1)
