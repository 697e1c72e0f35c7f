"""Measure the train/test overlap: how much of the held-out text also occurs in the training text.

A match of 50 bytes may have been copied: a licence, an inherited docstring. It lies within one document on
both sides.

Every string of the held-out text is hashed. The training text is then read once, in chunks, and each of its
strings is looked up. The hash of string i is the polynomial sum_j b[i+j] p^j modulo 2**64. Since p is odd it
has an inverse, so one cumulative sum S of b[i] p^i gives all hashes: h_i = (S[i+n] - S[i]) p^-i. A bitmap of
the hashes' top bits rejects most strings before any search. Equal hashes count as equal text: with 2**25
strings against 2**19, one pair of texts in a million has a false match.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spider.common.formatting import Pace
from spider.config import StageSpec
from spider.config.run import EvaluationConfig
from spider.evaluation.measures import Subject
from spider.evaluation.result import BITS, SHARE, Result, Row
from spider.evaluation.text import (
    OUTSIDE_OVERLAP,
    LearnedFrom,
    Overlap,
    Text,
    TrainingText,
    all_text,
    held_out_text,
)

#: Share of the text above which its overlap with the training text is bad news.
MUCH = 0.5
#: Length of a match, in bytes.
MATCH_BYTES = 50
#: Most ids of the training text that are searched.
SEARCHED = 1 << 28

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_BITS = 24


def find_overlap(spec: StageSpec, data: Path, learned: LearnedFrom, output: Path) -> Overlap:
    """Search the training text for the held-out text of a stage, and write what was found.

    Args:
        data: Shards folder of ``spec.evaluation.data``.

    Raises:
        ValueError: The validation text is empty.
    """
    text = held_out_text(data, spec.evaluation)
    if spec.evaluation.training_bytes == 0:
        training, reasons = None, ["evaluation.training_bytes is 0, so compressors read no training text"]
    else:
        training, reasons = all_text(learned, SEARCHED)
    return overlap_of(text, training, reasons).write(output)


def overlap_of(text: Text, training: TrainingText | None, reasons: Sequence[str] = ()) -> Overlap:
    """Return the overlap of a text with a training text; without one, the reasons."""
    found = Overlap(format=Overlap.FORMAT, text_sha256=text.sha256, left_out=tuple(reasons))
    if training is None:
        return found
    matches = StringMatches(text, MATCH_BYTES)
    pace = Pace("searched {done} of {total} ids", training.size)
    done = 0
    for piece in training.pieces(overlap=MATCH_BYTES - 1):
        matches.search(Text.of(piece, training.vocabulary))
        pace(done := min(training.size, done + len(piece)))
    edges = np.flatnonzero(np.diff(matches.covered(), prepend=False, append=False))
    return found.model_copy(update={"edges": tuple(edges.tolist()), "searched": training.share})


def measure(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return the model's score outside the overlap, and the score of each document."""
    overlap, bits_B = subject.overlap, subject.bits_B
    size_D = subject.text.lengths()
    first_D = subject.text.bounds_D[:-1]
    columns = {"bytes": size_D, "bpb": np.add.reduceat(bits_B, first_D) / size_D}
    if overlap is None or overlap.searched is None:
        return Result(title="Overlap", details={"by_document": _records(columns)})
    overlap_B = overlap.covered(len(subject.text))
    columns["overlap"] = np.add.reduceat(overlap_B.astype(float), first_D) / size_D
    outside = int((~overlap_B).sum())
    share = float(overlap_B.mean())
    searched = overlap.searched
    part = "" if searched > 0.995 else f" of the {searched:.0%} of the training text that was searched"
    rows = [
        Row(
            name="overlap/bpb_outside",
            label=OUTSIDE_OVERLAP,
            value=float(bits_B[~overlap_B].sum() / outside) if outside else None,
            unit=BITS,
            better="lower",
            note=f"Bits per byte of the text without matches of {MATCH_BYTES} bytes in the training text",
        ),
        Row(
            name="overlap/share",
            label="overlap",
            value=share,
            unit=SHARE,
            column=True,
            tone="bad" if share > MUCH else "",
            note="Most of the held-out text is in the training text, so the score says how much was copied",
        ),
    ]
    return Result(
        title="Overlap",
        rows=rows,
        notes=[f"{share:.1%} of these bytes are in matches of {MATCH_BYTES} bytes or more{part}."],
        metrics={
            "overlap/match_bytes": MATCH_BYTES,
            "overlap/share": share,
            "overlap/searched": searched,
            "overlap/bytes_outside": outside,
        },
        details={"by_document": _records(columns)},
    )


def _records(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return one mapping for each document from columns of values."""
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


class StringMatches:
    """The strings of ``length`` bytes of a text, each marked once it was found in another text."""

    def __init__(self, text: Text, length: int) -> None:
        self.text = text
        self.length = length
        self.offsets, hashes = _hashes(text, length)
        self._hashes, self._index = np.unique(hashes, return_inverse=True)
        self._found = np.zeros(len(self._hashes), bool)
        self._bitmap = np.zeros(1 << _BITS, bool)
        self._bitmap[_top_bits(self._hashes)] = True

    def search(self, other: Text) -> None:
        """Mark the strings that occur in another text."""
        _, hashes = _hashes(other, self.length)
        likely = hashes[self._bitmap[_top_bits(hashes)]]
        if len(likely):
            index = np.minimum(np.searchsorted(self._hashes, likely), len(self._hashes) - 1)
            self._found[index[self._hashes[index] == likely]] = True

    def covered(self) -> np.ndarray:
        """Return which bytes of the text lie in a found string: (N,) bool."""
        edges = np.zeros(len(self.text) + 1, np.int32)
        begins = self.offsets[self._found[self._index]]
        np.add.at(edges, begins, 1)
        np.add.at(edges, begins + self.length, -1)
        return np.cumsum(edges)[:-1] > 0


def _hashes(text: Text, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the offset (int64) and the hash (uint64) of each string within a document."""
    count = len(text) - length + 1
    if count < 1:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    sums = np.cumsum(text.bytes_N * _powers(_BASE, len(text)), dtype=np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), sums])
    hashes = (sums[length:] - sums[:-length]) * _powers(_INVERSE, count)
    inside = np.ones(len(text) + length, bool)  # False for the last length - 1 bytes of a document
    for back in range(1, length):
        inside[np.maximum(0, text.bounds_D[1:] - back)] = False
    offsets = np.flatnonzero(inside[:count])
    return offsets, hashes[offsets]


def _powers(base: int, count: int) -> np.ndarray:
    """Return base**i modulo 2**64 for i below ``count``."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _top_bits(hashes: np.ndarray) -> np.ndarray:
    return (hashes * _MIX) >> np.uint64(64 - _BITS)
