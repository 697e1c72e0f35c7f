"""Measure training: bytes or tokens a second, memory and MFU of each way to run a step.

    python benchmarks/gpu/train_throughput.py [--rows 'headline, bf16' ...]

Shapes:
    headline       The original's: spider-1b with 4 micro-batches of 112 windows of 256 bytes and 6 loops.

    spider-1b*     Every preset of this name as it is.

    gpt-d12        gpt.yaml: 8 micro-batches of 32 windows of 2,048 made-up ids of 32,768.

    memory         The headline with 2 micro-batches and 3 short steps, in ways that trade speed for memory.

Ways, with the preset's own optimizer:
    bf16             Experts in one grouped product, compiled.

    fp8              The same with linear layers in fp8, with one scale for each tensor or each row.

    bf16, kept       No activation is recomputed. ``bf16, recomputed``: all activations of the core are.

    bf16, documents  A GPT on packed rows, where an id sees only its own document. After the first steps
                     nothing may be compiled again.

    bf16, parts      The time of a bf16 step by group of kernels. The file has all kernels.

    seed             The original's at its best: experts in a Python loop, nothing compiled, bf16. It ran fp8,
                     which is slower than bf16 without a compiler.

Each row trains in a process of its own by the trainer itself: text from the loader, ``grad_accum`` forward
and backward passes, clipping and update. The first `SETTLE` steps do not count. A step lasts until the GPU
has finished its work, and a row has the median of `STEPS`.

Peak memory is the allocator's after the first steps, beside what ``spider describe`` counts. That is the
memory of tensors. The allocator's rounding, workspaces and short-lived tensors of a backward pass come on
top.

MFU counts neither recomputation nor what the model skips, except on packed rows, where it counts whole rows.
It is a share of the dense peak of the row's own arithmetic. What is compiled is kept, so a killed row ends
sooner the next time.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import questions
import torch
from device_time import kernel_times
from questions import FOLDER, Row, apart, goal
from texts import text_for
from trainings import GPT, HEADLINE, PRESET, SLOW, SMOKE, config_of

from spider.config import Config, StageSpec
from spider.describe import describe as describe_run
from spider.model import build_model
from spider.training import stage
from spider.training.precision import device_name
from spider.training.telemetry import peak_flops
from spider.training.warmup import forget_peak, peak_memory_mb

D12, PACKED = "gpt-d12", "bf16, documents"
BF16 = {"precision": "bf16", "compile": True}
FP8 = {"precision": "fp8", "compile": True}
WAYS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fp8": {**FP8, "fp8_recipe": "tensorwise"},
    "fp8-rowwise": {**FP8, "fp8_recipe": "rowwise"},
    "bf16, kept": {**BF16, "model": {"recurrence": {"checkpointing": False}}},
    "bf16, recomputed": {**BF16, "model": {"recurrence": {"checkpointing": True}}},
    PACKED: {**BF16, "defaults": {"packing": "best_fit", "attend": "document"}},
    "bf16, parts": BF16,
    "seed": {"precision": "bf16", "compile": False, "model": {"moe": {"implementation": "loop"}}},
}
GPT_WAYS = ("bf16", PACKED, "fp8", "bf16, parts")
#: Ways of the rows ``memory``.
MEMORY_WAYS: dict[str, dict[str, Any]] = {
    "adamw": BF16,
    "adamw, kept": WAYS["bf16, kept"],
    "adamw, recomputed": WAYS["bf16, recomputed"],
    "adamw8bit": {**BF16, "optimizer": {"kind": "adamw8bit"}},
    "adamw8bit, bf16 weights": {**BF16, "optimizer": {"kind": "adamw8bit", "master_weights": "bf16"}},
    "muon": {**BF16, "optimizer": {"kind": "muon"}},
}
#: Seconds that a row takes at most, mostly to compile. An H200 with 16 cores took 110 s for the headline in
#: bf16 and 98 s for the GPT.
SECONDS = dict.fromkeys(WAYS, 220) | {"fp8": 300, "fp8-rowwise": 300, "bf16, parts": 150, "seed": 150}
GPT_SECONDS, MEMORY_SECONDS = 150, 220
STEPS, SETTLE = 8, 3

#: Groups of kernels, or of a CPU's operators. The first pattern that is found in the name counts.
GROUPS = {
    "compiled reductions": r"triton_(red|per)",
    "compiled elementwise": r"triton_poi|cpp_fused",
    "attention": r"flash|fmha|sdpa|attention",
    "grouped products": r"group",
    "fp8 products": r"(gemm|cutlass|nvjet|scaled_mm).*(e4m3|e5m2|f8|fp8)|nvjet_q|scaled_mm",
    "products": r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|aten::(b|add|badd)?mm|triton_(tem|mm)",
    "optimizer": r"adam|multi_tensor|foreach",
    "sorting and lookups": r"sort|radix|scatter|gather|index|embedding|topk|scan|cumsum",
    "copies and casts": r"memcpy|memset|copy|_to\b|fill|zero|cat\b",
    "other reductions": r"reduce|softmax|norm|sum|mean",
    "other elementwise": r"elementwise|aten::(mul|add|sub|div|neg|silu|exp|sigmoid|where)",
}


def main(chosen: argparse.Namespace) -> int:
    question = questions.Question("train_throughput", chosen, goals_of)
    for name, (configuration, changes) in rows_of(chosen.rehearse).items():
        shape, _, way = name.partition(", ")
        steps, settle = STEPS, SETTLE
        if shape == "memory" or chosen.rehearse:
            steps, settle = 2, 1
        seconds = SECONDS.get(way, MEMORY_SECONDS)
        if configuration == GPT:
            seconds = GPT_SECONDS
        profile = way.endswith("parts")
        call = partial(measure, configuration, changes, steps, settle, profile=profile)
        question.measure(name, seconds, call, describe_parts if profile else describe)
    return question.end()


def rows_of(rehearse: bool) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the configuration of each row and what is changed in it, the most valuable first."""
    if rehearse:
        size = {"hidden": 32, "layers": 2, "heads": 2, "short_window": 16}
        shape = {"seq_len": 64, "micro_batch": 2, "grad_accum": 2, **WAYS[PACKED]["defaults"]}
        return {
            "smoke, bf16, parts": (SMOKE, SLOW),
            f"small gpt, {PACKED}": (GPT, {**SLOW, "model": size, "defaults": shape}),
        }
    rows = {}
    for way, changes in WAYS.items():
        if way != PACKED:
            rows[f"headline, {way}"] = (PRESET, {**changes, "defaults": HEADLINE})
    for way in GPT_WAYS:
        rows[f"{D12}, {way}"] = (GPT, WAYS[way])
    for preset in sorted(PRESET.parent.glob("spider-1b*.yaml")):
        for way in ("bf16", "fp8"):
            rows[f"{preset.stem}, {way}"] = (preset, WAYS[way])
    for way, changes in MEMORY_WAYS.items():
        rows[f"memory, {way}"] = (PRESET, {**changes, "defaults": {**HEADLINE, "grad_accum": 2}})
    return rows


