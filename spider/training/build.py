"""Build what trains a stage: the model, its precision, its wrapping and its optimizer.

Trainer and warm-up call `build`, so a stage runs the graphs that its warm-up compiled. The order of its
steps decides the result. Weights are drawn first, and nothing else draws random numbers. Layers are swapped
for fp8 and narrowed before FSDP cuts them. The optimizer comes last, because its state has the dtype and the
slices of the parameters.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from spider.config import StageSpec
from spider.data.packing import most_documents
from spider.model import build_model, choose_kernels
from spider.model.interface import Model
from spider.processes.device import choose_attention, choose_tf32, make_deterministic
from spider.processes.parallel import replicate, shard
from spider.processes.world import World
from spider.tokens import Tokens
from spider.training import compilation
from spider.training.compilation import compile_forward
from spider.training.optim import Optimizer, build_optimizer, narrow_weights
from spider.training.passes import Passes, why_eager
from spider.training.precision import Precision, compiles

if TYPE_CHECKING:
    from spider.data.ngram.lookup import NgramLookup
    from spider.data.ngram.store import NgramIndex

log = logging.getLogger(__name__)


class Built(NamedTuple):
    """The live objects of a training."""

    model: Model
    full_lookup: NgramLookup | None
    """Candidates from the full n-gram index, if the model reads one."""
    passes: Passes
    optimizer: Optimizer
    compiled: bool


def choose_arithmetic(spec: StageSpec, device: torch.device) -> None:
    """Make this process multiply and add as a stage is configured; call it before `build`."""
    make_deterministic(device, spec.deterministic)
    choose_attention(device, deterministic=spec.deterministic)
    choose_kernels(spec.kernels)
    choose_tf32(spec.tf32)


def build(
    spec: StageSpec,
    precision: Precision,
    world: World,
    data: Path | None,
    *,
    processes: int | None = None,
    tokens: Tokens | None = None,
    indexes: tuple[NgramIndex, NgramIndex] | None = None,
    warmup: Path | None = None,
) -> Built:
    """Build a stage's model, its passes and its optimizer, with weights from torch's generator.

    Args:
        world: the processes that share this model.
        data: shards folder of the stage's data, which bounds the documents of a row.
        processes: the processes that will train it (default: all of ``world``). The warm-up alone builds
            what several train.
        tokens: vocabulary of the data (default: only sizes matter).
        indexes: n-gram indexes without and with the training text.
        warmup: record of the warm-up, beside which its compiled code lies.
    """
    device = world.device
    model = build_model(spec.model, tokens).to(device)
    if data is not None and spec.settings.attend != "row":
        model.most_documents = most_documents(spec.folders(data).values(), spec.settings.seq_len)
    full_lookup = None
    if spec.model.ngram is not None and indexes is not None:
        from spider.data.ngram.lookup import NgramLookup  # numba: half a second of each start

        model.lookup, full_lookup = (NgramLookup(one, spec.model.ngram, model.tokens) for one in indexes)
    sharded = world.size > 1 and spec.parallel == "fsdp"
    precision.prepare(model, sharded=sharded)
    narrow_weights(model, spec.optimizer)
    compiled = compiles(spec, precision.kind, device)
    eager = why_eager(spec, device, processes or world.size, compiled=compiled)
    wrapped: nn.Module = model
    if sharded:
        shard(model, world, precision.compute)
    elif world.size > 1 and eager:
        wrapped = replicate(model, world)
    if compiled:
        if warmup is not None:
            compilation.load(warmup, device)
        compile_forward(model)
    passes = Passes(wrapped, spec, precision, world, graphed=eager is None)
    if device.type == "cuda":
        log.info("CUDA graph: %s", f"none, {eager}" if eager else "of forward and backward of a micro-batch")
    lr, compute = spec.settings.lr, precision.compute
    optimizer = build_optimizer(model, spec.optimizer, lr, compute, compiled=compiled, world=world)
    return Built(model, full_lookup, passes, optimizer, compiled)
