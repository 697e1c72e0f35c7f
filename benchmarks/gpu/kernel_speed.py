"""Compare the kernels on this device with their torch versions: results, and speed beside torch and a copy.

    python benchmarks/gpu/kernel_speed.py [--rows 'spider-1b, expand*' ...]

A script called ``kernels.py`` would hide the package ``kernels`` from every script here, because Python looks
for modules beside a script first.

Ops. ``kernel_ops.py`` makes each op and each backward in several ways and counts the bytes that they must
move. ``device_time.py`` times the ways. A copy of as many bytes on the device is the floor. The line of a row
has the kernel's microseconds in a CUDA graph with a cold L2 cache; a few of them are the start of the graph.
It also has the microseconds of a call from Python, bytes per second, the copy's time over the kernel's, and
the launches of the kernel and of its torch version. The file has every kernel that any way launched.

Layer. Forward and backward of the model's own layer of experts with weights and input in bfloat16. The loop
calls one expert after the other. The other ways put all experts in one grouped product, with torch's sort and
gather or with the kernels, in bfloat16 or with fp8 products, eager and compiled. The row ``experts`` has the
products alone. Times are those of calls from Python.

A way that fails, or gives a result that differs too much, has an error and no figures. The row ``tests`` is
``pytest tests/gpu``. A rehearsal captures functions without compiling them, and torch versions stand in for
the kernels.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import questions
import torch
import torch._functorch.config
from device_time import Way, measure
from kernel_ops import OPS, Shape, backward_ways, expert_ways, forward_ways, has_backward, layer_ways
from questions import ROOT, Row, goal

from spider.model import build_model
from spider.model.spider.config import SpiderConfig

SHAPES = {
    "spider-1b": Shape(N=28_672, D=2048, E=32, K=2, F=512, shared=1024),
    "many-experts": Shape(N=16_384, D=1024, E=128, K=8, F=256, shared=256),
    "wide": Shape(N=32_768, D=4096, E=8, K=2, F=1024, shared=1024),
}
PATCHES = "patches"
"""Name of the shape that a layer of the preset's core gets in a micro-batch of the headline's shape."""
REHEARSED = {"odd": Shape(N=33, D=48, E=5, K=3, F=16, filled=20)}
LAYER, EXPERTS = "layer", "experts"

Ways = Mapping[str, Mapping[str, Any]]
Makers = dict[str, Callable[[], dict[str, Way]]]


def parts(shape: Shape, device: torch.device, compiled: Callable[..., Any]) -> Makers:
    """Return a function for each part that makes its ways."""
    makers: Makers = {
        LAYER: partial(layer_ways, shape, device, compiled),
        EXPERTS: partial(expert_ways, shape, device, compiled),
    }
    for name, make in OPS.items():
        makers[name] = lambda make=make: forward_ways(make(shape, device), compiled)
        if has_backward(name):
            makers[f"{name} backward"] = lambda make=make: backward_ways(make(shape, device), compiled)
    return makers


def patches(windows: int = 112, length: int = 256) -> Shape:
    """Return the shape that the warm-up uses for the preset's experts (`Fp8Parts.example`)."""
    with torch.device("meta"):
        config = SpiderConfig()
        own = build_model(config).fp8_parts()
        assert own is not None and config.moe is not None
        part, x_ND = own.example(windows, length, torch.device("meta"))
    moe = config.moe
    N, D = x_ND.shape
    return Shape(
        N=N,
        D=D,
        E=moe.experts,
        K=moe.top_k,
        F=moe.expert_hidden,
        shared=moe.shared_hidden,
        filled=part.valid,
    )


def main(chosen: argparse.Namespace) -> int:
    question = questions.Question("kernel_speed", chosen, lambda rows: goals_of(at("spider-1b", rows)))
    device = torch.device("cpu" if chosen.rehearse else "cuda")
    torch._functorch.config.donated_buffer = False  # a backward is timed many times

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        backend = "eager" if chosen.rehearse else "inductor"
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    shapes = REHEARSED if chosen.rehearse else {**SHAPES, PATCHES: patches()}
    for shape_name, shape in shapes.items():
        for name, make in parts(shape, device, compiled).items():
            call = partial(timed, make, device, 3 if chosen.rehearse else 50)
            seconds, describe = (90, describe_layer) if name in (LAYER, EXPERTS) else (20, describe_op)
            question.measure(f"{shape_name}, {name}", seconds, call, describe)
    if not chosen.rehearse:
        question.measure("tests", 240, tests, lambda row: row["summary"])
    return question.end()


