"""Speed of the kernels beside torch, of a layer of experts they make, and of a copy: microseconds and bytes.

    python benchmarks/kernel_speed.py [--json FILE]                        all, some minutes on a GPU
    python benchmarks/kernel_speed.py --shapes spider-1b --ops expand reduce
    python benchmarks/kernel_speed.py --profile route                      what each way of an op launches
    python benchmarks/kernel_speed.py --quick       the same on tiny shapes, on any machine

(Not ``kernels.py``: Python looks for modules beside a script first, and a file of that name would hide the
package ``kernels`` from every script here.)

Ops. Each op and each backward is called as a kernel, as its torch twin, as the twin compiled by
``torch.compile``, where it moves rows of experts as a Python loop over the experts, and beside them a copy on
the device that moves as many bytes. ``device_time.py`` says how calls are timed, ``kernel_ops.py`` what is
counted as bytes. In the table:

    MB              bytes that have to be moved
    copy, kernel    microseconds of one call in a CUDA graph, with a cold L2 cache; the graph's own start,
                    some microseconds, is in both
    called          the kernel's op called from Python
    GB/s, of copy   the kernel's bytes over its time, and the copy's time over the kernel's
    launches        of the kernel's op; in brackets those of the twin
    twin, compiled  as the kernel; loop: called, since it waits for the device

Layer. Forward and backward of the model's own layer of experts, weights and input in bfloat16: the loop over
experts; all experts in one grouped product, rows sorted and gathered by torch, eager and compiled; the same
by the kernels, eager and compiled, and with the expert products in fp8. Then the expert products alone, from
fused rows to fused rows. Times are those of calls from Python, and beside them of the same in a CUDA graph.

A way that fails, or whose result is not that of the twin (of the loop, for the layer), says so and has no
figures. Interrupted, it tells what it has. With --quick functions are traced but not compiled, and on a
machine without a GPU the kernels' twins stand in for them.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config
from common import parser, report, show, show_goals
from device_time import Way, measure
from kernel_ops import OPS, Shape, backward_ways, expert_ways, forward_ways, layer_ways

from spider.model import build_model
from spider.model.spider.config import SpiderConfig

SHAPES = {
    "spider-1b": Shape(N=28_672, D=2048, E=32, K=2, F=512, shared=1024),
    "many-experts": Shape(N=16_384, D=1024, E=128, K=8, F=256, shared=256),
    "wide": Shape(N=32_768, D=4096, E=8, K=2, F=1024, shared=1024),
}
PATCHES = "spider-1b-patches"
"""What a layer of the preset's core gets in a micro-batch of the headline's shape."""
QUICK = {
    "tiny": Shape(N=64, D=32, E=4, K=2, F=16, shared=16, filled=29),
    "odd": Shape(N=33, D=48, E=5, K=3, F=16),
}
LAYER, EXPERTS = "layer", "experts"

COLUMNS = ["op", "MB", "copy us", "kernel us", "called", "GB/s", "of copy", "launches", "twin us"]
COLUMNS += ["compiled", "loop"]

Ways = dict[str, dict[str, Any]]
Found = dict[str, dict[str, Ways]]
"""By shape, then by op, then by way."""


def options() -> argparse.Namespace:
    asked = parser(__doc__.splitlines()[0])
    parts = [*OPS, LAYER, EXPERTS]
    asked.add_argument("--shapes", nargs="+", metavar="NAME", help=f"of {', '.join([*SHAPES, PATCHES])}")
    asked.add_argument("--ops", nargs="+", choices=parts, metavar="NAME", help=f"of {', '.join(parts)}")
    asked.add_argument("--repeats", type=int, default=50, help="calls of each way that are timed")
    asked.add_argument("--profile", choices=parts, help="tell what each way of this op launches, and no more")
    chosen = asked.parse_args()
    if not (chosen.quick or torch.cuda.is_available()):
        sys.exit(
            "these figures need a GPU and this machine has none that torch can use; --quick runs the same "
            "code on tiny shapes"
        )
    known = QUICK if chosen.quick else {**SHAPES, PATCHES: patches()}
    if unknown := set(chosen.shapes or []) - known.keys():
        asked.error(f"--shapes: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    chosen.shapes = {name: known[name] for name in chosen.shapes or known}
    chosen.ops = [chosen.profile] if chosen.profile else chosen.ops or parts
    if chosen.quick:
        chosen.repeats = 3
    return chosen


def patches(windows: int = 112, length: int = 256) -> Shape:
    """The shape at which the warm-up times the preset's experts (`Fp8Parts.example`)."""
    with torch.device("meta"):
        config = SpiderConfig()
        own = build_model(config).fp8_parts()
        assert own is not None and config.moe is not None
        part, x_ND = own.example(windows, length, torch.device("meta"))
    moe = config.moe
    sizes = dict(E=moe.experts, K=moe.top_k, F=moe.expert_hidden, shared=moe.shared_hidden)
    return Shape(*x_ND.shape, **sizes, filled=part.valid)


