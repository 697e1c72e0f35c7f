"""How far a stage has come: all that a checkpoint brings back besides tensors, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from spider.checkpoints.records import Manifest


class Means:
    """Means over every step since the last log line, as running sums of device scalars: no host
    synchronisation until they are read. The sums are part of a checkpoint, hence exact across a resume."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        self.count += 1
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def read(self) -> dict[str, float]:
        if not self.count:
            return {}
        values = (torch.stack([*self._sums.values()]) / self.count).tolist()
        return dict(zip(self._sums, values, strict=True))

    def state(self) -> dict[str, object]:
        return {"count": self.count, "sums": {n: s.item() for n, s in self._sums.items()}}

    @classmethod
    def restore(cls, state: dict, device: torch.device) -> Means:
        means = cls()
        means.count = state["count"]
        sums = state["sums"].items()
        means._sums = {name: torch.tensor(s, dtype=torch.float64, device=device) for name, s in sums}
        return means


@dataclass
class Progress:
    """Every field is plain JSON, under its name in the manifest."""

    step: int = 0
    """Steps of this stage that are done, skipped ones included."""
    end: int | None = None
    """Steps of this stage; None while only ``max_hours`` limits it and has not yet begun its end."""
    global_step: int = 0
    """Steps of the run that are done."""
    tokens: int = 0
    bytes: int = 0
    """Bytes of text that its targets stand for; ``tokens`` counts special ids too."""
    seconds: float = 0.0
    """Training time of this stage over all its restarts, without work that was lost."""
    checkpoint_seconds: float = 0.0
    """How long training stood still for checkpoints."""
    skipped: int = 0
    """Steps whose gradient was not finite."""
    streak: int = 0
    """How many of them came in a row just now."""
    loss: float | None = None
    """Mean cross entropy (nats a target) over the last log interval, and the least such mean."""
    best_loss: float | None = None
    position: dict[str, Any] | None = None
    """The loader's: which sample of which order of which data comes next."""
    means: dict[str, Any] = field(default_factory=lambda: Means().state())

    @classmethod
    def saved(cls, manifest: Manifest) -> Self:
        """How far the training had come that this was saved in."""
        return cls(**{name: getattr(manifest, name) for name in cls.__dataclass_fields__})

    def saw(self, loss: float) -> None:
        """Take note of a log interval's mean."""
        self.loss = loss
        self.best_loss = loss if self.best_loss is None else min(loss, self.best_loss)
