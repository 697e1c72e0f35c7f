"""Measure before training: which arithmetic each matrix product of the run should use, and what a step costs.

The warm-up runs the real model at the run's real shapes, notes every linear layer's product (M rows, K in, N
out), and times each distinct one forward and backward in fp32, bf16 and, where the device has it and a layer
may run in it, the run's fp8 recipe, casts included. What a family multiplies in fp8 itself is timed whole, in
bf16 and in fp8. Then it times whole training steps in the candidates that are left, because a product that
wins alone may lose in company (a CPU spends more on bf16's casts of everything else than it saves). Each time
is the least of as many calls as its share of a budget allows.

The steps of a compiled run begin with nothing compiled, so the first is timed cold, and what the compiler
made is kept in an archive beside the record (``compilecache.py``): a training stage of this shape, on
processors of this kind, finds it there and compiles nothing. One process measures for all that train
together, because each compiles the forward pass of a single device.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from spider.config import StageSpec
from spider.data.loader import Batch, to_device
from spider.model import build_model, choose_kernels
from spider.processes.device import one_order
from spider.processes.parallel import compile_forward
from spider.tokens import Tokens
from spider.training import compilecache
from spider.training.measurements import Kind, Parts, Product, Step, Warmup
from spider.training.memory import check_fits
from spider.training.optim import build_optimizer, narrow_weights
from spider.training.precision import (
    Precision,
    compiles,
    decide,
    device_name,
    eligible,
    has_bf16,
    has_fp8,
    to_fp8,
)

log = logging.getLogger(__name__)

#: Budgets: of all products together; of whole steps of one candidate.
_GEMM_SECONDS, _STEP_SECONDS = 1.0, 1.5
_CLEARLY = 0.95
#: Of M, K and N: below it casts cost more than fp8 gains, and each product timed costs a compilation.
_FP8_LEAST = 1024
_KINDS: tuple[Kind, ...] = ("fp32", "bf16", "fp8")

Products = dict[tuple[int, int, int], dict[str, int]]


def warm_up(spec: StageSpec, output: Path) -> Warmup:
    """Measure the shape of a stage and write its record; stages of equal shape (`StageSpec.shape`) share it.
    `TrainingError` and `ValueError` say that the device lacks the precision or the kernels asked for."""
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked, recipe = spec.precision, spec.fp8_recipe
    check_fits(spec, decide(asked, recipe, device, None).kind, device, spec.processes)
    one_order(device)
    choose_kernels(spec.kernels)

    products, may = _products(spec, device)
    gemms = _time_products(spec, products, may, device)
    fp8_layers = _fp8_layers(may, gemms) if has_fp8(device) else []
    parts = _time_parts(spec, device)
    if parts and parts.fastest == "fp8":
        fp8_layers += parts.layers
    plan = frozenset(fp8_layers) if asked == "auto" else None
    kinds = _candidates(spec, device, fp8_layers)
    archive, compiled = output.with_suffix(".compile-cache"), any(compiles(spec, k, device) for k in kinds)
    with compilecache.kept(archive) if compiled else contextlib.nullcontext():
        step = {kind: _time_steps(spec, Precision(kind, "measured", plan, recipe), device) for kind in kinds}
    costs = [f"{k} {1000 * s.seconds:.0f} ms, {s.peak_memory_mb / 1000:.2f} GB" for k, s in step.items()]
    chosen = "" if asked == "auto" else "asked for, "
    return Warmup(
        format=Warmup.FORMAT,
        run=spec.run,
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions={"python": python_version(), "torch": torch.__version__, "torchao": version("torchao")},
        precision=_fastest(step) if asked == "auto" else asked,
        reason=f"{chosen}measured on {device_name(device)}, a step of one micro-batch: {'; '.join(costs)}",
        fp8_recipe=recipe,
        fp8_layers=fp8_layers,
        step_shape={k: spec.shape_fields()[k] for k in ("seq_len", "micro_batch", "n_loops")},
        step=step,
        gemms=gemms,
        parts=parts,
        compile=compilecache.describe(archive, device) if compiled else None,
        seconds=round(time.perf_counter() - began, 2),
    ).write(output)


def _candidates(spec: StageSpec, device: torch.device, fp8_layers: list[str]) -> list[Kind]:
    """What whole steps are timed in, one at least; what cannot be compiled, though that is asked for, is
    left out where there is another."""
    if spec.precision != "auto":
        return [cast(Kind, spec.precision)]
    kinds: list[Kind] = ["fp32", "bf16"]
    if device.type == "cuda":
        narrow: list[Kind] = ["bf16", "fp8"] if fp8_layers else ["bf16"]
        kinds = narrow if has_bf16(device) else ["fp32"]
    return [kind for kind in kinds if not spec.model.problems(kind, spec.compile)] or kinds


def _fastest(step: dict[Kind, Step]) -> Kind:
    """The first candidate, which is the most exact, unless another is clearly faster."""
    first, *others = step
    best = min(others, key=lambda kind: step[kind].seconds, default=first)
    return best if step[best].seconds < _CLEARLY * step[first].seconds else first


def _products(spec: StageSpec, device: torch.device) -> tuple[Products, frozenset[str]]:
    """The layers that compute each distinct (M, K, N), and how often in a forward pass; who may in fp8."""
    products: Products = defaultdict(lambda: defaultdict(int))
    model = build_model(spec.model).to(device)

    def note(name: str, module: nn.Linear, args: tuple[Tensor, ...]) -> None:
        rows = args[0].numel() // module.in_features
        products[rows, module.in_features, module.out_features][name] += 1

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(note, name))
    tokens_BT, _ = _random_text(spec, model.tokens, device)
    # A GPU groups experts in bf16 only; the shapes are the same in any arithmetic.
    with torch.no_grad(), decide("auto", spec.fp8_recipe, device, None).autocast(device):
        model(tokens_BT, n_loops=spec.settings.n_loops, **model.without_knowledge(tokens_BT))
    return products, eligible(model)


def _random_text(spec: StageSpec, tokens: Tokens, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a micro-batch of random letters."""
    shape = (spec.micro_batch(spec.processes), spec.settings.seq_len + 1)
    letters = np.random.default_rng(spec.seed).integers(32, 127, shape, dtype=np.uint16)
    return to_device(Batch(letters, {}), device, tokens.pad)


