"""How far a stage has come: all that a checkpoint brings back besides tensors, as plain JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spider.training.metrics import Means


@dataclass
class Progress:
    """What a checkpoint brings back besides tensors; every field is plain JSON."""

    step: int = 0
    """Steps of this stage that are done, skipped ones included."""
    end: int | None = None
    """Steps of this stage; None while only ``max_hours`` limits it and has not yet begun its end."""
    global_step: int = 0
    """Steps of the run that are done."""
    tokens: int = 0
    bytes: int = 0
    """Byte targets (ids below 256) trained on in this stage; ``tokens`` counts special ids too."""
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

    def saw(self, loss: float) -> None:
        """Take note of a log interval's mean."""
        self.loss = loss
        self.best_loss = loss if self.best_loss is None else min(loss, self.best_loss)
