"""The receipt of a finished stage, ``train.json``: what it came to, and where its final checkpoint is.

A receipt is a pure function of the final checkpoint's manifest, so it can be written again at any time. The
next stage takes its weights through it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spider import files
from spider.checkpoints.claim import CHECKPOINTS, differences
from spider.checkpoints.format import Checkpoint
from spider.checkpoints.load import config_of, find
from spider.config import StageSpec
from spider.errors import TrainingError

FORMAT = 1
RECEIPT = "train.json"

_KEPT = (
    "run",
    "stage",
    "identity",
    "global_step",
    "tokens",
    "bytes",
    "seconds",
    "checkpoint_seconds",
    "skipped",
    "weights",
    "averaged_weights",
    "data_digest",
    "position",
    "device",
    "loss",
    "best_loss",
)


def write_receipt(folder: Path, final: Checkpoint) -> dict[str, Any]:
    """Write and return the receipt of the stage in ``folder``."""
    manifest = final.manifest
    receipt = {
        "format": FORMAT,
        **{name: manifest[name] for name in _KEPT},
        "steps": manifest["step"],
        "precision": manifest["precision"]["kind"],
        "checkpoint": f"{CHECKPOINTS}/{final.path.name}",
    }
    files.write_json(folder / RECEIPT, receipt)
    return receipt


def read_receipt(path: Path) -> dict[str, Any]:
    """A receipt of this format.

    Raises:
        ValueError: missing, malformed, or of another version.
    """
    receipt = files.read_json(path)
    version = receipt.get("format") if isinstance(receipt, dict) else None
    if version != FORMAT:
        raise TrainingError(
            f"{path}: a receipt of format {version!r}, this Spider reads {FORMAT}; train that stage again"
        )
    return receipt


def read_parent(spec: StageSpec, start: Path) -> Checkpoint:
    """The verified checkpoint that a stage starts from: at ``start``, or by the receipt there.

    Activation checkpointing, which no weight knows of, may differ.

    Raises:
        CheckpointError: missing or damaged.
        TrainingError: of another model than ``spec``'s.
    """
    parent = find(start)
    before, now = config_of(parent).shape_of_weights(), spec.model.shape_of_weights()
    if changed := differences(before, now, "model"):
        raise TrainingError(f"{start}: trained another model:\n  " + "\n  ".join(changed))
    return parent