def _time_products(
    spec: StageSpec, products: Products, may: frozenset[str], device: torch.device
) -> list[Product]:
    """Every distinct product by precision; in fp8 where the device has it and a layer ``may`` use it."""
    budget = _GEMM_SECONDS / max(1, 3 * len(products))
    timed, small = [], []
    for (m, k, n), layers in sorted(products.items()):
        ms: dict[Kind, float] = {}
        narrow = has_fp8(device) and not may.isdisjoint(layers)
        if narrow and min(m, k, n) < _FP8_LEAST:
            small.append(f"{m} x {k} x {n}")
            narrow = False
        for kind in _KINDS if narrow else _KINDS[:2]:
            layer = nn.Sequential(nn.Linear(k, n, bias=False, device=device))
            if kind == "fp8":
                to_fp8(layer, spec.fp8_recipe, ["0"])
            x_MK = torch.randn(m, k, device=device)
            compiled = kind == "fp8" and spec.compiled_on(device.type, kind)
            ms[kind] = milliseconds(layer, x_MK, kind, compiled, budget)
        fastest, uses = min(ms, key=ms.__getitem__), sum(layers.values())
        timed.append(Product(m=m, k=k, n=n, uses=uses, ms=ms, fastest=fastest, layers=sorted(layers)))
    if small:
        log.info("not timed in fp8, being below %d in M, K or N: %s", _FP8_LEAST, ", ".join(small))
    return timed