def at(shape: str, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Ways]:
    """Return the ways of each part at a shape."""
    return {name.partition(", ")[2]: of["ways"] for name, of in rows.items() if name.startswith(f"{shape}, ")}


def timed(make: Callable[[], dict[str, Way]], device: torch.device, repeats: int) -> dict[str, Any]:
    """Time all ways of a part; the row has an error if a way that uses the kernels has one."""
    torch.manual_seed(0)
    ways = make()
    try:
        found = measure(ways, device, repeats)
        ours = ((name, of) for name, of in found.items() if name.startswith("kernel"))
        wrong = [f"{name}, {of['error']}" for name, of in ours if "error" in of]
        return {"ways": found, **({"error": "; ".join(wrong)} if wrong else {})}
    finally:
        del ways
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def tests(where: str = "tests/gpu", workers: int = 12) -> dict[str, Any]:
    """Run ``tests/gpu``: kernels against their torch versions at drawn shapes, the models, and fp8.

    The error of the row names the tests that failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider", where]
    command += ["-k", "not sanitizer"]  # it needs the device alone
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    summary = lines[-1] if lines else "no output"
    failed = [line[:160] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    error = {"error": "; ".join([summary, *failed[:12]])} if done.returncode else {}
    return {"summary": summary, "tail": lines[-40:], **error}


def describe_op(row: Row) -> str:
    ways = row["ways"]
    kernel, twin = ways.get("kernel", {}), ways.get("twin", {})
    time, moved = _time(kernel), ways.get("copy", {}).get("bytes")
    words = [f"kernel {_us(kernel)} us, called {_number(kernel.get('us'))}"]
    if moved and time:
        words.append(f"{moved / 1e6:,.1f} MB at {moved / time / 1e3:,.0f} GB/s")
    if share := _share(ways):
        words.append(f"{share:.0%} of a copy")
    if kernel.get("launches") is not None:
        words.append(f"{kernel['launches']} launches for {_number(twin.get('launches'))}")
    others = ", ".join(f"{name} {_us(ways[name])}" for name in ("twin", "compiled", "loop") if name in ways)
    return "; ".join([*words, others, *_problems(ways)])


def describe_layer(row: Row) -> str:
    ways = row["ways"]
    loop, best = _best(ways, ("loop",)), _best(ways, ("torch", "torch compiled"))
    words = []
    for name, of in ways.items():
        if "us" in of:
            against = f" ({loop / of['us']:.2f}x the loop)" if loop else ""
            against += f" ({best / of['us']:.2f}x torch)" if best and name.startswith("kernels") else ""
            words.append(f"{name} {_number(of['us'])} us{against}")
    return "; ".join([*words, *_problems(ways)])


def _problems(ways: Ways) -> list[str]:
    kinds = ("error", "graph_error")
    return [f"{name}: {of[kind]}" for name, of in ways.items() for kind in kinds if kind in of]


def _time(of: Mapping[str, Any]) -> float | None:
    """Return the microseconds in a graph, or of a call if the way cannot be in one."""
    return of.get("replayed_us") or of.get("us")


def _us(of: Mapping[str, Any]) -> str:
    return _number(_time(of)) or "failed"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:,.1f}" if x < 100 and x != int(x) else f"{x:,.0f}"


def _share(ways: Ways) -> float | None:
    copy, kernel = (_time(ways.get(way, {})) for way in ("copy", "kernel"))
    return copy / kernel if copy and kernel else None


def _best(ways: Ways, of: tuple[str, ...]) -> float | None:
    return min((ways[way]["us"] for way in of if "us" in ways.get(way, {})), default=None)


def goals_of(found: Mapping[str, Ways]) -> list[dict[str, Any]]:
    """Return the goals at one shape."""
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
    return [goal(aim, figure, met) for aim, figure, met in goals]


if __name__ == "__main__":
    sys.exit(main(questions.parser(__doc__).parse_args()))
