"""Whole records as training writes them, of which a test names only what it is about."""

from __future__ import annotations

from typing import Any


def saved(step: int = 1, **changes: Any) -> dict[str, Any]:
    """What `Trainer` says of a checkpoint beside its tensors, for `spider.checkpoints.save.save`."""
    precision = {"kind": "fp32", "reason": "configured", "layers": [], "recipe": None}
    numbers = dict.fromkeys(("tokens", "bytes", "seconds", "checkpoint_seconds", "skipped", "streak"), 0)
    numbers["global_tokens"] = 0
    words = {"run": "demo", "stage": "main", "identity": "i", "data_digest": "d", "device": "cpu"}
    nothing = dict.fromkeys(("parent_weights", "parallel", "end", "loss", "best_loss", "position"))
    rest = {"spec": {}, "final": False, "precision": precision, "means": {}}
    record = {**words, **numbers, **nothing, **rest}
    made_by = {"torch": "2", "threads": 1, "processes": 1}
    return record | made_by | {"step": step, "global_step": step} | changes


def receipt(**changes: Any) -> dict[str, Any]:
    """A stage's ``train.json``."""
    numbers = dict.fromkeys(("tokens", "bytes", "seconds", "checkpoint_seconds", "skipped"), 0)
    words = {"run": "demo", "stage": "main", "identity": "i", "data_digest": "d", "device": "cpu"}
    nothing = dict.fromkeys(("averaged_weights", "position", "loss", "best_loss"))
    written = {"format": 1, **words, **numbers, **nothing, "precision": "fp32", "weights": "w"}
    return written | {"steps": 1, "global_step": 1, "checkpoint": "checkpoints/step-00000001"} | changes
