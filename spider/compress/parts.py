"""Split a model into tensors that are quantized and tensors that are stored exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from spider.checkpoints.compressed import MatrixRecord
from spider.compress import rans
from spider.compress.format import Quantized, matrices
from spider.compress.gptq import error, gptq, most, nearest, steps
from spider.compress.writer import narrowed
from spider.config.run import CompressConfig
from spider.errors import CheckpointError

#: Of fewer numbers, integers with a table of their own save nothing.
_SMALL = 1024
#: What tells the entropy of more.
_SAMPLE = 1 << 18


@dataclass(frozen=True)
class Part:
    """A tensor that becomes small integers."""

    name: str
    w_EOI: Tensor
    bits: int
    clip: float | None
    """None: the one that all matrices have."""
    shared: bool

    def sampled(self) -> Part:
        """Every n-th row of it: some 2^18 weights."""
        every = -(-self.w_EOI.numel() // _SAMPLE)
        return self if every == 1 else replace(self, w_EOI=self.w_EOI[:, ::every])

    def steps(self, clip: float) -> Tensor:
        """(E, O or 1, 1) float16, where all matrices have this clip."""
        chosen = clip if self.clip is None else self.clip
        return torch.stack([steps(w, chosen, self.bits, shared=self.shared) for w in self.w_EOI])

    def nearest(self, clip: float) -> Quantized:
        step_EO1 = self.steps(clip)
        pairs = zip(self.w_EOI, step_EO1, strict=True)
        return Quantized(torch.stack([nearest(w, s, self.bits) for w, s in pairs]), step_EO1, self.bits)

    def entropy(self, one: Quantized) -> float:
        """Bits of all its integers."""
        reach = most(self.bits)
        counts = torch.bincount(one.q_EOI.flatten().int() + reach, minlength=2 * reach + 1)
        return rans.bits(counts.cpu().numpy())


def split(
    tensors: Mapping[str, Tensor], tables: set[str], asked: CompressConfig
) -> tuple[list[Part], dict[str, Tensor]]:
    """What becomes integers, and what stays; of tensors on the meta device also, for their sizes.
    `CheckpointError` names one that is not finite."""
    parts, exact = list[Part](), dict[str, Tensor]()
    for name, t in tensors.items():
        if not t.is_meta and not torch.isfinite(t).all():
            raise CheckpointError(f"{name} holds numbers that are not finite: its training has diverged")
        if t.ndim not in (2, 3) or t.numel() < _SMALL or not t.is_floating_point():
            exact[name] = narrowed(t)
        elif name in tables:
            parts.append(Part(name, matrices(t), asked.embedding_bits, asked.embedding_clip, True))
        else:
            parts.append(Part(name, matrices(t), asked.bits, None, asked.scale == "matrix"))
    return parts, exact


def quantized(
    part: Part, clip: float, sums: Mapping[tuple[str, int], Tensor], damping: float
) -> tuple[Quantized, MatrixRecord, list[str]]:
    """A part by GPTQ, what that came to, and which of its matrices were rounded to the nearest: those that
    nothing entered, or whose factor fails."""
    plain = part.nearest(clip)
    q_EOI, rounded = plain.q_EOI.clone(), list[str]()
    costs = np.zeros(2)
    for e, (w_OI, step_O1) in enumerate(zip(part.w_EOI, plain.step_EO1, strict=True)):
        name = part.name if len(part.w_EOI) == 1 else f"{part.name}[{e}]"
        h_II = sums.get((part.name, e))
        found = None if h_II is None else gptq(w_OI, h_II, step_O1, part.bits, damping)
        if found is None or h_II is None:
            rounded.append(name)
            continue
        q_EOI[e] = found
        costs += [error(w_OI, q, step_O1, h_II) for q in (found, plain.q_EOI[e])]
    made = Quantized(q_EOI, plain.step_EO1, part.bits)
    known = len(rounded) < len(part.w_EOI)
    record = MatrixRecord(
        bits_per_weight=part.entropy(made) / q_EOI.numel(),
        error=float(costs[0]) if known else None,
        error_nearest=float(costs[1]) if known else None,
    )
    return made, record, rounded