def _time_parts(spec: StageSpec, device: torch.device) -> Parts | None:
    """One of the layers that the family multiplies in fp8 itself, if there is one and the device can."""
    if not has_fp8(device):
        return None
    with torch.device("meta"):
        own = build_model(spec.model).fp8_parts()
    if own is None or not own.runs_on(device):
        return None
    ms: dict[Kind, float] = {}
    for kind in _KINDS[1:]:
        part, x_MK = own.example(spec.micro_batch(spec.processes), spec.settings.seq_len, device)
        part.fp8 = kind == "fp8"  # type: ignore[assignment]
        ms[kind] = milliseconds(part, x_MK, kind, spec.compiled_on(device.type, kind), _GEMM_SECONDS / 10)
    layers, fastest = sorted(own.layers), min(ms, key=ms.__getitem__)
    return Parts(tokens=len(x_MK), uses=spec.loops * len(layers), ms=ms, fastest=fastest, layers=layers)


def _fp8_layers(may: frozenset[str], gemms: list[Product]) -> list[str]:
    """Layers that may run in fp8 and whose every product was measured fastest in it."""
    return sorted(may.difference(*(product.layers for product in gemms if product.fastest != "fp8")))


def milliseconds(part: nn.Module, x_MK: Tensor, kind: Kind, compiled: bool, budget: float) -> float:
    """Of forward and backward of a part of the model, for as many random rows as ``x_MK`` has."""
    if compiled:
        # Else the shapes count as recompilations of one function, which soon falls back to eager.
        torch.compiler.reset()
        part.compile()
    precision = Precision(kind, "measured")
    # Under autocast a real layer meets bf16 activations: the cast of its input is not its own cost.
    x_MK = x_MK.to(precision.compute).requires_grad_()
    with precision.autocast(x_MK.device):
        dy_MN = torch.randn_like(part(x_MK))

    def once() -> None:
        with precision.autocast(x_MK.device):
            y_MN = part(x_MK)
        y_MN.backward(dy_MN)

    seconds_of(once, x_MK.device, 0)
    return round(1000 * seconds_of(once, x_MK.device, budget), 4)


def _time_steps(spec: StageSpec, precision: Precision, device: torch.device) -> Step:
    """First step, later steps, and peak memory of one micro-batch's forward, backward and update."""
    if spec.compiled_on(device.type, precision.kind):
        torch.compiler.reset()  # imports the compiler
    gc.collect()  # what was timed before is in cycles, and would count as memory of this
    torch.manual_seed(spec.seed)
    compiled, model = spec.compiled_on(device.type, precision.kind), build_model(spec.model).to(device)
    precision.prepare(model)
    narrow_weights(model, spec.optimizer)
    optimizer = build_optimizer(model, spec.optimizer, spec.settings.lr, precision.compute, compiled=compiled)
    if compiled:
        compile_forward(model, spec.depths)
    tokens_BT, labels_BT = _random_text(spec, model.tokens, device)
    given = model.without_knowledge(tokens_BT)
    forget_peak(device)

    def once(n_loops: int | None = spec.settings.n_loops) -> None:
        with precision.autocast(device):
            loss = model(tokens_BT, labels_BT, n_loops=n_loops, **given).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        model.after_step()
        optimizer.zero_grad()

    first = round(seconds_of(once, device, 0), 4)
    seconds = round(seconds_of(once, device, _STEP_SECONDS - first), 5)
    measured = Step(first_seconds=first, seconds=seconds, peak_memory_mb=peak_memory_mb(device))
    if compiled and spec.model.samples_loops:
        for depth in range(1, 2 * spec.loops):
            once(depth)
    return measured


def seconds_of(once: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Least time of one call, over calls until ``budget`` seconds are spent, one at least."""
    best, deadline = float("inf"), time.perf_counter() + budget
    while True:
        began = time.perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended > deadline:
            return best


def forget_peak(device: torch.device) -> None:
    """Count the most memory in use anew; the process's goes on where the kernel does not let it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(AttributeError):  # freed memory is not handed back (`allocator`) but here
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(device: torch.device) -> float:
    """Of the allocator on a GPU; of the whole process on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1)
