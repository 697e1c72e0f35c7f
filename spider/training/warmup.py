"""Measure before training which precision each matrix product should use and what a step costs.

The warm-up runs the real model on a micro-batch like the stage's (documents, answers) and notes every
linear layer's product (M rows, K in, N out). It times each distinct product forward and backward in fp32,
bf16 and, where device and layer allow, the run's fp8 recipe, casts included. A part that the family
multiplies in fp8 itself is timed as a whole, in bf16 and in fp8. Then it times whole training steps in the
remaining candidates, because a product that wins alone may lose in a step (on a CPU, bf16 also casts
everything else). Each time is the least of as many calls as fit into a share of a time budget. A precision
that runs out of memory is left out.

Under FSDP no process has the memory for the whole model. The warm-up then runs a model with one layer of each
kind (`ModelConfig.shallow`), and multiplies its seconds by the ratio of the FLOPs. The memory that it records
is that of the small model.

A compiled run's first step starts with nothing compiled, so its time is cold. The compiled code is kept in an
archive beside the record (``compilecache.py``). A training stage of this shape on the same kind of processor
reads it and compiles nothing. One process measures for all that train together, because each of them
compiles the forward pass of a single device.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import re
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from spider.config import StageSpec
from spider.config.model import ModelConfig
from spider.data.loader import Batch
from spider.errors import TrainingError
from spider.model import build_model, choose_kernels
from spider.model.interface import Model
from spider.processes.device import available, choose_attention, choose_tf32, make_deterministic
from spider.processes.parallel import compile_forward
from spider.training import compilecache
from spider.training.fit import fitted
from spider.training.loop import documents_in_a_row
from spider.training.memory import check_fits, meta_model, out_of_memory, ran_out
from spider.training.optim import build_optimizer, narrow_weights
from spider.training.passes import Graph, Inputs, inputs_of, loss_of, side_stream, why_eager
from spider.training.precision import (
    Precision,
    check_recipe,
    compiles,
    decide,
    device_name,
    eligible,
    has_bf16,
    has_fp8,
    to_fp8,
)
from spider.training.warmup_record import Kind, Parts, Product, Step, Warmup

log = logging.getLogger(__name__)

#: Time budgets in seconds: all products together, and the steps of one candidate.
_GEMM_SECONDS, _STEP_SECONDS = 1.0, 1.5
#: A candidate replaces the most exact one only if its step takes less than this fraction of the time.
_CLEARLY = 0.95
#: Least M, K and N to time in fp8. Below it casts cost more than fp8 gains, and timing costs a compilation.
_FP8_LEAST = 1024
#: Calls of a product on a GPU between two waits, because to launch and to wait may take longer than a call.
_CALLS = 10
_KINDS: tuple[Kind, ...] = ("fp32", "bf16", "fp8")

Products = dict[tuple[int, int, int], dict[str, int]]


def warm_up(spec: StageSpec, output: Path, data: Path | None = None) -> Warmup:
    """Measure the shape of a stage and write its record; stages of equal shape (`StageSpec.shape`) share it.

    Args:
        data: shards folder of the stage's data, which decides how many documents a row has.

    Raises:
        TrainingError, ValueError: the device lacks the configured precision, kernels or memory.
    """
    began = time.perf_counter()
    device = torch.device(available())
    spec = fitted(spec, spec.processes, device)
    configured, recipe = spec.precision, spec.fp8_recipe
    check_recipe(spec, device)
    check_fits(spec, decide(configured, recipe, device, None).kind, device, spec.processes)
    make_deterministic(device, spec.deterministic)
    choose_attention(device, deterministic=spec.deterministic)
    choose_kernels(spec.kernels)
    choose_tf32(spec.tf32)

    products, fp8_eligible = _products(spec, device, data), eligible(meta_model(spec))
    gemms = _time_products(spec, products, fp8_eligible, device)
    fp8_layers = _fp8_layers(fp8_eligible, gemms) if has_fp8(device) else []
    parts = _time_parts(spec, device)
    if parts and parts.fastest == "fp8":
        fp8_layers += parts.layers
    plan = frozenset(fp8_layers) if configured == "auto" else None
    kinds = _candidates(spec, device, fp8_layers)

    def steps(kind: Kind) -> Step:
        return _time_steps(spec, Precision(kind, "measured", plan, recipe), device, data)

    archive = output.with_suffix(".compile-cache")
    compiled = any(compiles(spec, kind, device) for kind in kinds)
    with compilecache.saved_to(archive) if compiled else contextlib.nullcontext():
        step = _fitting(spec, "a step", kinds, steps)
    costs = [f"{k} {1000 * s.seconds:.0f} ms, {s.peak_memory_mb / 1000:.2f} GB" for k, s in step.items()]
    chosen = "" if configured == "auto" else "configured, "
    of = "one micro-batch" + ", from fewer layers" * (_measured_model(spec) != spec.model)
    return Warmup(
        format=Warmup.FORMAT,
        run=spec.run,
        device=device_name(device),
        threads=torch.get_num_threads(),
        micro_batch=spec.micro_batch(spec.processes),
        checkpointing=spec.model.recomputes,
        versions={"python": python_version(), "torch": torch.__version__, "torchao": version("torchao")},
        precision=_fastest(step) if configured == "auto" else configured,
        reason=f"{chosen}measured on {device_name(device)}, a step of {of}: {'; '.join(costs)}",
        fp8_recipe=recipe,
        fp8_layers=fp8_layers,
        step=step,
        gemms=gemms,
        parts=parts,
        compile=compilecache.describe(archive, device) if compiled else None,
        seconds=round(time.perf_counter() - began, 2),
    ).write(output)


def _candidates(spec: StageSpec, device: torch.device, fp8_layers: list[str]) -> list[Kind]:
    """Return the precisions to time whole steps in, at least one.

    With ``compile: true``, precisions that cannot be compiled are left out unless no other is left.
    """
    if spec.precision != "auto":
        return [cast(Kind, spec.precision)]
    kinds: list[Kind] = ["fp32", "bf16"]
    if device.type == "cuda":
        narrow: list[Kind] = ["bf16", "fp8"] if fp8_layers else ["bf16"]
        kinds = narrow if has_bf16(device) else ["fp32"]
    return [kind for kind in kinds if not spec.model.problems(kind, spec.compile)] or kinds


def _fastest(step: dict[Kind, Step]) -> Kind:
    """Return the first and most exact candidate, unless another one is clearly faster."""
    first, *others = step
    best = min(others, key=lambda kind: step[kind].seconds, default=first)
    return best if step[best].seconds < _CLEARLY * step[first].seconds else first


def _measured_model(spec: StageSpec) -> ModelConfig:
    """Return the block of the model that is run: the stage's, or a shallow one if processes share it."""
    return spec.model.shallow() if spec.parallel == "fsdp" and spec.processes > 1 else spec.model


