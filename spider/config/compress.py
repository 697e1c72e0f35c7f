"""How a run's last checkpoint is pressed into a file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spider.config.block import Block, Positive

Bits = Annotated[int, Field(ge=2, le=8)]
Deviations = Annotated[float, Field(gt=0)]


class CompressConfig(Block):
    """Weights as small integers, coded near their entropy, in one file (docs/golf.md)."""

    cap: Positive = 16_000_000
    """Bytes that the file and the code it needs may take together."""
    bits: Bits = 6
    """Alphabet of matrices: 2^bits - 1 integers."""
    embedding_bits: Bits = 8
    """Of tables: embeddings, heads, n-grams."""
    clip: Deviations | None = None
    """Deviations of a row that the alphabet reaches, and so the step: larger is smaller and worse (null: the
    least that fits ``cap``)."""
    embedding_clip: Deviations = 20.0
    """The same of tables, each by one step."""
    scale: Literal["row", "matrix"] = "row"
    """What of a matrix shares a step."""
    method: Literal["gptq", "nearest"] = "gptq"
    """gptq: what is not rounded yet takes up the error, as training text enters; or to the nearest."""
    windows: Positive = 64
    """Windows of training text that are read for that."""
    damping: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Of what enters, in its mean square."""
