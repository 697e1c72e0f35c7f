"""``compress.json``, the receipt of a compressed model. Its checkpoint is the compressed file."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel

from spider.checkpoints.records import Receipt


class MatrixRecord(BaseModel, frozen=True):
    """One tensor in small integers, all matrices of a stack together."""

    bits_per_weight: float
    """By its entropy, without its steps."""
    error: float | None
    """Change of its products (`spider.compress.gptq.error`); None where nothing entered it."""
    error_nearest: float | None
    """What it would be, rounded to the nearest."""


class CompressedRecord(BaseModel, frozen=True):
    """A file, byte by byte."""

    bytes: int
    code_bytes: int
    total_bytes: int
    cap: int
    clip: float
    settings: dict[str, Any]
    parts: dict[str, int]
    """Bytes of each section."""
    matrices: dict[str, MatrixRecord]
    rounded: list[str]
    """Matrices that were rounded to the nearest for want of what enters them."""
    modules: list[str]
    """Whose source was counted."""
    windows: int
    tokens: int
    """Read to see what enters."""
    sha256: str
    seconds: float


class CompressedReceipt(Receipt):
    """The receipt of the stage, but for its checkpoint and weights, which are the file's."""

    WHAT: ClassVar[str] = "a receipt of a compressed model"
    REMEDY: ClassVar[str] = "run `spider compress` again"

    compressed: CompressedRecord