def _fitting(
    spec: StageSpec, what: str, kinds: Iterable[Kind], measure: Callable[[Kind], Any]
) -> dict[Kind, Any]:
    """Measure each precision, and leave out those that run out of memory.

    Raises:
        TrainingError: none is left.
    """
    measured: dict[Kind, Any] = {}
    for kind in kinds:
        try:
            measured[kind] = measure(kind)
        except RuntimeError as error:
            if compiler := compilecache.compiler_failed(error):
                raise TrainingError(f"in the warm-up, {what}: {compiler}") from error
            if not ran_out(error):
                raise
            failed = str(error)
            log.warning("%s in %s is left out: out of memory (%s)", what, kind, failed)
    if not measured:
        raise TrainingError(out_of_memory(spec, spec.processes, f"in the warm-up, {what}", failed))
    return measured


def _products(spec: StageSpec, device: torch.device, data: Path | None = None) -> Products:
    """Return how often each layer computes each distinct (M, K, N)."""
    noted: defaultdict[str, Counter[tuple[int, int, int]]] = defaultdict(Counter)
    torch.manual_seed(spec.seed)  # The number of patches depends on the initial weights.
    model = build_model(_measured_model(spec)).to(device)
    model.most_documents = documents_in_a_row(spec, data)

    def note(name: str, module: nn.Linear, args: tuple[Tensor, ...]) -> None:
        rows = args[0].numel() // module.in_features
        noted[name][rows, module.in_features, module.out_features] += 1

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(note, name))
    # A GPU groups experts in bf16 only; the shapes are the same in any arithmetic.
    precision = decide("auto", spec.fp8_recipe, device, None)
    with torch.no_grad():
        batch = _random_batch(spec, model)
        loss_of(model, inputs_of(batch, device, model.tokens.pad, spec), spec, precision)
    # A layer that a shallow model lacks computes what those of its name with another number do.
    like = {re.sub(r"\d+", "#", name): shapes for name, shapes in noted.items()}
    products: Products = defaultdict(dict)
    for name, _ in meta_model(spec).named_modules():
        for shape, count in (noted[name] or like.get(re.sub(r"\d+", "#", name), Counter())).items():
            products[shape][name] = count
    return products


