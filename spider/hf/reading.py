"""What generation keeps of each row of a batch: a `spider.model.interface.Reader`, which reads an id once.

A row may begin anywhere, so rows of different lengths need no padding: what the mask of a batch leaves out is
not read. When the context is full, a row goes on with the last half of it, as `spider.evaluation.generate`
does.

Shapes: B rows, T ids of a row, V ids of the vocabulary, W bytes of a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spider.model.interface import Model, Reader


def begins(length: int, context: int) -> int:
    """From where a text of so many ids is read on, of one that was read from its beginning."""
    step = context + 1 - max(1, context // 2)
    return max(0, -(-(length - context) // step)) * step


def proposed(model: Model, ids: Sequence[int]) -> Tensor:
    """Return the candidates that the model's n-gram index has after each of a text's ids, (N, W) uint8."""
    assert model.lookup is not None, "asked of a model that reads one"
    known_NW = model.lookup.after(np.array(ids), 0, len(ids))
    return torch.from_numpy(known_NW).to(next(model.parameters()).device)


class _Row:
    """A row of a batch: the ids that were read, the model's reader, and the stream of its n-gram index."""

    def __init__(self, model: Model, context: int, n_loops: int | None, first: int, ids: list[int]) -> None:
        """Begin a row whose model reads from the id ``first`` on, of a text that begins with ``ids``."""
        self.model, self.first, self.read = model, first, ids[:first]
        self.reader: Reader = model.incremental(context, n_loops)
        self.index = model.lookup.stream() if model.lookup else None
        if self.index is not None:
            self.index.skip(np.array(self.read, np.int64))

    def extend(self, ids: list[int]) -> Tensor:
        """Read what is new in ``ids``; return the logits of what follows them, (V,)."""
        new = ids[len(self.read) :]
        known_NW = None
        if self.index is not None:
            known_NW = torch.from_numpy(self.index.extend(np.array(new)))
            known_NW = known_NW.to(next(self.model.parameters()).device)
        self.read = ids
        return self.reader.extend(new, known_NW)[-1]


class Readers:
    """The rows of a batch. Beams may change places: each row goes on with a reader that has read its
    beginning, or is read from its beginning."""

    def __init__(self, model: Model, context: int, n_loops: int | None) -> None:
        self.model, self.context, self.n_loops = model, context, n_loops
        self.rows: list[_Row] = []

    def extend(self, rows: Sequence[list[int]]) -> Tensor:
        """Read the rest of each row, and of a new one all; returns the logits of what follows, (B, V)."""
        free, self.rows = self.rows, []
        was_training = self.model.training
        self.model.eval()
        try:
            return torch.stack([self._extend(ids, free) for ids in rows])
        finally:
            self.model.train(was_training)

    def _extend(self, ids: list[int], free: list[_Row]) -> Tensor:
        first = begins(len(ids), self.context)
        fit = (i for i, row in enumerate(free) if row.first == first and _continues(row.read, ids))
        found = next(fit, None)
        row = _Row(self.model, self.context, self.n_loops, first, ids) if found is None else free.pop(found)
        self.rows.append(row)
        return row.extend(ids)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing to do: see the class."""


def _continues(read: list[int], ids: list[int]) -> bool:
    return len(read) < len(ids) and ids[: len(read)] == read
