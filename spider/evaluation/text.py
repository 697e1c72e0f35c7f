"""Define the held-out text, and what is computed from it without a model.

The text is the beginning of a validation split, or of each of its groups.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np

from spider.config.run import EvaluationConfig
from spider.data.shards import Shards, balanced, load_metadata
from spider.evaluation.bpb import clip_stream
from spider.record import Record
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

    @property
    def sha256(self) -> str:
        """Return the digest of all bytes."""
        return hashlib.sha256(self.bytes_N.tobytes()).hexdigest()

    def lengths(self) -> np.ndarray:
        """Return the bytes of each document: (D,)."""
        return np.diff(self.bounds_D)


class Overlap(Record):
    """``overlap/NAME.json``: what of a held-out text also occurs in the training text."""

    WHAT: ClassVar[str] = "a record of overlap"

    text_sha256: str
    edges: tuple[int, ...] = ()
    """Bytes where a match of 50 bytes with the training text begins, and where it ends, in turn."""
    seen: tuple[float, ...] = ()
    """Share of each document's 12-byte strings that occur in the training text."""
    searched: float | None = None
    """Share of the training text that was searched; None if it is unknown."""
    left_out: tuple[str, ...] = ()
    """Why the training text is unknown."""

    def covered(self, size: int) -> np.ndarray:
        """Return which bytes of a text of this size are in a match: (size,) bool."""
        edges_N = np.zeros(size + 1, np.int8)
        edges_N[list(self.edges)] = 1
        return np.cumsum(edges_N)[:-1] % 2 == 1


def holds_out(data: Path) -> bool:
    """Return whether a dataset has a validation text."""
    split = load_metadata(data).splits.get("validation")
    return split is not None and split.bytes > 0


def held_out_text(data: Path, settings: EvaluationConfig) -> Text:
    """Return the text that the models of a stage are scored on; raises as `validation_stream`."""
    stream_N, _ = validation_stream(data, settings.max_bytes, largest_group=settings.largest_group)
    return Text.of(stream_N, BYTES)


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
