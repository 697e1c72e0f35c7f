"""Measure before training which precision is fastest and what a step costs, and keep the compiled code.

The warm-up trains the real model on a micro-batch like the stage's (documents, answers) and times whole
steps: on a CPU in fp32 and bf16; on a GPU in bf16, and in fp8 where the model has large layers and the device
has fp8. Each time is the least of as many steps as fit into a time budget. A precision that runs out of
memory is left out.

Products are not timed one by one. One that wins alone may lose in a step, where the compiler fuses its casts
with what is around it (on a CPU, bf16 also casts everything else).

Under FSDP no process has the memory for the whole model. The warm-up then runs a model with one layer of each
kind (`ModelConfig.shallow`), and multiplies its seconds by the ratio of the FLOPs. The memory that it records
is that of the small model. In bf16 a process compiles its layers again, because the weights
of units are gathered in bf16.

A compiled run's first step starts with nothing compiled, so its time is cold. The compiled code is kept in an
archive beside the record (``compilation.py``). A training stage of this shape on the same kind of processor
reads it and compiles nothing. One process measures for all that train together.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import resource
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, cast

import numpy as np
import torch

from spider.checkpoints.records import Kind, Step, Warmup
from spider.common.errors import TrainingError
from spider.config import StageSpec
from spider.config.model import ModelConfig
from spider.data.loader import Batch
from spider.model.interface import Model
from spider.processes.device import available
from spider.processes.world import ALONE
from spider.training import compilation
from spider.training.build import build, choose_arithmetic
from spider.training.memory import check_fits, fitted, meta_model, out_of_memory, ran_out
from spider.training.passes import side_stream
from spider.training.precision import (
    Precision,
    compiles,
    decide,
    device_name,
    has_bf16,
    large_layers,
)

log = logging.getLogger(__name__)

#: Time budget of the steps of one candidate, in seconds.
_STEP_SECONDS = 1.5
#: A candidate replaces the most exact one only if its step takes less than this fraction of the time.
_CLEARLY = 0.95


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
    configured = spec.precision
    check_fits(spec, decide(configured, device, None).kind, device, spec.processes)
    choose_arithmetic(spec, device)

    large = large_layers(meta_model(spec), device)
    plan = frozenset(large) if configured == "auto" else None
    kinds = _candidates(spec, device, large)

    archive = output.with_suffix(".compile-cache")
    compiled = any(compiles(spec, kind, device) for kind in kinds)
    step: dict[Kind, Step] = {}
    with compilation.saved_to(archive) if compiled else contextlib.nullcontext():
        for kind in kinds:
            try:
                step[kind] = _time_steps(spec, Precision(kind, "measured", plan), device, data)
            except RuntimeError as error:
                if failed := compilation.compiler_failed(error):
                    raise TrainingError(f"in the warm-up, a step: {failed}") from error
                if not ran_out(error):
                    raise
                out = str(error)
                log.warning("a step in %s is left out: out of memory (%s)", kind, out)
    if not step:
        raise TrainingError(out_of_memory(spec, spec.processes, "in the warm-up, a step", out))
    costs = [f"{k} {1000 * s.seconds:.0f} ms, {s.peak_memory_mb / 1000:.2f} GB" for k, s in step.items()]
    exact, *others = step
    fastest = min(others, key=lambda kind: step[kind].seconds, default=exact)
    is_faster = step[fastest].seconds < _CLEARLY * step[exact].seconds
    chosen = (fastest if is_faster else exact) if configured == "auto" else configured
    how = "" if configured == "auto" else "configured, "
    of = "one micro-batch" + ", from fewer layers" * (_measured_model(spec) != spec.model)
    return Warmup(
        format=Warmup.FORMAT,
        run=spec.run,
        device=device_name(device),
        threads=torch.get_num_threads(),
        micro_batch=spec.micro_batch(spec.processes),
        checkpointing=spec.model.recomputes,
        versions={"python": python_version(), "torch": torch.__version__, "torchao": version("torchao")},
        precision=chosen,
        reason=f"{how}measured on {device_name(device)}, a step of {of}: {'; '.join(costs)}",
        fp8_layers=large,
        step=step,
        compile=compilation.describe(archive, device) if compiled else None,
        seconds=round(time.perf_counter() - began, 2),
    ).write(output)


def _candidates(spec: StageSpec, device: torch.device, large: list[str]) -> list[Kind]:
    """Return the precisions to time whole steps in, at least one.

    With ``compile: true``, precisions that cannot be compiled are left out unless no other is left.
    """
    if spec.precision != "auto":
        return [cast(Kind, spec.precision)]
    kinds: list[Kind] = ["fp32", "bf16"]
    if device.type == "cuda":
        narrow: list[Kind] = ["bf16", "fp8"] if large else ["bf16"]
        kinds = narrow if has_bf16(device) else ["fp32"]
    return [kind for kind in kinds if not spec.model.problems(kind, spec.compile)] or kinds


def _measured_model(spec: StageSpec) -> ModelConfig:
    """Return the block of the model that is run: the stage's, or a shallow one if processes share it."""
    return spec.model.shallow() if spec.parallel == "fsdp" and spec.processes > 1 else spec.model


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
        document_BT=np.ones((rows, s.seq_len), np.uint16),
        advantage_B=np.ones(rows, np.float32) if s.rollouts else None,
    )


def _time_steps(spec: StageSpec, precision: Precision, device: torch.device, data: Path | None) -> Step:
    """Measure a micro-batch's forward, backward and update: first step, later steps and peak memory."""
    if spec.compiled_on(device.type, precision.kind):
        torch.compiler.reset()  # imports the compiler
    gc.collect()  # earlier measurements hold memory in reference cycles
    torch.manual_seed(spec.seed)
    measured = spec.model_copy(update={"model": _measured_model(spec)})
    model, _, passes, optimizer, _ = build(measured, precision, ALONE, data, processes=spec.processes)
    batch, length = _random_batch(spec, model), (spec.settings.seq_len, spec.settings.n_loops)
    ratio = meta_model(spec).flops_per_token(*length) / model.flops_per_token(*length)
    forget_peak(device)

    def step() -> None:
        passes(batch, 1.0, model.tokens.pad, last=True)
        optimizer.step()
        model.after_step()
        optimizer.zero_grad(free=not passes.graphed)

    with side_stream(device, enabled=passes.graphed):
        first = round(seconds_of(step, device, 0), 4)
        if passes.graphed:
            step()  # captures the graph
        seconds = seconds_of(step, device, _STEP_SECONDS - first)
    return Step(first_seconds=first, seconds=round(seconds * ratio, 5), peak_memory_mb=peak_memory_mb(device))


def seconds_of(once: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Return the least time of a call; repeat it until ``budget`` seconds are spent, at least once."""
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