def measure_all(chosen: argparse.Namespace, device: torch.device, found: Found) -> None:
    """Fill ``found``, the layer first; say on the way where it is."""
    torch._functorch.config.donated_buffer = False  # a backward is timed many times

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        backend = "aot_eager" if chosen.quick else "inductor"
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    for shape_name, shape in chosen.shapes.items():
        torch.manual_seed(0)
        for name, ways in ways_of(shape, chosen.ops, device, compiled):
            of = found.setdefault(shape_name, {})[name] = measure(ways, device, chosen.repeats)
            told = ", ".join(f"{way} {_us(of, way) or 'failed'}" for way in of)
            print(f"{shape_name}, {name} (us): {told}", file=sys.stderr, flush=True)
            del ways
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def ways_of(
    shape: Shape, ops: list[str], device: torch.device, compiled: Callable[..., Any]
) -> Iterator[tuple[str, dict[str, Way]]]:
    for name, ways in ((LAYER, layer_ways), (EXPERTS, expert_ways)):
        if name in ops:
            yield name, ways(shape, device, compiled)
    for name, make in OPS.items():
        if name in ops:
            op = make(shape, device)
            yield name, forward_ways(op, compiled)
            if op.moved_backward is not None:
                yield f"{name} backward", backward_ways(op, compiled)


def main() -> None:
    chosen = options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: Found = {}
    try:
        measure_all(chosen, device, found)
    except KeyboardInterrupt:
        print("Interrupted: these are the figures it had by then.", file=sys.stderr)
    if chosen.profile:
        tell_profile(chosen, found)
    else:
        tell(chosen, device, found)


def tell(chosen: argparse.Namespace, device: torch.device, found: Found) -> None:
    """The tables and the goals."""
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    layers = []
    for shape_name, of_shape in found.items():
        title = f"{shape_name}: {chosen.shapes[shape_name]}"
        rows = [op_row(name, ways) for name, ways in of_shape.items() if name not in (LAYER, EXPERTS)]
        if rows:
            show(title, COLUMNS, rows)
        for part in (LAYER, EXPERTS):
            if part in of_shape:
                layers += [[f"{part}, {shape_name}", *[""] * 5], *layer_rows(of_shape[part])]
    goals = goals_of(found.get("spider-1b", {}))
    shapes = {name: shape._asdict() for name, shape in chosen.shapes.items()}
    figures = {"device": where, "shapes": shapes, "found": found, "goals": goals}
    columns = ["forward and backward", "us", "in a graph", "launches", "x loop", "x best of torch alone"]
    report(f"Layers of experts, {where}", columns, layers, figures, chosen, ["torch"])
    for shape_name, of_shape in found.items():
        for name, ways in of_shape.items():
            for way, of in ways.items():
                for problem in ("error", "graph_error"):
                    if problem in of:
                        print(f"{shape_name}, {name}, {way}, {problem.replace('_', ' ')}: {of[problem]}")
    show_goals("Goals at spider-1b's shape", goals, chosen.quick)


def op_row(name: str, ways: Ways) -> list[str]:
    kernel, copy, twin = (ways.get(way, {}) for way in ("kernel", "copy", "twin"))
    time, moved = _time(kernel), copy.get("bytes")
    return [
        name,
        f"{moved / 1e6:,.1f}" if moved else "",
        _us(ways, "copy"),
        _us(ways, "kernel"),
        _number(kernel.get("us")),
        f"{moved / time / 1e3:,.0f}" if moved and time else "",
        f"{share:.0%}" if (share := _share(ways)) else "",
        _launches(kernel, twin) if "launches" in kernel else "failed",
        _us(ways, "twin"),
        _us(ways, "compiled"),
        _us(ways, "loop"),
    ]


