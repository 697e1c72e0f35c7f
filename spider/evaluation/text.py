"""Define the held-out text, and what is computed from it without a model.

The text is the beginning of a validation split, or of each of its groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from spider.data.shards import Shards, balanced, load_metadata
from spider.evaluation.bpb import clip_stream
from spider.evaluation.result import Row
from spider.tokens import BYTES, Tokens

#: Title of the column of scores on the bytes outside the train/test overlap.
OUTSIDE_OVERLAP = "outside overlap"


@dataclass(frozen=True)
class Text:
    """Documents end to end: their bytes (uint8), and the offset of each, followed by the end of the last."""

    bytes_N: np.ndarray
    bounds_D: np.ndarray

    @classmethod
    def of(cls, tokens_N: np.ndarray, vocabulary: Tokens) -> Text:
        """Return the text of a stream of ids. Text before the first BOS counts as a document."""
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
        """Return the bytes of each document: (D,)."""
        return np.diff(self.bounds_D)


@dataclass(frozen=True)
class TextBaselines:
    """The baselines and the train/test overlap of a text of N bytes and D documents."""

    rows: list[Row]
    """The rates of each compressor, best first."""
    ppmd_D: np.ndarray
    """Bits that PPMd spends on each document alone, primed with the largest text."""
    overlap_N: np.ndarray | None
    """True for bytes in a match of 50 bytes with the training text; None if that text is unknown."""
    seen_D: np.ndarray | None
    """Share of each document's 12-byte strings that occur in the training text."""
    searched: float | None
    """Share of the training text that was searched."""
    left_out: list[str]
    """Missing numbers, each with the reason."""


def holds_out(data: Path) -> bool:
    """Return whether a dataset has a validation text."""
    split = load_metadata(data).splits.get("validation")
    return split is not None and split.bytes > 0


def validation_stream(
    data: Path, max_bytes: int, tokens: Tokens = BYTES, largest_group: float | None = None
) -> tuple[np.ndarray, str]:
    """Return the first ``max_bytes`` bytes of a validation split in a model's ids, and the dataset's digest.

    With ``largest_group``, no group has a larger share of the text (`spider.data.shards.balanced`).

    The text is cut in bytes and then encoded, so every vocabulary is scored on the same text. Special ids are
    the same in all vocabularies and are kept. The text of published shards is cut after a whole id and keeps
    its ids, because encoding it again could give other ids.

    Raises:
        ValueError: The dataset does not hold out any text, or too few groups.
    """
    metadata = load_metadata(data)
    if not holds_out(data):
        raise ValueError(
            f"{data}: has no validation text to score; raise `validation` in datasets.{metadata.dataset} "
            "(the share of documents held out) and encode again"
        )
    vocabulary = metadata.vocabulary
    if largest_group is None:
        shards = Shards(data, "validation")
        # A document of n bytes has n + 2 ids at most, and none is empty: three ids a byte suffice.
        count = min(shards.tokens, 3 * max_bytes)
        stream_N = clip_stream(np.asarray(shards.read(0, count)), max_bytes, vocabulary)
    else:
        stream_N, _ = balanced(data, max_bytes, largest_group)
    if vocabulary.digest == tokens.digest and (vocabulary.digest is None or metadata.imported):
        return stream_N, metadata.digest
    left = len(vocabulary.raw(stream_N)) if metadata.imported else max_bytes
    pieces = []
    for run_N in np.split(stream_N, np.flatnonzero(np.diff(vocabulary.bytes_of[stream_N] > 0)) + 1):
        text = vocabulary.raw(run_N)[:left]
        left -= len(text)
        pieces.append(tokens.encode(text)[1:-1] if text else run_N)
    return np.concatenate(pieces), metadata.digest
