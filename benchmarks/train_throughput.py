"""Training speed at the seed's headline shape: bytes a second, memory and MFU of each way to run a step.

    python benchmarks/train_throughput.py [--ways NAME ...] [--json FILE]
    python benchmarks/train_throughput.py --profile NAME [--json FILE]      where that way's time goes
    python benchmarks/train_throughput.py --quick       the same on a small model, on any machine

The ways, all with the configuration's own optimizer and recomputation of core layers:

    seed           experts in a Python loop, nothing compiled, bf16. (The seed ran fp8, which uncompiled is
                   slower than bf16: this is its way at its best.)
    bf16           experts in one grouped product, compiled
    fp8            the same, linear layers in fp8 with a scale a tensor
    fp8-rowwise    the same with a scale a row
    fp8-gw-hp      the same with weight gradients in bf16 (only where --ways names it)

Each trains in a process of its own, in turn, through the trainer itself: mock data from the loader,
``grad_accum`` forward and backward passes, clipping, update. Steps before ``--settle`` are left out; a step's
time is the median of the others, waiting for the GPU at the end of each. Peak memory is the allocator's, from
then on. A way that fails (out of memory, or no fp8) says so in its row. MFU counts neither recomputation nor
what the model skips, against the dense peak of the row's own arithmetic.

Memory, as ``spider describe`` counts it for spider-1b (996M parameters, micro-batch 112 x 256, 6 loops; GB):

    optimizer, weights       weights  gradients  moments  bf16 copies  activations  sum    --optimizer
    adamw, fp32                 4.0       4.0       8.0       1.6         22.6      40.2   adamw (preset)
    adamw8bit, fp32             4.0       4.0       2.0       1.6         22.6      34.2   adamw8bit
    adamw8bit, bf16             2.3       2.3       2.0       0           22.6      29.3   adamw8bit-bf16
    adamw4bit, bf16             2.3       2.3       1.1       0           22.6      28.3   adamw4bit-bf16

Without ``recurrence.checkpointing`` activations are 79.7. So 25 GB is not within reach of the preset's own
settings, whose fixed part alone is 17.6. With bf16 weights and 8-bit moments that part is 6.7 and 90 windows
of activations fit; the same batch as ``--micro-batch 56 --grad-accum 8`` comes to 22.9 with adamw8bit and to
18.0 with adamw8bit-bf16. The estimate is of what autograd keeps where nothing is compiled: the compiler keeps
less, the allocator wastes some, and gradients are not there yet when the activations are the most.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import parser, report, show_goals
from steps import first_steps, spec_of

from spider.model import build_model
from spider.training.telemetry import peak_flops

ROOT = Path(__file__).parents[1]
#: What a step of the seed is; the preset's has as many bytes in longer windows.
SEEDS_SHAPE = {"micro_batch": 112, "seq_len": 256, "grad_accum": 4, "n_loops": 6}

WAYS: dict[str, dict[str, Any]] = {
    "seed": {"precision": "bf16", "compile": False, "model": {"moe": {"implementation": "loop"}}},
    "bf16": {"precision": "bf16", "compile": True},
    "fp8": {"precision": "fp8", "fp8_recipe": "tensorwise", "compile": True},
    "fp8-rowwise": {"precision": "fp8", "fp8_recipe": "rowwise", "compile": True},
    "fp8-gw-hp": {"precision": "fp8", "fp8_recipe": "rowwise_with_gw_hp", "compile": True},
}
DEFAULT_WAYS = ["seed", "bf16", "fp8", "fp8-rowwise"]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw"},
    "adamw8bit": {"kind": "adamw8bit"},
    "adamw8bit-bf16": {"kind": "adamw8bit", "master_weights": "bf16"},
    "adamw4bit-bf16": {"kind": "adamw4bit", "master_weights": "bf16"},
    "muon": {"kind": "muon"},
}

#: Kernels, and a CPU's operators, by what they do; the first pattern found in the name counts.
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
TOP = 20


def options() -> argparse.Namespace:
    asked = parser(__doc__.splitlines()[0])
    asked.add_argument("--config", type=Path, default=ROOT / "presets/spider-1b.yaml", help="configuration")
    asked.add_argument("--ways", nargs="+", choices=list(WAYS), metavar="NAME", help=f"of {', '.join(WAYS)}")
    asked.add_argument("--optimizer", choices=list(OPTIMIZERS), help="default: the configuration's")
    for name in SEEDS_SHAPE:
        asked.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="default: the seed's")
    asked.add_argument("--no-checkpointing", action="store_true", help="keep core layers' activations")
    asked.add_argument("--steps", type=int, default=20, help="steps to time")
    asked.add_argument("--settle", type=int, default=5, help="steps before those")
    asked.add_argument("--profile", choices=list(WAYS), help="tell where this way's time goes, and no more")
    chosen = asked.parse_args()
    if chosen.quick:
        chosen.config, chosen.steps, chosen.settle = ROOT / "presets/smoke.yaml", 3, 1
        chosen.ways = chosen.ways or ["seed", "fp8"]
    chosen.ways = [chosen.profile] if chosen.profile else chosen.ways or DEFAULT_WAYS
    if not (chosen.quick or torch.cuda.is_available()):
        sys.exit(
            "these figures need a GPU and this machine has none that torch can use; --quick runs the same "
            "code on a small model"
        )
    return chosen


def changes(way: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """What a way and the command line change in the configuration's run."""
    seeds = {} if chosen.quick else SEEDS_SHAPE
    given = {name: getattr(chosen, name) or seeds.get(name) for name in SEEDS_SHAPE}
    given = {name: value for name, value in given.items() if value}
    model = dict(WAYS[way].get("model", {}))
    if chosen.no_checkpointing:
        model["recurrence"] = {"checkpointing": False}
    optimizer = {"optimizer": OPTIMIZERS[chosen.optimizer]} if chosen.optimizer else {}
    return {**WAYS[way], "model": model, "defaults": given, **optimizer}


