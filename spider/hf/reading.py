"""What generation keeps of each row of a batch: a `spider.model.interface.Reader`, which reads an id once.

A row may begin anywhere, so rows of different lengths need no padding: what the mask of a batch leaves out is
not read. When the context is full, a row goes on with the last half of it, as `spider.evaluation.generate`
does.

Shapes: B rows, T ids of a row, V ids of the alphabet, W bytes of a proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spider.model.interface import Model, Reader


def begins(length: int, context: int) -> int:
    """From where a text of so many ids is read on, of one that was read from its beginning."""
    step = context + 1 - max(1, context // 2)
    return max(0, -(-(length - context) // step)) * step


def proposed(model: Model, ids: Sequence[int], first: int = 0) -> Tensor:
    """What the model's memory proposes to follow each of a text's ids from ``first`` on, (N, W) uint8."""
    assert model.proposer is not None, "asked of a model that reads one"
    known_NW = model.proposer.after(np.array(ids), first, len(ids))
    return torch.from_numpy(known_NW).to(next(model.parameters()).device)


class Readers:
    """Of a batch's rows. Beams may change places: each row goes on with whatever reader has read its
    beginning, or is read anew."""

    def __init__(self, model: Model, context: int, n_loops: int | None) -> None:
        self._new: tuple[Any, ...] = context, n_loops
        self.model, self.context = model, context
        self.rows: list[tuple[int, Reader]] = []

    def extend(self, rows: Sequence[list[int]]) -> Tensor:
        """Read the rest of each row, and of a new one all; returns the logits of what follows, (B, V)."""
        free, self.rows = self.rows, []
        was_training = self.model.training
        self.model.eval()
        try:
            return torch.stack([self._extend(ids, free) for ids in rows])
        finally:
            self.model.train(was_training)

    def _extend(self, ids: list[int], free: list[tuple[int, Reader]]) -> Tensor:
        at = begins(len(ids), self.context)
        fit = (i for i, (begun, one) in enumerate(free) if begun == at and _continues(one.ids, ids[at:]))
        found = next(fit, None)
        reader = self.model.incremental(*self._new) if found is None else free.pop(found)[1]
        self.rows.append((at, reader))
        unread = at + len(reader.ids)
        known_NW = proposed(self.model, ids, unread) if self.model.proposer else None
        return reader.extend(ids[unread:], known_NW)[-1]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing to do: see the class."""


def _continues(read: list[int], ids: list[int]) -> bool:
    return len(read) < len(ids) and ids[: len(read)] == read
