"""``compress.json``: the receipt of a compressed model. Its checkpoint is the compressed file."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, computed_field

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

    @computed_field  # type: ignore[prop-decorator]
    @property
    def results(self) -> dict[str, Any]:
        """Return the sizes, in the shape of `spider.evaluation.result.Result`."""
        record = self.compressed
        sizes = {"cap": record.cap, "file": record.bytes, "code": record.code_bytes}
        columns: dict[str, Any] = {title: {"value": size, "unit": "bytes"} for title, size in sizes.items()}
        total = {
            "name": "bytes",
            "label": "bytes, with code",
            "value": record.total_bytes,
            "unit": "bytes",
            "better": "lower",
            "columns": columns | {"clip": {"value": record.clip}},
        }
        parts = ", ".join(f"{part} {size:,}" for part, size in record.parts.items() if size)
        used = record.settings
        notes = [
            f"Matrices in {used['bits']} bits by {used['method']}, tables in {used['embedding_bits']} bits.",
            f"Parts of the file: {parts}.",
        ]
        ratios = sorted(
            (one.error / one.error_nearest, name)
            for name, one in record.matrices.items()
            if one.error is not None and one.error_nearest
        )
        if ratios:
            median, _ = ratios[len(ratios) // 2]
            worst, name = ratios[-1]
            notes.append(
                "Error of the matrix products, relative to rounding to nearest: "
                f"{median:.2f} in the median, at most {worst:.2f} ({name})."
            )
        return {"compression": {"title": "Compressed model", "rows": [total], "notes": notes}}
