"""Time calls on a GPU, and count what each launches.

Ways take turns, one call each, so a slow moment affects all alike. Before each call 512 MB are read. That
puts other data into the L2 cache (50 MB on an H100) and lets the host run ahead, so the events around a call
measure the device and not Python. A call whose host time exceeds that (170 us on an H100) shows it: ``us`` is
what a user of uncompiled code waits for. ``replayed_us`` is the same call replayed as a CUDA graph, without
the host. Both are medians. A call that waits for the device cannot be in a graph. The memory of a call comes
from torch's allocator and does not count.

On a CPU ``us`` is measured by the clock, and launches and graphs are missing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType

from kernels import switch

FLUSHED = 512 * 10**6
SETTLE = 3
"""Untimed calls of each way, for compilation, autotuning and the allocator."""


class Way(NamedTuple):
    call: Callable[[], Any]
    kernels: switch.Mode = "torch"
    """Choice of ``kernels.switch`` for the call."""
    gives: str | None = None
    """The way whose result it must give (None: its result is not compared)."""
    off: float = 0.01
    """Largest distance as a share of the norm. Sums of bfloat16 in another order differ by less."""
    moved: int | None = None
    """Bytes that the call must move."""


def measure(ways: Mapping[str, Way], device: torch.device, repeats: int) -> dict[str, dict[str, Any]]:
    """Time the ways in turn.

    Returns:
        For each way its ``bytes``, ``us``, ``replayed_us``, ``launches`` and ``parts``.

        ``replayed_us`` is None without a graph, and ``graph_error`` may say why. ``launches`` is None on a
        CPU. ``parts`` holds name, microseconds and calls of each kernel. A way that failed has only its
        ``error``, one line. A result that is too far off is an error, because its figures mean nothing.
    """
    found: dict[str, dict[str, Any]] = {}
    calls: dict[tuple[str, str], tuple[switch.Mode, Callable[[], Any]]] = {}
    with _own_stream(device):
        for name, way in ways.items():
            try:
                switch.choose(way.kernels)
                for _ in range(SETTLE):
                    result = way.call()
                found[name] = {"bytes": way.moved, "replayed_us": None, **_launches(way.call, device)}
                if way.gives and way.gives != name:
                    _compare(result, ways[way.gives], way.off)
                del result
                calls[name, "us"] = way.kernels, way.call
            except Exception as error:  # the other ways are measured whichever error ends this one
                found[name] = {"error": _first_line(error)}
                continue
            try:
                if device.type == "cuda" and not _waits(way.call):
                    calls[name, "replayed_us"] = way.kernels, _graph_of(way.call).replay
            except Exception as error:
                found[name]["graph_error"] = _first_line(error)
        for (name, figure), seconds in _in_turn(calls, device, repeats).items():
            found[name][figure] = 1e6 * median(seconds)
    switch.choose("auto")
    return found


def _own_stream(device: torch.device) -> Any:
    """Enter a stream that can capture graphs.

    A backward pass inside a graph needs its forward pass on the same stream.
    """
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.synchronize()
    return torch.cuda.stream(torch.cuda.Stream())


def _graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph


def _waits(call: Callable[[], Any]) -> bool:
    """Return whether the call waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _in_turn(
    calls: Mapping[Any, tuple[switch.Mode, Callable[[], Any]]], device: torch.device, repeats: int
) -> dict[Any, list[float]]:
    """Return the seconds of each call, each time."""
    marks: dict[Any, list[tuple[Any, Any]]] = defaultdict(list)
    if device.type == "cuda":
        other_data = torch.ones(FLUSHED // 4, device=device)
        for _ in range(repeats):
            for name, (kernels, call) in calls.items():
                switch.choose(kernels)
                other_data.sum()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                marks[name].append((begin, end))
        torch.cuda.synchronize()
        return {
            name: [begin.elapsed_time(end) / 1e3 for begin, end in pairs] for name, pairs in marks.items()
        }
    for _ in range(repeats):
        for name, (kernels, call) in calls.items():
            switch.choose(kernels)
            began = time.perf_counter()
            call()
            marks[name].append((began, time.perf_counter()))
    return {name: [end - begin for begin, end in pairs] for name, pairs in marks.items()}


def _launches(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return the kernels, copies and memory sets of one call, counted by CUPTI."""
    if device.type != "cuda":
        call()
        return {"launches": None, "parts": []}
    torch.cuda.synchronize()
    # The first profile of a process may come too late for its first kernels.
    for _ in range(2):
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
            call()
            torch.cuda.synchronize()
    took = kernel_times(profiler)
    parts = sorted(([name, sum(us), len(us)] for name, us in took.items()), key=lambda part: -part[1])
    return {"launches": sum(part[2] for part in parts), "parts": parts}


def kernel_times(profiler: Any) -> dict[str, list[float]]:
    """Return the microseconds of each call of each kernel, copy and memory set on a GPU.

    A graph's annotations ("## Call CompiledFxGraph") span kernels and would count their time again.
    """
    took: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            took[event.name].append(event.time_range.elapsed_us())
    return took


def _compare(result: Any, other: Way, most: float) -> None:
    switch.choose(other.kernels)
    for i, (a, b) in enumerate(zip(tensors(result), tensors(other.call()), strict=True)):
        if (off := distance(a, b)) > most:
            raise ValueError(f"gives another result: tensor {i} is off by {off:.2%} of its norm")


def distance(a: Tensor, b: Tensor) -> float:
    """Return the distance of ``a`` from ``b`` as a share of the norm of ``b``; inf for unequal integers."""
    if not b.is_floating_point():
        return 0.0 if torch.equal(a, b) else torch.inf
    off = (torch.dist(a.float(), b.float()) / b.float().norm().clamp(min=1e-30)).item()
    return off if off == off else torch.inf


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
