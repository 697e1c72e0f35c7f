"""Split a model into tensors that are quantized and tensors that are stored exactly, and quantize them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spider.checkpoints.compress import rans
from spider.checkpoints.compress.format import Quantized, matrices
from spider.checkpoints.compress.gptq import error, gptq, largest, nearest, steps
from spider.checkpoints.records import MatrixRecord
from spider.config.run import CompressConfig
from spider.model.interface import Model, model_tensors

log = logging.getLogger(__name__)

#: Vectors of at most so many numbers keep their type; longer ones are stored in float16.
_TINY = 64
#: A tensor of fewer numbers is stored exactly, because a table of its own would cost more than it saves.
_SMALL = 1024
#: Clipping range of a table in standard deviations. Rare rows of a table are long, and a clipped row is lost.
_TABLE_CLIP = 20.0
#: Number of weights that estimate the entropy of a large tensor.
_SAMPLE = 1 << 18


@dataclass(frozen=True)
class Part:
    """A tensor that becomes small integers: a stack of E matrices."""

    name: str
    w_EOI: Tensor
    bits: int
    clip: float | None
    """Clipping range in standard deviations; None: the one that all matrices share."""
    shared: bool
    """Whether the rows of a matrix share one step."""

    def sampled(self) -> Part:
        """Return the part with every n-th row only, about 2^18 weights."""
        every = -(-self.w_EOI.numel() // _SAMPLE)
        return self if every == 1 else replace(self, w_EOI=self.w_EOI[:, ::every])

    def nearest(self, clip: float) -> Quantized:
        """Round to the nearest integers; ``clip`` is used if the part has none of its own."""
        clip = clip if self.clip is None else self.clip
        step_EO1 = torch.stack([steps(w_OI, clip, self.bits, shared=self.shared) for w_OI in self.w_EOI])
        pairs = zip(self.w_EOI, step_EO1, strict=True)
        q_EOI = torch.stack([nearest(w_OI, step_O1, self.bits) for w_OI, step_O1 in pairs])
        return Quantized(q_EOI, step_EO1, self.bits)

    def entropy_bits(self, quantized: Quantized) -> float:
        """Return the entropy of all its integers together, in bits."""
        zero = largest(self.bits)
        counts = torch.bincount(quantized.q_EOI.flatten().int() + zero, minlength=2 * zero + 1)
        return rans.entropy_bits(counts.cpu().numpy())


@dataclass(frozen=True)
class QuantizedPart:
    """The result of quantizing a part."""

    tensor: Quantized
    record: MatrixRecord
    rounded: list[str]
    """Names of the matrices without inputs or without a factor, which are rounded to the nearest."""


def split(model: Model, config: CompressConfig) -> tuple[list[Part], dict[str, Tensor]]:
    """Return the parts that become integers, and the tensors that are stored exactly.

    The model may be on the meta device, for the sizes alone.
    """
    embeddings = {name for name, group in model.parameter_groups().items() if group.role == "table"}
    parts: list[Part] = []
    exact: dict[str, Tensor] = {}
    for name, t in model_tensors(model, "").items():
        if t.ndim not in (2, 3) or t.numel() < _SMALL or not t.is_floating_point():
            exact[name] = _stored(name, t)
        elif name in embeddings:
            parts.append(Part(name, matrices(t), config.embedding_bits, _TABLE_CLIP, shared=True))
        else:
            parts.append(Part(name, matrices(t), config.bits, clip=None, shared=False))
    return parts, exact


def _stored(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as it is stored: in float16 unless it is tiny or has numbers beyond float16."""
    if tensor.is_floating_point() and tensor.numel() > _TINY:
        half = tensor.half()
        if half.is_meta or bool(half.isfinite().all()):
            return half
        log.info("%s has numbers beyond float16 and is stored exactly", name)
    return tensor


def quantize(part: Part, clip: float, sums: Mapping[tuple[str, int], Tensor]) -> QuantizedPart:
    """Quantize a part by GPTQ, with the input sums of `spider.checkpoints.compress.calibrate`.

    A matrix without inputs, or whose factor fails, is rounded to the nearest.
    """
    plain = part.nearest(clip)
    q_EOI = plain.q_EOI.clone()
    rounded: list[str] = []
    total_error = total_nearest = 0.0
    for e, (w_OI, step_O1) in enumerate(zip(part.w_EOI, plain.step_EO1, strict=True)):
        h_II = sums.get((part.name, e))
        q_OI = None if h_II is None else gptq(w_OI, h_II, step_O1, part.bits)
        if q_OI is None or h_II is None:
            rounded.append(part.name if len(part.w_EOI) == 1 else f"{part.name}[{e}]")
            continue
        total_error += error(w_OI, q_OI, step_O1, h_II)
        total_nearest += error(w_OI, plain.q_EOI[e], step_O1, h_II)
        q_EOI[e] = q_OI
    tensor = Quantized(q_EOI, plain.step_EO1, part.bits)
    any_inputs = len(rounded) < len(part.w_EOI)
    record = MatrixRecord(
        bits_per_weight=part.entropy_bits(tensor) / q_EOI.numel(),
        error=total_error if any_inputs else None,
        error_nearest=total_nearest if any_inputs else None,
    )
    return QuantizedPart(tensor, record, rounded)