def _launches(kernel: dict[str, Any], twin: dict[str, Any]) -> str:
    ours = kernel.get("launches")
    return "" if ours is None else f"{ours} ({_number(twin.get('launches'))})"


def layer_rows(ways: Ways) -> list[list[str]]:
    loop, best = _best(ways, ("loop",)), _best(ways, ("torch", "torch compiled"))
    return [
        [
            f"  {way}",
            _number(of.get("us")) or "failed",
            _number(of.get("replayed_us")),
            _number(of.get("launches")),
            f"{loop / of['us']:.2f}" if loop and "us" in of else "",
            f"{best / of['us']:.2f}" if best and "us" in of else "",
        ]
        for way, of in ways.items()
    ]


def _time(of: dict[str, Any]) -> float | None:
    """In a graph; of a way that cannot be in one, called."""
    return of.get("replayed_us") or of.get("us")


def _us(ways: Ways, way: str) -> str:
    return _number(_time(ways.get(way, {})))


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:,.1f}" if x < 100 and x != int(x) else f"{x:,.0f}"


def _share(ways: Ways) -> float | None:
    copy, kernel = (_time(ways.get(way, {})) for way in ("copy", "kernel"))
    return copy / kernel if copy and kernel else None


def _best(ways: Ways, of: tuple[str, ...]) -> float | None:
    return min((ways[way]["us"] for way in of if "us" in ways.get(way, {})), default=None)


def goals_of(found: dict[str, Ways]) -> list[dict[str, Any]]:
    """Each goal with its figure, and whether it is met, missed, or not measured."""
    layer, experts, route = (found.get(name, {}) for name in (LAYER, EXPERTS, "route"))
    ours = _best(layer, ("kernels", "kernels compiled"))
    loop, torch_alone = _best(layer, ("loop",)), _best(layer, ("torch", "torch compiled"))
    bf16, fp8 = (_best(experts, (way, f"{way} compiled")) for way in ("bf16", "fp8"))
    rows = ("expand", "expand backward", "reduce", "reduce backward")
    goals: list[tuple[str, float | None, Callable[[float], bool]]] = [
        *(
            (f"{op} at 85% or more of the copy", _share(found.get(op, {})), lambda x: x >= 0.85)
            for op in rows
        ),
        ("the router in two launches or fewer", route.get("kernel", {}).get("launches"), lambda x: x <= 2),
        ("the router in under 15 us", _time(route.get("kernel", {})), lambda x: x < 15),
        ("the layer 5 times as fast as the loop", loop / ours if loop and ours else None, lambda x: x >= 5),
        (
            "the layer 1.3 times as fast as the best of torch alone",
            torch_alone / ours if torch_alone and ours else None,
            lambda x: x >= 1.3,
        ),
        (
            "experts in fp8 1.2 times as fast as in bf16",
            bf16 / fp8 if bf16 and fp8 else None,
            lambda x: x >= 1.2,
        ),
    ]
    return [
        {
            "goal": goal,
            "figure": figure,
            "outcome": "not measured"
            if figure is None
            else f"{'met' if met(figure) else 'missed'} ({figure:.4g})",
        }
        for goal, figure, met in goals
    ]


def tell_profile(chosen: argparse.Namespace, found: Found) -> None:
    """Every kernel of every way of one op, at each shape."""
    rows = []
    for shape_name, of_shape in found.items():
        for name, ways in of_shape.items():
            for way, of in ways.items():
                told = of.get("error") or f"{_number(_time(of))} us"
                rows.append([f"{shape_name}, {name}, {way}: {told}", "", ""])
                rows += [[f"  {kernel[:80]}", f"{us:,.1f}", str(n)] for kernel, us, n in of.get("parts", [])]
    report(f"What {chosen.profile} launches", ["kernel", "us", "calls"], rows, found, chosen, ["torch"])


if __name__ == "__main__":
    main()
