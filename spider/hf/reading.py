"""The state of generation for a batch: `spider.model.reading.Streams`, which reads each id once.

Rows of one length are read as a batch. Rows of different lengths need no padding, because each length is a
batch of its own; ids that the mask of a batch leaves out are not read.

Shapes: B rows, N ids of a text, V ids of the vocabulary, W bytes of a candidate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spider.model.interface import Model
from spider.model.reading import Streams


def candidates(model: Model, ids: Sequence[int]) -> Tensor:
    """Return the candidates in the model's n-gram index after each id of a text, (N, W) uint8."""
    assert model.lookup is not None, "the model reads an n-gram index"
    candidates_NW = model.lookup.after(np.array(ids), 0, len(ids))
    return torch.from_numpy(candidates_NW).to(next(model.parameters()).device)


class Readers:
    """The state of all rows of a batch.

    Beam search reorders rows. Each row continues with the texts that hold its beginning. Without such texts
    it is read from its beginning.
    """

    def __init__(self, model: Model, context: int, n_loops: int | None) -> None:
        self.model = model
        self.context = context
        self.n_loops = n_loops
        self.texts: list[Streams] = []

    def extend(self, rows: Sequence[list[int]]) -> Tensor:
        """Read the new ids of each row, or all ids of a new row; return the next ids' logits, (B, V)."""
        left = set(range(len(rows)))
        read: list[Streams] = []
        logits: dict[int, Tensor] = {}
        for texts in self.texts:
            start = len(texts.ids[0])
            # The row whose ids are the beginning of each of the batch's rows.
            found = {tuple(ids): row for row, ids in enumerate(texts.ids)}
            chosen = [row for row in sorted(left) if len(rows[row]) > start]
            chosen = [row for row in chosen if tuple(rows[row][:start]) in found]
            chosen = [row for row in chosen if len(rows[row]) == len(rows[chosen[0]])]
            if chosen:
                texts.select([found[tuple(rows[row][:start])] for row in chosen])
                logits |= self._read(texts, rows, chosen)
                read.append(texts)
                left -= set(chosen)
        by_length: dict[int, list[int]] = defaultdict(list)
        for row in sorted(left):
            by_length[len(rows[row])].append(row)
        for chosen in by_length.values():
            texts = Streams(self.model, self.context, self.n_loops, len(chosen))
            logits |= self._read(texts, rows, chosen)
            read.append(texts)
        self.texts = read
        return torch.stack([logits[row] for row in range(len(rows))])

    @staticmethod
    def _read(texts: Streams, rows: Sequence[list[int]], chosen: list[int]) -> dict[int, Tensor]:
        """Read the new ids of these rows and return the logits of the next id of each."""
        start = len(texts.ids[0])
        logits_RNV = texts.read([rows[row][start:] for row in chosen])
        return dict(zip(chosen, logits_RNV[:, -1], strict=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do nothing, because `extend` finds the reader of each row by its ids."""