def measure(
    configuration: Path, changes: Mapping[str, Any], steps: int, settle: int, *, profile: bool = False
) -> dict[str, Any]:
    """Return the figures of one row."""
    config, folder = config_of(configuration, **changes), FOLDER / "work/throughput"
    spec = config.stage(next(iter(config.runs)), "steps")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        found = apart(first_steps, spec, folder, text_for(spec), steps, settle, profile)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with torch.device("meta"):
        model = build_model(spec.model)
    settings, optimizer = spec.settings, spec.optimizer
    seconds = median(found["steps"][settle:])
    flops = model.flops_per_token(settings.seq_len, settings.n_loops) * spec.tokens_per_step
    peak = peak_flops(found["device"], spec.precision)
    loops = f", {settings.n_loops} loops" if spec.model.looped else ""
    return {
        **found,
        "shape": f"{settings.grad_accum} x {settings.micro_batch} x {settings.seq_len}{loops}",
        "optimizer": f"{optimizer.kind}, {optimizer.master_weights} weights",
        "seconds_per_step": seconds,
        "tokens_per_second": spec.tokens_per_step / seconds,
        "unit": "bytes" if spec.model.vocab_size is None else "tokens",
        "described_memory": described(config),
        "mfu": flops / seconds / peak if peak else None,
    }


