"""Measure before training: which arithmetic each matrix product of the run should use, and what a step costs.

The warm-up runs the real model at the run's real shapes, notes every linear layer's product (M rows, K in, N
out), and times each distinct one forward and backward in fp32, bf16 and fp8, casts included. Then it times
whole training steps in the candidates that are left, because a product that wins alone may lose in company (a
CPU spends more on bf16's casts of everything else than it saves). `decide` in ``precision.py`` reads the
outcome.

Where the device has no fp8 the products are timed with emulated fp8 and marked so: the path is exercised
everywhere, and never chosen. Every measurement stops after its share of a time budget, one repetition at
least.

For a compiled run the cold first step is timed and the compiler's caches are kept in a file beside the
record, where a training stage finds them. That file holds compiled *code*: it is loaded only
from the run's own folder.
"""

from __future__ import annotations

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

from spider import files
from spider.config import StageSpec
from spider.model import build_model
from spider.training.batch import to_device
from spider.training.optim import build_optimizer, narrow_weights
from spider.training.parallel import compile_forward
from spider.training.precision import (
    Kind,
    Precision,
    decide,
    device_name,
    eligible,
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
    """
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = spec.precision
    decide(asked, device, None)
    compiled = spec.compiled_on(device.type)

    products = _products(spec, device)
    gemms = _time_products(products, device, compiled and has_fp8(device))
    fp8_layers = _fp8_layers(products, gemms) if has_fp8(device) else []
    step = {
        kind: _time_steps(spec, Precision(kind, "measured", frozenset(fp8_layers)), device, compiled)
        for kind in _candidates(asked, device, fp8_layers)
        # torch compiles the grouped expert product in bf16 only
        if not (compiled and kind == "fp32" and spec.model.groups_experts)
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
        "fp8_layers": fp8_layers,
        "fp8_emulated": not has_fp8(device),
        "step_shape": {k: getattr(spec.settings, k) for k in ("seq_len", "micro_batch", "n_loops")},
        "step": step,
        "gemms": gemms,
        "compile": _save_compile_cache(output) if compiled else None,
        "seconds": round(time.perf_counter() - began, 2),
    }
    files.write_json(output, record)
    return record


def load_compile_cache(warmup: Path) -> None:
    """Give the compiler what the warm-up compiled, if it left anything."""
    path = warmup.with_suffix(_CACHE)
    if path.exists():
        torch.compiler.load_cache_artifacts(path.read_bytes())
        log.info("compile: caches of the warm-up loaded (%.1f MB)", path.stat().st_size / 1e6)


def _save_compile_cache(warmup: Path) -> dict[str, Any]:
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        return {"cache": None}
    path = warmup.with_suffix(_CACHE)
    with files.replacing(path) as beside:
        beside.write_bytes(saved[0])
    return {"cache": path.name, "bytes": len(saved[0])}


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
    if asked != "auto":
        return "asked for"
    times = ", ".join(f"{kind} {1000 * s['seconds']:.0f} ms" for kind, s in step.items())
    return f"measured on {device_name(device)}, a step of one micro-batch: {times}"


# ---------------------------------------------------------------------------------------- matrix products


def _products(spec: StageSpec, device: torch.device) -> dict[Shape, dict[str, int]]:
    """Each distinct (M, K, N) with the layers that compute it and how often in one forward pass."""
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
    with torch.no_grad():
        model(tokens_BT, n_loops=spec.settings.n_loops)
    return found


def _random_bytes(spec: StageSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (spec.settings.micro_batch, spec.settings.seq_len + 1)
    return to_device(np.random.default_rng(spec.seed).integers(32, 127, shape, dtype=np.uint16), device)


def _time_products(
    products: dict[Shape, dict[str, int]], device: torch.device, compiled: bool
) -> list[dict[str, Any]]:
    """Milliseconds of forward and backward of every distinct product, by precision."""
    budget = _GEMM_SECONDS / max(1, 3 * len(products))
    rows = []
    for (m, k, n), layers in sorted(products.items()):
        ms = {
            kind: round(1000 * _time_product((m, k, n), kind, device, compiled, budget), 4)
            for kind in ("fp32", "bf16", "fp8")
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


def _time_product(shape: Shape, kind: str, device: torch.device, compiled: bool, budget: float) -> float:
    m, k, n = shape
    holder = nn.Sequential(nn.Linear(k, n, bias=False, device=device))
    if kind == "fp8":
        to_fp8(holder, emulate=not has_fp8(device))
        if compiled:
            # Else the shapes count as recompilations of one function, which soon falls back to eager.
            torch.compiler.reset()
            holder.compile()
    x_MK = torch.randn(m, k, device=device, requires_grad=True)
    # Under autocast a real layer meets bf16 activations: the cast of its input is not its own cost.
    x_MK = x_MK.detach().to(torch.float32 if kind == "fp32" else torch.bfloat16).requires_grad_()
    precision = Precision("fp32" if kind == "fp32" else "bf16", "measured")
    with precision.autocast(device):
        dy_MN = torch.randn_like(holder(x_MK))

    def once() -> None:
        with precision.autocast(device):
            y_MN = holder(x_MK)
        y_MN.backward(dy_MN)

    once()
    _wait(device)
    return _seconds(once, device, budget)


def _fp8_layers(products: dict[Shape, dict[str, int]], gemms: list[dict[str, Any]]) -> list[str]:
    """Eligible layers whose every product was measured fastest in fp8."""
    wins: dict[str, bool] = {}
    for row in gemms:
        for name in products[row["m"], row["k"], row["n"]]:
            wins[name] = wins.get(name, True) and row["fastest"] == "fp8"
    dummy = nn.Linear(1, 1)
    return sorted(name for name, won in wins.items() if won and eligible(dummy, name))


# -------------------------------------------------------------------------------------------- whole steps


def _time_steps(
    spec: StageSpec, precision: Precision, device: torch.device, compiled: bool
) -> dict[str, Any]:
    """First step, later steps, and peak memory of one micro-batch's forward, backward and update."""
    torch.manual_seed(spec.seed)
    model = build_model(spec.model).to(device)
    precision.prepare(model)
    narrow_weights(model, spec.optimizer)
    optimizer = build_optimizer(model, spec.optimizer, spec.settings.lr, precision.compute, compiled=compiled)
    if compiled:
        compile_forward(model)
    tokens_BT, labels_BT = _random_bytes(spec, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def once() -> None:
        with precision.autocast(device):
            loss = model(tokens_BT, labels_BT, n_loops=spec.settings.n_loops).loss
        loss.backward()
        optimizer.step()
        model.after_step()
        optimizer.zero_grad()

    began = time.perf_counter()
    once()
    _wait(device)
    first = time.perf_counter() - began
    seconds = _seconds(once, device, _STEP_SECONDS - first)
    return {
        "first_seconds": round(first, 4),
        "seconds": round(seconds, 5),
        "peak_memory_mb": _peak_memory_mb(device),
    }


def _peak_memory_mb(device: torch.device) -> float:
    """Of the allocator on a GPU; of the whole process, so far, on a CPU."""
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
