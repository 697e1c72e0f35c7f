"""How a model reads: a text that it scores (`Scoring`), and texts that it continues (`Streams`).

To generate, the model reads each id once (`spider.model.interface.Reader`). When the context is full, the
model starts a new one with the last half of it. So it reads between half of the context and all of it.

Shapes: R texts, N new ids of each, V ids of the vocabulary, W bytes of a candidate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spider.model.interface import Model


@dataclass(frozen=True)
class Scoring:
    """The windows, the number of loops and the precision of a model that scores a text."""

    seq_len: int
    """Window, in targets."""
    overlap: float = 0.5
    """Share of a window that is context only."""
    batch: int = 16
    """Windows that are read at once."""
    n_loops: int | None = None
    """Loops of the recurrent core (None: the model's own number)."""
    autocast: bool = False
    """Whether the forward pass runs in bf16 autocast. The loss is computed in fp32 even so."""
    carry_over: int = 0
    """Bytes of earlier documents that the n-gram index looks back on; windows then run over the bounds of
    documents. 0: each document is read alone."""

    @property
    def stride(self) -> int:
        """Return the distance between the beginnings of two windows."""
        return self.seq_len - int(self.seq_len * self.overlap)

    def precision(self, device: torch.device) -> torch.autocast:
        """Return the context manager of a forward pass."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.autocast)

    @contextlib.contextmanager
    def of(self, model: Model) -> Iterator[None]:
        """Put a model into evaluation mode, in windows of this length, and restore it at the end."""
        training, window = model.training, model.window
        model.eval()
        model.window = self.seq_len
        try:
            yield
        finally:
            model.train(training)
            model.window = window


def begins(length: int, context: int) -> int:
    """Return the position of the first id in the context of a text of ``length`` ids."""
    step = context + 1 - max(1, context // 2)
    return max(0, -(-(length - context) // step)) * step


class Streams:
    """Empty texts at first, and the reader of the part of each that is in the context."""

    def __init__(self, model: Model, context: int, n_loops: int | None, count: int = 1) -> None:
        self.model = model
        self.context = context
        self.n_loops = n_loops
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self._begin(0)
        # The n-gram index reads the whole document, so it reads each id once, also in a new context.
        self._indexes = [model.lookup.stream() for _ in range(count)] if model.lookup else []

    def _begin(self, first: int) -> None:
        """Begin a new context with the id at this position."""
        self._first = first
        self._reader = self.model.incremental(self.context, self.n_loops)
        self._reader.select([0] * len(self.ids))

    def read(self, new: list[list[int]]) -> Tensor:
        """Read N more ids of each text and return the logits after those in the context, (R, N, V)."""
        for ids, more in zip(self.ids, new, strict=True):
            ids += more
        length = len(self.ids[0])
        candidates_RNW = None
        if self._indexes:
            read = [index.extend(np.array(more)) for index, more in zip(self._indexes, new, strict=True)]
            candidates_RNW = torch.from_numpy(np.stack(read)).to(self._reader.ids_RT.device)
        unread = new
        first = begins(length, self.context)
        if first != self._first:
            unread = [ids[first:] for ids in self.ids]
            if candidates_RNW is not None:
                known = [*self._reader.candidates, candidates_RNW]
                candidates_RNW = torch.cat(known, dim=1)[:, first - length :]
            self._begin(first)
        # The model's mode is restored before the caller goes on.
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            return self._reader.extend_all(torch.tensor(unread), candidates_RNW)[:, -len(new[0]) :]
        finally:
            if was_training:
                self.model.train()

    def select(self, rows: list[int]) -> None:
        """Go on with these texts, numbered from 0. One that occurs several times is copied."""
        if rows == list(range(len(self.ids))):
            return
        self._reader.select(rows)
        self.ids = [list(self.ids[row]) for row in rows]
        if self._indexes and len(set(rows)) == len(rows):
            self._indexes = [self._indexes[row] for row in rows]
        elif self._indexes and self.model.lookup is not None:
            self._indexes = [self.model.lookup.stream() for _ in rows]
            for index, ids in zip(self._indexes, self.ids, strict=True):
                index.read(np.array(ids))