def _random_batch(spec: StageSpec, model: Model) -> Batch:
    """Return a micro-batch of random letters in the form of the stage's; each row is one document."""
    s, rows = spec.settings, spec.micro_batch(spec.processes)
    letters = np.random.default_rng(spec.seed).integers(32, 127, (rows, s.seq_len + 1), dtype=np.uint16)
    candidates = model.empty_candidates(torch.from_numpy(letters[:, 1:].astype(np.int64)))
    return Batch(
        letters,
        {},
        **{name: tensor.numpy() for name, tensor in candidates.items()},
        learned_BT=np.ones((rows, s.seq_len), bool),
        segments_BT=np.ones((rows, s.seq_len), np.uint16),
        advantage_B=np.ones(rows, np.float32) if s.objective == "reinforce" else None,
    )


def _time_products(
    spec: StageSpec, products: Products, fp8_eligible: frozenset[str], device: torch.device
) -> list[Product]:
    """Time every distinct product in each precision that the device and one of its layers allow."""
    budget = _GEMM_SECONDS / max(1, 3 * len(products))
    timed = []
    for (m, k, n), layers in sorted(products.items()):
        narrow = has_fp8(device) and not fp8_eligible.isdisjoint(layers) and min(m, k, n) >= _FP8_LEAST

        def time_one(kind: Kind, m: int = m, k: int = k, n: int = n) -> float:
            layer = nn.Sequential(nn.Linear(k, n, bias=False, device=device))
            if kind == "fp8":
                to_fp8(layer, spec.fp8_recipe, ["0"])
            x_MK = torch.randn(m, k, device=device)
            compiled = kind == "fp8" and spec.compiled_on(device.type, kind)
            return milliseconds(layer, x_MK, kind, compiled, budget)

        ms = _fitting(spec, f"the product {m} x {k} x {n}", _KINDS if narrow else _KINDS[:2], time_one)
        timed.append(
            Product(
                m=m,
                k=k,
                n=n,
                uses=sum(layers.values()),
                ms=ms,
                fastest=min(ms, key=ms.__getitem__),
                layers=sorted(layers),
            )
        )
    return timed


def _time_parts(spec: StageSpec, device: torch.device) -> Parts | None:
    """Time a layer that the family multiplies in fp8 itself, if there is one and the device supports it."""
    if not has_fp8(device):
        return None
    with torch.device("meta"):
        own = build_model(spec.model).fp8_parts()
    if own is None or not own.runs_on(device):
        return None
    rows: list[int] = []

    def time_one(kind: Kind) -> float:
        part, x_MK = own.example(spec.micro_batch(spec.processes), spec.settings.seq_len, device)
        rows.append(len(x_MK))
        part.fp8 = kind == "fp8"  # type: ignore[assignment]
        return milliseconds(part, x_MK, kind, spec.compiled_on(device.type, kind), _GEMM_SECONDS / 10)

    ms = _fitting(spec, f"the part {min(own.layers)}", _KINDS[1:], time_one)
    return Parts(
        tokens=rows[0],
        uses=spec.loops * len(own.layers),
        ms=ms,
        fastest=min(ms, key=ms.__getitem__),
        layers=sorted(own.layers),
    )


