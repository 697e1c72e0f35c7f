"""Measure before training: which arithmetic each matrix product of the run should use, and what a step costs.

The warm-up runs the real model at the run's real shapes, notes every linear layer's product (M rows, K in, N
out), and times each distinct one forward and backward in fp32, bf16 and, where a layer may run in it, the
run's fp8 recipe, casts included. A layer's experts are timed whole, rows moved there and back, in bf16 and in
fp8. Then it times whole training steps in the candidates that are left, because a product that wins alone may
lose in company (a CPU spends more on bf16's casts of everything else than it saves). `decide` in
``precision.py`` reads the outcome.

Where the device has no fp8 the products are timed with emulated fp8 and marked so: the path is exercised
everywhere, and never chosen. Every measurement stops after its share of a time budget, one repetition at
least.

The steps of a compiled run begin with nothing compiled, so the first is timed cold, and what the compiler
made is kept in an archive beside the record (``compilecache.py``): a training stage of this shape, on
processors of this kind, finds it there and compiles nothing. One process measures for all that train
together, because each compiles the forward pass of a single device.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import platform
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from kernels import grouped_mm_fp8
from kernels.route import Routing, route_torch
from spider import files
from spider.config import Fp8Recipe, StageSpec
from spider.data.batch import to_device
from spider.model import build_model, choose_kernels
from spider.model.spider.experts import Experts
from spider.processes.parallel import compile_forward
from spider.training import compilecache
from spider.training.allocator import return_freed_memory
from spider.training.optim import build_optimizer, narrow_weights
from spider.training.precision import (
    Kind,
    Precision,
    decide,
    device_name,
    eligible,
    experts_of,
    has_bf16,
    has_fp8,
    to_fp8,
)

log = logging.getLogger(__name__)

FORMAT = 1
_CACHE = ".compile-cache"
_GEMM_SECONDS, _STEP_SECONDS = 2.0, 2.0
"""Budgets on a machine where one repetition is shorter: all products together; whole steps of one
candidate."""
_CLEARLY = 0.95

Shape = tuple[int, int, int]


def warm_up(spec: StageSpec, output: Path) -> dict[str, Any]:
    """Measure one shape of a run and write what was found; stages of equal shape share it.

    Args:
        spec: a stage of that shape (`StageSpec.shape`).
        output: ``runs/{run}/warmup-{shape}.json``.

    Returns:
        the record; ``precision`` is what ``auto`` comes to, ``reason`` why, ``fp8_layers`` who takes part.

    Raises:
        TrainingError: the run asks for a precision that this device does not have.
        ValueError: it asks for kernels that cannot run here.
    """
    began = time.perf_counter()
    device = _device()
    asked, recipe = spec.precision, spec.fp8_recipe
    decide(asked, recipe, device, None)
    choose_kernels(spec.kernels)
    compiled = spec.compiled_on(device.type)

    products, may = _products(spec, device)
    gemms = _time_products(products, may, recipe, device, compiled and has_fp8(device))
    fp8_layers = _fp8_layers(products, may, gemms) if has_fp8(device) else []
    experts = _time_experts(spec, device, compiled and has_fp8(device))
    if experts and experts["fastest"] == "fp8":
        fp8_layers += experts["layers"]
    plan = frozenset(fp8_layers) if asked == "auto" else None
    archive = output.with_suffix(_CACHE)
    with compilecache.kept(archive) if compiled else contextlib.nullcontext():
        step = {
            kind: _time_steps(spec, _precision(kind, plan, recipe), device, compiled)
            for kind in _candidates(asked, device, fp8_layers)
            if not spec.model.problems(kind, compiled)
        }
    fastest = _fastest(step)
    record = {
        "format": FORMAT,
        "run": spec.run,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchao": version("torchao"),
        },
        "precision": fastest if asked == "auto" else asked,
        "reason": _reason(asked, step, device),
        "fp8_recipe": recipe,
        "fp8_layers": fp8_layers,
        "fp8_emulated": not has_fp8(device),
        "step_shape": {k: spec.shape_fields()[k] for k in ("seq_len", "micro_batch", "n_loops")},
        "step": step,
        "gemms": gemms,
        "experts": experts,
        "compile": _describe(archive, device) if compiled else None,
        "seconds": round(time.perf_counter() - began, 2),
    }
    files.write_json(output, record)
    return record


def _precision(kind: Kind, layers: frozenset[str] | None, recipe: Fp8Recipe) -> Precision:
    return Precision(kind, "measured", layers, recipe) if kind == "fp8" else Precision(kind, "measured")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _describe(archive: Path, device: torch.device) -> dict[str, Any]:
    return {"cache": archive.name, "bytes": archive.stat().st_size, "made_for": _processors(device)}


def _processors(device: torch.device) -> str:
    """What machine code is made for: the processor with the instructions that it has, and the GPU."""
    name = features = platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        about = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        about = {key.strip(): value.strip() for key, value in about.items()}
        name = about.get("model name", name)
        features = files.digest(about.get("flags") or about.get("Features"))
    gpu = f", {device_name(device)}" if device.type == "cuda" else ""
    return f"{name} ({features[:8]}){gpu}"


def load_compile_cache(warmup: Path) -> None:
    """Give the compiler what the warm-up compiled, if it left anything that runs here."""
    archive = warmup.with_suffix(_CACHE)
    if not archive.exists():
        return
    made_for, here = files.read_json(warmup)["compile"]["made_for"], _processors(_device())
    if made_for != here:
        log.info("compile: the warm-up compiled for %s, this is %s; compiling again", made_for, here)
        return
    try:
        compilecache.unpack(archive)
    except ValueError as error:
        log.warning("compile: %s; compiling again", error)
        return
    log.info("compile: found what the warm-up compiled (%.1f MB)", archive.stat().st_size / 1e6)


def _candidates(asked: str, device: torch.device, fp8_layers: list[str]) -> list[Kind]:
    if asked != "auto":
        return [cast(Kind, asked)]
    if device.type == "cpu":
        return ["fp32", "bf16"]
    if not has_bf16(device):
        return ["fp32"]
    return ["bf16", "fp8"] if fp8_layers else ["bf16"]


def _fastest(step: dict[Kind, dict[str, Any]]) -> Kind:
    """The first candidate, which is the most exact, unless another is clearly faster."""
    first, *others = step
    best = min(others, key=lambda kind: step[kind]["seconds"], default=first)
    return best if step[best]["seconds"] < _CLEARLY * step[first]["seconds"] else first


def _reason(asked: str, step: dict[Kind, dict[str, Any]], device: torch.device) -> str:
    costs = "; ".join(
        f"{kind} {1000 * s['seconds']:.0f} ms, {s['peak_memory_mb'] / 1000:.2f} GB"
        for kind, s in step.items()
    )
    chosen = "" if asked == "auto" else "asked for, "
    return f"{chosen}measured on {device_name(device)}, a step of one micro-batch: {costs}"


# ---------------------------------------------------------------------------------------- matrix products


def _products(spec: StageSpec, device: torch.device) -> tuple[dict[Shape, dict[str, int]], frozenset[str]]:
    """Each distinct (M, K, N) with the layers that compute it and how often in one forward pass; and which
    layers may run in fp8."""
    found: dict[Shape, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    model = build_model(spec.model).to(device)

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            assert isinstance(module, nn.Linear)
            rows = args[0].numel() // module.in_features
            found[rows, module.in_features, module.out_features][name] += 1

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(note(name))
    tokens_BT, _ = _random_bytes(spec, device)
    # A GPU groups experts in bf16 only; the shapes are the same in any arithmetic.
    with torch.no_grad(), decide("auto", spec.fp8_recipe, device, None).autocast(device):
        model(tokens_BT, n_loops=spec.settings.n_loops)
    return found, frozenset(name for name, module in model.named_modules() if eligible(module, name))


def _random_bytes(spec: StageSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (spec.micro_batch(spec.processes), spec.settings.seq_len + 1)
    return to_device(np.random.default_rng(spec.seed).integers(32, 127, shape, dtype=np.uint16), device)


def _time_products(
    products: dict[Shape, dict[str, int]],
    may: frozenset[str],
    recipe: Fp8Recipe,
    device: torch.device,
    compiled: bool,
) -> list[dict[str, Any]]:
    """Milliseconds of forward and backward of every distinct product, by precision; of fp8 where a layer
    ``may`` run in it."""
    budget = _GEMM_SECONDS / max(1, 3 * len(products))
    rows = []
    for (m, k, n), layers in sorted(products.items()):
        ms = {
            kind: round(1000 * _time_product((m, k, n), kind, recipe, device, compiled, budget), 4)
            for kind in ("fp32", "bf16", *(["fp8"] if may & layers.keys() else []))
        }
        usable = [kind for kind in ms if kind != "fp8" or has_fp8(device)]
        rows.append(
            {
                "m": m,
                "k": k,
                "n": n,
                "uses": sum(layers.values()),
                "ms": ms,
                "fastest": min(usable, key=lambda kind: ms[kind]),
                "layers": sorted(layers),
            }
        )
    return rows


def _time_product(
    shape: Shape, kind: str, recipe: Fp8Recipe, device: torch.device, compiled: bool, budget: float
) -> float:
    m, k, n = shape
    holder = nn.Sequential(nn.Linear(k, n, bias=False, device=device))
    if kind == "fp8":
        to_fp8(holder, recipe, emulate=not has_fp8(device))
    return _time_there_and_back(holder, m, k, kind, device, compiled and kind == "fp8", budget)


def _time_there_and_back(
    part: nn.Module, rows: int, width: int, kind: str, device: torch.device, compiled: bool, budget: float
) -> float:
    """Seconds of forward and backward of a part of the model for ``rows`` random rows."""
    if compiled:
        # Else the shapes count as recompilations of one function, which soon falls back to eager.
        torch.compiler.reset()
        part.compile()
    # Under autocast a real layer meets bf16 activations: the cast of its input is not its own cost.
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    x_MK = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    precision = Precision("fp32" if kind == "fp32" else "bf16", "measured")
    with precision.autocast(device):
        dy_MN = torch.randn_like(part(x_MK))

    def once() -> None:
        with precision.autocast(device):
            y_MN = part(x_MK)
        y_MN.backward(dy_MN)

    once()
    _wait(device)
    return _seconds(once, device, budget)


def _time_experts(spec: StageSpec, device: torch.device, compiled: bool) -> dict[str, Any] | None:
    """Milliseconds of forward and backward of one layer's experts, by precision; None where no experts may
    run in fp8. Tokens choose at random: the load of a balanced router."""
    with torch.device("meta"):
        model = build_model(spec.model)
    layers = sorted(experts_of(model))
    if not layers or spec.model.moe is None:
        return None
    moe, tokens = (
        spec.model.moe,
        spec.micro_batch(spec.processes) * model.chunker.slots(spec.settings.seq_len),
    )
    routing = route_torch(torch.randn(tokens, moe.experts, device=device), None, moe.top_k)
    ms = {}
    for kind in ("bf16", "fp8"):
        experts = Experts(spec.model.hidden, moe).to(device)
        experts.init_weights()
        experts.fp8 = kind == "fp8"
        part = _Routed(experts, routing)
        seconds = _time_there_and_back(
            part, tokens, spec.model.hidden, kind, device, compiled, _GEMM_SECONDS / 10
        )
        ms[kind] = round(1000 * seconds, 4)
    fastest = "fp8" if grouped_mm_fp8.runs_on(device) and ms["fp8"] < ms["bf16"] else "bf16"
    return {
        "tokens": tokens,
        "uses": spec.loops * len(layers),
        "ms": ms,
        "fastest": fastest,
        "layers": layers,
    }


class _Routed(nn.Module):
    """Experts whose tokens have chosen."""

    def __init__(self, experts: Experts, routing: Routing) -> None:
        super().__init__()
        self.experts, self.routing = experts, routing

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.experts(x_ND, self.routing)


def _fp8_layers(
    products: dict[Shape, dict[str, int]], may: frozenset[str], gemms: list[dict[str, Any]]
) -> list[str]:
    """Layers that may run in fp8 and whose every product was measured fastest in it."""
    lost = [products[row["m"], row["k"], row["n"]] for row in gemms if row["fastest"] != "fp8"]
    return sorted(may.difference(*lost))


# -------------------------------------------------------------------------------------------- whole steps


def _time_steps(
    spec: StageSpec, precision: Precision, device: torch.device, compiled: bool
) -> dict[str, Any]:
    """First step, later steps, and peak memory of one micro-batch's forward, backward and update."""
    torch.compiler.reset()
    gc.collect()  # what was timed before is in cycles, and would count as memory of this
    torch.manual_seed(spec.seed)
    model = build_model(spec.model).to(device)
    precision.prepare(model)
    narrow_weights(model, spec.optimizer)
    optimizer = build_optimizer(model, spec.optimizer, spec.settings.lr, precision.compute, compiled=compiled)
    if compiled:
        compile_forward(model, spec.depths)
    tokens_BT, labels_BT = _random_bytes(spec, device)
    forget_peak(device)

    def once(n_loops: int | None = spec.settings.n_loops) -> None:
        with precision.autocast(device):
            loss = model(tokens_BT, labels_BT, n_loops=n_loops).loss
        loss.backward()
        optimizer.step()
        model.after_step()
        optimizer.zero_grad()

    began = time.perf_counter()
    once()
    _wait(device)
    first = time.perf_counter() - began
    seconds = _seconds(once, device, _STEP_SECONDS - first)
    measured = {
        "first_seconds": round(first, 4),
        "seconds": round(seconds, 5),
        "peak_memory_mb": peak_memory_mb(device),
    }
    if compiled and spec.model.samples_loops:
        for depth in range(1, 2 * spec.loops):
            once(depth)
    return measured


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


def _seconds(once: Callable[[], None], device: torch.device, budget: float) -> float:
    """Least time of one call, over calls until ``budget`` seconds are spent, one at least."""
    best, deadline = float("inf"), time.perf_counter() + budget
    while True:
        began = time.perf_counter()
        once()
        _wait(device)
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended > deadline:
            return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