def measure(way: str, chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One way's figures, or its ``error``."""
    spec = spec_of(chosen.config, **changes(way, chosen))
    steps = chosen.settle + chosen.steps
    found = first_steps(spec, folder, steps, settle=chosen.settle, profile=chosen.profile is not None)
    if "error" in found:
        return found
    with torch.device("meta"):
        model = build_model(spec.model)
    seconds = median(found["steps"][chosen.settle :])
    flops = model.flops_per_token(spec.settings.seq_len, spec.settings.n_loops) * spec.tokens_per_step
    peak = peak_flops(found["device"], spec.precision)
    return {
        "device": found["device"],
        "seconds_per_step": seconds,
        "bytes_per_second": spec.tokens_per_step / seconds,
        "peak_memory": found["peak_memory"],
        "mfu": flops / seconds / peak if peak else None,
        "first_step_seconds": found["steps"][0],
        "parts": found["parts"],
    }


def main() -> None:
    chosen = options()
    folder = Path(tempfile.mkdtemp(prefix="spider-throughput-"))
    try:
        found = {way: measure(way, chosen, folder / way) for way in chosen.ways}
    finally:
        shutil.rmtree(folder)
    if chosen.profile:
        tell_profile(chosen.profile, found[chosen.profile], chosen)
        return
    tell(found, chosen)


def tell(found: dict[str, dict[str, Any]], chosen: argparse.Namespace) -> None:
    """The table of all ways, and which goals they meet."""
    speed = {way: of["bytes_per_second"] for way, of in found.items() if "error" not in of}
    rows = []
    for way, of in found.items():
        if "error" in of:
            rows.append([way, "failed", *[""] * 6])
            continue
        rows.append(
            [
                way,
                f"{of['bytes_per_second']:,.0f}",
                f"{1000 * of['seconds_per_step']:,.1f}",
                f"{of['peak_memory'] / 1e9:.2f}",
                "unknown" if of["mfu"] is None else f"{of['mfu']:.1%}",
                f"{of['first_step_seconds']:.0f}",
                _ratio(speed, way, "seed"),
                _ratio(speed, way, "bf16"),
            ]
        )
    spec = spec_of(chosen.config, **changes(chosen.ways[0], chosen))
    s = spec.settings
    shape = f"micro-batch {s.micro_batch} x {s.seq_len}, grad_accum {s.grad_accum}, {s.n_loops} loops"
    columns = ["way", "bytes/s", "ms/step", "peak GB", "MFU", "first step s", "x seed", "x bf16"]
    goals = goals_of(found)
    title = f"{spec.run}, {shape}, {spec.optimizer.kind} ({spec.optimizer.master_weights} weights)"
    where = next((of["device"] for of in found.values() if "device" in of), "no way ran")
    figures = {"device": where, "ways": found, "goals": goals}
    report(f"{title}, {where}", columns, rows, figures, chosen, ["torch", "torchao"])
    for way, of in found.items():
        if "error" in of:
            print(f"{way} failed: {of['error']}")
    show_goals("Goals on one H100 at the seed's shape", goals, chosen.quick)


def _ratio(speed: dict[str, float], way: str, base: str) -> str:
    return f"{speed[way] / speed[base]:.2f}" if base in speed else ""


def goals_of(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal with its figure, and whether it is met, missed, or not measured."""
    speed = {way: of["bytes_per_second"] for way, of in found.items() if "error" not in of}
    best = max(speed.keys() - {"seed"}, key=speed.__getitem__, default=None)
    fp8 = max((way for way in speed if way.startswith("fp8")), key=speed.__getitem__, default=None)
    top = speed[best] if best else None
    memory = found[best]["peak_memory"] / 1e9 if best else None
    over_seed = top / speed["seed"] if top and "seed" in speed else None
    over_bf16 = speed[fp8] / speed["bf16"] if fp8 and "bf16" in speed else None
    goals = []
    for goal, figure, met in (
        ("at least 200,000 bytes/s in the fastest way", top, lambda x: x >= 200_000),
        ("at most 25 GB at its peak", memory, lambda x: x <= 25),
        ("at least 8 times the seed's way", over_seed, lambda x: x >= 8),
        ("fp8 at least 1.2 times bf16", over_bf16, lambda x: x >= 1.2),
    ):
        outcome = "not measured"
        if figure is not None:
            outcome = f"{'met' if met(figure) else 'missed'} ({figure:,.4g})"
        goals.append({"goal": goal, "figure": figure, "outcome": outcome})
    return goals


def tell_profile(way: str, of: dict[str, Any], chosen: argparse.Namespace) -> None:
    """Where one step's time goes: by group, and the kernels that take most of it."""
    if "error" in of:
        sys.exit(f"{way}: {of['error']}")
    total = sum(seconds for _, seconds, _ in of["parts"])
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, seconds, calls in of["parts"]:
        group = groups[group_of(name)]
        group[0] += seconds
        group[1] += calls

    def rows(parts: list[tuple[str, float, int]]) -> list[list[str]]:
        parts = sorted(parts, key=lambda part: -part[1])[:TOP]
        return [[name[:70], f"{1000 * s:,.2f}", f"{s / total:.1%}", f"{n:,.0f}"] for name, s, n in parts]

    by_group = [(name, seconds, calls) for name, (seconds, calls) in groups.items()]
    busy = f"{1000 * total:,.1f} ms of work in a step of {1000 * of['seconds_per_step']:,.1f} ms"
    report(
        f"{way} on {of['device']}: {busy}, by group; then the top {TOP}",
        ["what", "ms", "share", "calls"],
        [*rows(by_group), [""] * 4, *rows(of["parts"])],
        {"device": of["device"], "seconds_per_step": of["seconds_per_step"], "groups": by_group, **of},
        chosen,
        ["torch", "torchao"],
    )


def group_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    name = kernel.lower()
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "other")


if __name__ == "__main__":
    main()