def _fp8_layers(fp8_eligible: frozenset[str], gemms: list[Product]) -> list[str]:
    """Return the eligible layers that compute only products that were fastest in fp8."""
    return sorted(fp8_eligible.difference(*(product.layers for product in gemms if product.fastest != "fp8")))


def milliseconds(part: nn.Module, x_MK: Tensor, kind: Kind, compiled: bool, budget: float) -> float:
    """Return the milliseconds of forward and backward of a part of the model on the rows ``x_MK``."""
    if compiled:
        # Without a reset, shapes count as recompilations of one function, which soon falls back to eager.
        torch.compiler.reset()
        part.compile()
    precision = Precision(kind, "measured")
    # Under autocast a layer receives bf16 activations, so the cast of its input is not its own cost.
    x_MK = x_MK.to(precision.compute).requires_grad_()
    with precision.autocast(x_MK.device):
        dy_MN = torch.randn_like(part(x_MK))

    def once() -> None:
        with precision.autocast(x_MK.device):
            y_MN = part(x_MK)
        y_MN.backward(dy_MN)

    seconds_of(once, x_MK.device, 0)
    calls = _CALLS if x_MK.device.type == "cuda" else 1
    return round(1000 * seconds_of(once, x_MK.device, budget, calls), 4)


def _time_steps(spec: StageSpec, precision: Precision, device: torch.device, data: Path | None) -> Step:
    """Measure a micro-batch's forward, backward and update: first step, later steps and peak memory."""
    compiled = spec.compiled_on(device.type, precision.kind)
    if compiled:
        torch.compiler.reset()  # imports the compiler
    gc.collect()  # earlier measurements hold memory in reference cycles
    torch.manual_seed(spec.seed)
    model = build_model(_measured_model(spec)).to(device)
    model.most_documents = documents_in_a_row(spec, data)
    precision.prepare(model)
    narrow_weights(model, spec.optimizer)
    optimizer = build_optimizer(model, spec.optimizer, spec.settings.lr, precision.compute, compiled=compiled)
    if compiled:
        compile_forward(model)
    batch, length = _random_batch(spec, model), (spec.settings.seq_len, spec.settings.n_loops)
    ratio = meta_model(spec).flops_per_token(*length) / model.flops_per_token(*length)
    forget_peak(device)

    def passes(inputs: Inputs) -> dict[str, Tensor]:
        loss_of(model, inputs, spec, precision)[0].backward()
        return {}

    def step(passes: Callable[[Inputs], Any], free: bool) -> None:
        passes(inputs_of(batch, device, model.tokens.pad, spec))
        optimizer.step()
        model.after_step()
        optimizer.zero_grad(free=free)

    eager = why_eager(spec, device, spec.processes, compiled=compiled)
    with side_stream(device, enabled=eager is None):
        first = round(seconds_of(partial(step, passes, free=eager is not None), device, 0), 4)
        if eager is None:
            passes = Graph(passes, inputs_of(batch, device, model.tokens.pad, spec))
        seconds = seconds_of(partial(step, passes, free=eager is not None), device, _STEP_SECONDS - first)
    return Step(first_seconds=first, seconds=round(seconds * ratio, 5), peak_memory_mb=peak_memory_mb(device))


def seconds_of(once: Callable[[], Any], device: torch.device, budget: float, calls: int = 1) -> float:
    """Return the least time of a call, the mean of ``calls`` in a row; repeat until ``budget`` seconds are
    spent, at least once."""
    best, deadline = float("inf"), time.perf_counter() + budget
    while True:
        began = time.perf_counter()
        for _ in range(calls):
            once()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        best = min(best, (ended - began) / calls)
        if ended > deadline:
            return best


def forget_peak(device: torch.device) -> None:
    """Reset the peak memory; on a CPU only if the kernel allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(AttributeError):  # the allocator returns freed memory only here
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory in MB: of the allocator on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1)
