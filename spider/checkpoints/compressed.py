"""``compress.json``: the receipt of a compressed model. Its checkpoint is the compressed file."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel

from spider.checkpoints.records import Receipt


class MatrixRecord(BaseModel, frozen=True):
    """A quantized tensor: one matrix, or a stack of matrices."""

    bits_per_weight: float
    """Entropy of its integers, without the quantization steps."""
    error: float | None
    """Squared error of its products (`spider.compress.gptq.error`); None without calibration inputs."""
    error_nearest: float | None
    """The same error if each weight were rounded to the nearest step."""


class CompressedRecord(BaseModel, frozen=True):
    """The sizes of a compressed file and of its parts, and how it was made."""

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
    """Matrices without calibration inputs, which were rounded to the nearest step."""
    modules: list[str]
    """Modules whose source ``code_bytes`` counts."""
    windows: int
    """Windows of calibration text."""
    tokens: int
    """Tokens of calibration text."""
    sha256: str
    seconds: float


class CompressedReceipt(Receipt):
    """The receipt of the stage, with the checkpoint and the weights of the compressed file."""

    WHAT: ClassVar[str] = "a receipt of a compressed model"

    compressed: CompressedRecord
