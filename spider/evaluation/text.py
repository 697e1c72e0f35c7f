"""The held-out text: the beginning of a validation split, and what is known of it without the model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from spider.data.metadata import load_metadata
from spider.data.shards import Shards
from spider.evaluation.bpb import clip_stream
from spider.evaluation.compressors import COMPRESSORS
from spider.evaluation.result import BITS, Number, Row
from spider.tokens import BYTES, Tokens

Given = Literal["nothing", "stage", "split"]
#: Title of the column of scores on the bytes that are no copies.
OUTSIDE_COPIES = "outside copies"


@dataclass(frozen=True)
class Text:
    """Documents end to end: their bytes (uint8), and where each begins, with the end of the last."""

    bytes_N: np.ndarray
    bounds_D: np.ndarray

    @classmethod
    def of(cls, tokens_N: np.ndarray, vocabulary: Tokens) -> Text:
        """The text of a stream of ids; what lies before its first BOS is a document as well."""
        ends = np.cumsum(vocabulary.bytes_of[tokens_N], dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        begins = ends[tokens_N == vocabulary.bos]
        raw = np.frombuffer(vocabulary.raw(tokens_N), np.uint8)
        return cls(raw, np.unique(np.concatenate([[0], begins, [total]])))

    def __len__(self) -> int:
        return len(self.bytes_N)

    def documents(self) -> list[bytes]:
        return [self.bytes_N[a:b].tobytes() for a, b in pairwise(self.bounds_D.tolist())]

    def lengths(self) -> np.ndarray:
        """Bytes of each document: (D,)."""
        return np.diff(self.bounds_D)


@dataclass(frozen=True)
class Baseline:
    """The rate of one compressor on the text."""

    name: str
    given: Given
    """The text it read before: none, what the model was trained on, or all that is not held out."""
    given_bytes: int
    share: float
    """Share that this is of the text named in ``given``."""
    bpb: float
    fresh: float | None
    """Rate on the bytes outside of copies; None if that is unknown or there are none."""

    def row(self) -> Row:
        """Return the rate as a row, with the rate outside of copies in a column."""
        group = {"nothing": "", "stage": "given stage"}.get(self.given)
        if group is None:
            group = "given all" if self.share > 0.995 else "given part"
        label = f"{self.name} {group}".strip()
        return Row(
            name=f"compressors/{label}",
            label=label,
            note=self._description(),
            value=self.bpb,
            unit=BITS,
            better="lower",
            baseline=True,
            group=group,
            columns={} if self.fresh is None else {OUTSIDE_COPIES: Number(value=self.fresh, unit=BITS)},
        )

    def _description(self) -> str:
        """Return ``7z PPMd, order 12, given all training text (26.4 MB)``."""
        if self.given == "nothing":
            return COMPRESSORS[self.name]
        what = {"stage": "what the model was trained on", "split": "all training text"}[self.given]
        size = f"{self.given_bytes / 1e6:.1f}"
        size += f" of {self.given_bytes / self.share / 1e6:.1f}" if self.share < 0.995 else ""
        return f"{COMPRESSORS[self.name]}, given {what} ({size} MB)"


@dataclass(frozen=True)
class Measured:
    """What is known of a text of N bytes and D documents without a model."""

    table: list[Baseline]
    ppmd_D: np.ndarray | None
    """Bits of each document, by PPMd given as much as it is given."""
    copied_N: np.ndarray | None
    """Which bytes lie in a match of 50 bytes with the training text; None if that is not known."""
    common_D: np.ndarray | None
    """Share of each document's stretches of 12 bytes that the training text holds."""
    searched: float | None
    """Share of the training text that was searched."""
    left_out: list[str]
    """What is missing, and why."""


def validation_stream(data: Path, max_bytes: int, tokens: Tokens = BYTES) -> tuple[np.ndarray, str]:
    """Return the first ``max_bytes`` bytes of a validation split in a model's ids, and the dataset's digest.

    The text is cut in bytes and then encoded, so every vocabulary is scored on the same text. Special ids are
    the same in all vocabularies and stay where they are. The text of published shards is cut after a whole id
    and keeps its ids, because encoding it again could cut it otherwise.

    Raises:
        ValueError: the dataset has no validation text.
    """
    metadata = load_metadata(data)
    split = metadata.splits.get("validation")
    if split is None or not split.bytes:
        raise ValueError(
            f"{data}: has no validation text to score; raise `validation` in datasets.{metadata.dataset} "
            "(the share of documents held out) and encode again"
        )
    shards = Shards(data, "validation")
    # A document of n bytes has n + 2 ids at most, and encoding drops empty ones: three ids a byte suffice.
    count = min(shards.tokens, 3 * max_bytes)
    written = metadata.vocabulary
    stream_N = clip_stream(np.asarray(shards.read(0, count)), max_bytes, written)
    if written.digest == tokens.digest and (written.digest is None or metadata.imported):
        return stream_N, metadata.digest
    left = len(written.raw(stream_N)) if metadata.imported else max_bytes
    pieces = []
    for run_N in np.split(stream_N, np.flatnonzero(np.diff(written.bytes_of[stream_N] > 0)) + 1):
        text = written.raw(run_N)[:left]
        left -= len(text)
        pieces.append(tokens.encode(text)[1:-1] if text else run_N)
    return np.concatenate(pieces), metadata.digest
