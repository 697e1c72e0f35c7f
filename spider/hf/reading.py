"""The state of generation for each row of a batch: a `spider.model.interface.Reader` that reads each id once.

Rows of different lengths need no padding, because each row is read alone; ids that the mask of a batch leaves
out are not read. When the context is full, a row continues with its last half, as
`spider.evaluation.generate` does.

Shapes: B rows, N ids of a text, V ids of the vocabulary, W bytes of a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spider.model.interface import Model, Reader


def begins(length: int, context: int) -> int:
    """Return the position of the first id in the context of a text of ``length`` ids."""
    step = context + 1 - max(1, context // 2)
    return max(0, -(-(length - context) // step)) * step


def candidates(model: Model, ids: Sequence[int]) -> Tensor:
    """Return the candidates in the model's n-gram index after each id of a text, (N, W) uint8."""
    assert model.lookup is not None, "the model reads an n-gram index"
    candidates_NW = model.lookup.after(np.array(ids), 0, len(ids))
    return torch.from_numpy(candidates_NW).to(next(model.parameters()).device)


class _Row:
    """A row of a batch: the ids that were read, the model's reader and the stream of its n-gram index."""

    def __init__(self, model: Model, context: int, n_loops: int | None, first: int, ids: list[int]) -> None:
        """Begin a row of the text ``ids``; the model reads from the position ``first`` on."""
        self.model = model
        self.first = first
        self.read = ids[:first]
        self.reader: Reader = model.incremental(context, n_loops)
        self.index = model.lookup.stream() if model.lookup else None
        if self.index is not None:
            self.index.read(np.array(self.read, np.int64))

    def extend(self, ids: list[int]) -> Tensor:
        """Read the new ids at the end of ``ids``; return the logits of the next id, (V,)."""
        new = ids[len(self.read) :]
        candidates_NW = None
        if self.index is not None:
            candidates_NW = torch.from_numpy(self.index.extend(np.array(new)))
            candidates_NW = candidates_NW.to(next(self.model.parameters()).device)
        self.read = ids
        return self.reader.extend(new, candidates_NW)[-1]


class Readers:
    """The state of all rows of a batch.

    Beam search reorders rows. Each row continues with a reader that has read its beginning. Without such a
    reader it is read from its beginning.
    """

    def __init__(self, model: Model, context: int, n_loops: int | None) -> None:
        self.model = model
        self.context = context
        self.n_loops = n_loops
        self.rows: list[_Row] = []

    def extend(self, rows: Sequence[list[int]]) -> Tensor:
        """Read the new ids of each row, or all ids of a new row; return the next ids' logits, (B, V)."""
        free = self.rows
        self.rows = []
        was_training = self.model.training
        self.model.eval()
        try:
            return torch.stack([self._extend(ids, free) for ids in rows])
        finally:
            self.model.train(was_training)

    def _extend(self, ids: list[int], free: list[_Row]) -> Tensor:
        first = begins(len(ids), self.context)
        matching = (i for i, row in enumerate(free) if row.first == first and _continues(row.read, ids))
        found = next(matching, None)
        row = _Row(self.model, self.context, self.n_loops, first, ids) if found is None else free.pop(found)
        self.rows.append(row)
        return row.extend(ids)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do nothing, because `extend` finds the reader of each row by its ids."""


def _continues(read: list[int], ids: list[int]) -> bool:
    """Return whether ``ids`` begins with ``read`` and has more."""
    return len(read) < len(ids) and ids[: len(read)] == read
