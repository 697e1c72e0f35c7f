"""Measure training: bytes or tokens a second, where the time goes, memory and MFU.

A row trains the first steps by the trainer itself: text from the loader, ``grad_accum`` forward and backward
passes, clipping and update. The first ``settle`` steps do not count. A step lasts until the GPU has finished
its work, and a row has the median of ``steps``. One more step is profiled.

Figures that say why a step takes its time, and what it gives:
    host_seconds     From the begin of forward and backward until both have returned, before any wait. Near
                     the whole step, the GPU waits for the host. ``cpu_seconds`` are those of all threads.

    kernel_seconds   Sum of the kernels of the profiled step. Near the whole step, the GPU is busy.
                     ``parts`` are those by group, ``kernels`` has each. Without a device both are a model.

    weights          Sum of the bits of all weights after the timed steps. Two rows whose steps should be
                     the same must agree in it.

Peak memory is the allocator's, beside what ``spider describe`` counts. That is the memory of tensors. The
allocator's rounding, workspaces and short-lived tensors of a backward pass come on top. MFU counts neither
recomputation nor what the model skips, except on packed rows, where it counts whole rows. It is a share of
the dense peak of the row's own arithmetic.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest.mock import patch

import nodevice
import torch
from count import Counted
from rows import TABLE
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from trainings import config_of, spec_of, train

from spider.model import build_model
from spider.training import loop
from spider.training.telemetry import peak_flops
from spider.workflow.describe import describe as describe_run


def measure(what: str, changes: Any = None, steps: int = 5, settle: int = 3) -> Iterator[dict[str, Any]]:
    """Yield the figures of one row: first those of the steps, then those of the profiled step.

    Args:
        what: see `config_of`, as ``changes``.
    """
    config = config_of(what, changes)
    spec = spec_of(config)
    inspected = None
    if torch.cuda.is_available():
        inspected = (
            Counted() if nodevice.ACTIVE else Profiled(activities=[torch.profiler.ProfilerActivity.CUDA])
        )
    ends, cpu, host, found = [time.perf_counter()], [time.process_time()], [], {}
    original = loop.Trainer._forward_backward

    def watched(trainer: Any, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        measured = original(trainer, *arguments, **options)
        host.append(time.perf_counter() - began)
        found["parameters"] = list(trainer.model.parameters())
        found["cut"] = f"{trainer.micro_batches} x {trainer.windows // trainer.micro_batches}"
        return measured

    def on_step(number: int) -> None:
        if inspected:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        cpu.append(time.process_time())
        print(f"step {number}: {ends[-1] - ends[-2]:.3f} s, {cpu[-1] - cpu[-2]:.3f} s of CPU", flush=True)
        if number == settle:
            found["graphs"] = counters["stats"]["unique_graphs"]
        if number == settle + steps:
            found["peak"] = torch.cuda.max_memory_allocated() if inspected else 0
            found["weights"] = sum(
                p.detach().flatten().view(torch.uint8).sum().item() for p in found.pop("parameters")
            )
            if inspected:
                inspected.__enter__()
        elif number > settle + steps and inspected:
            inspected.__exit__(None, None, None)

    with patch.object(loop.Trainer, "_forward_backward", watched):
        train(spec, settle + steps + bool(inspected), on_step)
    timed = slice(settle, settle + steps)
    took, busy = ([after - before for before, after in itertools.pairwise(of)] for of in (ends, cpu))
    compiler, seconds = counters["inductor"], median(took[timed])
    figures = {
        "shape": f"{found['cut']} x {spec.settings.seq_len}",
        "steps": took,
        "seconds": seconds,
        "host_seconds": median(host[timed]),
        "cpu_seconds": median(busy[timed]),
        "tokens_per_second": spec.tokens_per_step / seconds,
        "unit": "bytes" if spec.model.vocab_size is None else "tokens",
        "peak_memory": found["peak"],
        "described_memory": describe_run(config, next(iter(config.runs)))["stages"][0]["memory"]["total"],
        "weights": found["weights"],
        "compiled_again": counters["stats"]["unique_graphs"] - found["graphs"],
        "graphs_in_cache": [compiler[f"fxgraph_cache_{of}"] for of in ("hit", "miss")],
        "mfu": mfu(spec, seconds) if inspected else None,
    }
    yield {**figures, "line": describe(figures)}
    if inspected:
        figures |= inspected.figures()
        yield {**figures, "line": describe(figures)}


class Profiled(torch.profiler.profile):
    """The kernels of a step, by torch's profiler."""

    def figures(self) -> dict[str, Any]:
        """Return name, seconds and calls of each kernel, copy and memory set, the longest first, and sums.

        A graph's annotations ("## Call CompiledFxGraph") span kernels and would count their time again.
        """
        took, parts = defaultdict[str, list[float]](list), defaultdict[str, float](float)
        for event in self.events():
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                took[event.name].append(event.time_range.elapsed_us() / 1e6)
        for name, of in took.items():
            parts[group_of(name)] += sum(of)
        kernels = sorted(((name, sum(of), len(of)) for name, of in took.items()), key=lambda one: -one[1])
        sums = {"launches": sum(map(len, took.values())), "kernel_seconds": sum(parts.values())}
        return {"kernels": kernels, "parts": parts, **sums}


def mfu(spec: Any, seconds: float) -> float | None:
    """Return the model's FLOP/s over the device's peak, or None for an unknown device."""
    with torch.device("meta"):
        model = build_model(spec.model)
    flops = model.flops_per_token(spec.settings.seq_len, spec.settings.n_loops) * spec.tokens_per_step
    peak = peak_flops(torch.cuda.get_device_name(), spec.precision)
    return flops / seconds / peak if peak else None


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its name."""
    name = kernel.lower()
    return next((group for group, of in TABLE["groups"].items() if re.search(of, name)), "other")


def describe(row: dict[str, Any]) -> str:
    """Return the line to print of a row."""
    ms = {name: f"{1000 * row[name]:,.1f} ms" for name in row if name.endswith("seconds")}
    words = [f"{row['tokens_per_second']:,.0f} {row['unit']}/s, {ms['seconds']} a step"]
    words.append(f"the host returns after {ms['host_seconds']}, {ms['cpu_seconds']} of CPU")
    if "launches" in row:
        parts = sorted(row["parts"].items(), key=lambda part: -part[1])[:12]
        named = ", ".join(f"{name} {1000 * of:.1f}" for name, of in parts)
        words.append(f"{row['launches']:,} launches, {ms['kernel_seconds']} of kernels ({named})")
    peak, described = row["peak_memory"] / 1e9, row["described_memory"] / 1e9
    words.append(f"peak {peak:.2f} GB of {described:.2f} described, first step {row['steps'][0]:.0f} s")
    words.append("graphs in the cache: {} found, {} compiled".format(*row["graphs_in_cache"]))
    words += [f"MFU {row['mfu']:.1%}"] if row["mfu"] else []
    words += [f"{row['compiled_again']} graphs COMPILED AGAIN"] if row["compiled_again"] else []
    return f"{row['shape']}: " + "; ".join(words)
