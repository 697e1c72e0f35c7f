"""Define `Reading`: how a model reads a text that it scores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spider.model.interface import Model


@dataclass(frozen=True)
class Reading:
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
