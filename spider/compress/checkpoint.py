"""A pressed model as a checkpoint: what loads, evaluates, generates and verifies knows no difference."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Exported, TensorFile
from spider.compress.artifact import Pressed, read
from spider.errors import CheckpointError
from spider.files import sha256
from spider.model.interface import Model
from spider.tokens import Tokens


@dataclass(frozen=True)
class PressedCheckpoint(Checkpoint):
    """Raises as `spider.compress.artifact.read` does."""

    pressed: Pressed

    @classmethod
    def open(cls, path: Path) -> Self:
        pressed = read(path)
        told = {name: pressed.header.get(name) for name in Exported.model_fields}
        told |= {"format": Exported.FORMAT, "step": told["global_step"], "best_loss": None}
        told["files"] = {path.name: TensorFile(size=path.stat().st_size, sha256=sha256(path))}
        return cls(path, Exported.model_validate(told), pressed)

    @property
    def tokens(self) -> Tokens:
        return self.pressed.tokens

    @property
    def tokenizer(self) -> bytes | None:
        packed = self.pressed.sections["tokenizer"]
        return lzma.decompress(packed) if packed else None

    def model(self, device: str | torch.device = "cpu") -> Model:
        return self.pressed.model(device)

    def saved(self) -> dict[str, list[int]]:
        raise CheckpointError(f"{self.path}: a pressed model, not one to go on training from")