def first_steps(
    spec: StageSpec, folder: Path, data: Path, steps: int, settle: int, profile: bool
) -> dict[str, Any]:
    """Train a stage's first steps in this process.

    Returns:
        ``steps``, seconds of each step; ``peak_memory`` in bytes after ``settle`` steps, of the device's
        allocator or on a CPU of the process; ``device``; ``compiled_again``, graphs compiled after ``settle``
        steps. With ``profile`` also ``parts`` of the last step: name, seconds and calls of each kernel. On a
        CPU these are operators without the operators inside them.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ends: list[float] = []
    graphs = 0
    activities = torch.profiler.supported_activities()
    profiler = torch.profiler.profile(activities=activities) if profile else nullcontext()

    class Enough(Exception):
        pass

    class Trainer(stage.Trainer):
        def run(self, *args: Any, **options: Any) -> Any:
            ends.append(time.perf_counter())
            return super().run(*args, **options)

    def on_step(number: int) -> None:
        nonlocal graphs
        if device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        if number == settle:
            forget_peak(device)
            graphs = compiled_graphs()
        if number == settle + steps - 1:
            profiler.__enter__()
        if number == settle + steps:
            profiler.__exit__(None, None, None)
            raise Enough

    stage.Trainer = Trainer  # type: ignore[misc]
    with suppress(Enough):
        stage.train(spec, folder / "training", data, on_step=on_step)
    return {
        "steps": [after - before for before, after in itertools.pairwise(ends)],
        "peak_memory": 1e6 * peak_memory_mb(device),
        "device": device_name(device),
        "compiled_again": compiled_graphs() - graphs,
        "parts": parts_of(profiler) if profile else None,
    }


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def parts_of(profiler: Any) -> list[tuple[str, float, int]]:
    """Return name, seconds and calls of each kernel, or on a CPU of each operator."""
    if kernels := kernel_times(profiler):
        return [(name, sum(us) / 1e6, len(us)) for name, us in kernels.items()]
    averages = profiler.key_averages()
    return [(event.key, event.self_cpu_time_total / 1e6, event.count) for event in averages]


def described(config: Config) -> dict[str, int]:
    """Return the memory that ``spider describe`` counts, by purpose, and its sum."""
    return describe_run(config, next(iter(config.runs)))["stages"][0]["memory"]


def describe(row: Row) -> str:
    mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    speed = (
        f"{row['tokens_per_second']:,.0f} {row['unit']}/s, {1000 * row['seconds_per_step']:,.1f} ms a step"
    )
    total = row["described_memory"]["total"]
    peak = row["peak_memory"]
    memory = f"peak {peak / 1e9:.2f} GB, {peak / total:.3f} of {total / 1e9:.2f} described"
    first = f"first step {row['steps'][0]:.0f} s"
    again = f", {row['compiled_again']} graphs COMPILED AGAIN" if row["compiled_again"] else ""
    return f"{speed}, {memory}, MFU {mfu}, {first}{again}; {row['shape']}, {row['optimizer']}"


def describe_parts(row: Row) -> str:
    """Return the time of each group of kernels, the largest first."""
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, seconds, calls in row["parts"]:
        group = groups[group_of(name)]
        group[0] += seconds
        group[1] += calls
    total = sum(seconds for seconds, _ in groups.values())
    lines = [f"{1000 * total:,.1f} ms of work in a step of {1000 * row['seconds_per_step']:,.1f} ms"]
    for name, (seconds, calls) in sorted(groups.items(), key=lambda group: -group[1][0]):
        lines.append(f"    {name}: {1000 * seconds:,.2f} ms, {seconds / total:.1%}, {calls:,.0f} calls")
    return "\n".join(lines)


def goals_of(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    measured = {name: row["tokens_per_second"] for name, row in rows.items() if not name.endswith("parts")}
    speed = {name[10:]: of for name, of in measured.items() if name.startswith("headline, ")}
    seed = speed.pop("seed", None)
    top = max(speed.values(), default=None)
    fp8 = max((of for way, of in speed.items() if way.startswith("fp8")), default=None)
    ratio = fp8 / speed["bf16"] if fp8 and "bf16" in speed else None
    small = rows.get("spider-1b-25gb, bf16")
    memory = small["peak_memory"] / 1e9 if small else None
    again = [row["compiled_again"] for name, row in rows.items() if name.startswith(f"{D12}, ")]
    near = []
    for name, row in rows.items():
        if name.startswith("memory, ") or (name.startswith("spider-1b-") and name.endswith(", bf16")):
            share = row["peak_memory"] / row["described_memory"]["total"]
            near.append(goal(f"{name}: peak within 5% of described", share, lambda x: abs(x - 1) <= 0.05))
    return [
        goal("at least 130,000 bytes/s at the headline's shape", top, lambda x: x >= 130_000),
        goal("then 200,000", top, lambda x: x >= 200_000),
        goal("fp8 at least 1.1 times bf16", ratio, lambda x: x >= 1.1),
        goal("then 1.2", ratio, lambda x: x >= 1.2),
        goal("at least 8 times the seed's way", top / seed if top and seed else None, lambda x: x >= 8),
        goal("spider-1b-25gb at most 25 GB at its peak", memory, lambda x: x <= 25),
        goal("gpt-d12: at least 400,000 tokens/s", measured.get(f"{D12}, bf16"), lambda x: x >= 400_000),
        goal("gpt-d12: no graph compiled again", float(sum(again)) if again else None, lambda x: not x),
        *near,
    ]


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its name."""
    name = kernel.lower()
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "other")


if __name__ == "__main__":
    sys.exit(main(questions.parser(__doc__).parse_args()))
