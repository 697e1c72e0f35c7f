"""How much of a text stands in another one already: what a model may have copied, told from what it learned.

A stretch of ``length`` bytes of the held-out text that the training text holds somewhere is a match. Two
lengths say two things: a byte in a match of 50 bytes is a copy (of a licence, of a docstring that a subclass
repeats); the share of a document's 12-byte stretches that the training text holds says how much of its
wording is common. A match lies within one document of either side.

Every stretch of the held-out text is hashed, then the training text is read once, in chunks, and every
stretch of it is looked up. The hash of stretch i is the polynomial sum_j b[i+j] p^j modulo 2**64, for all i
at once from one cumulative sum, since p is odd and so has an inverse: h_i = (S[i+n] - S[i]) p^-i with S the
sums of b[i] p^i. A bitmap of the hashes' top bits turns away most of what is not there before anything is
searched for. Equal hashes are taken for equal text: with 2**25 stretches against 2**19 one pair in a million
texts is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spider.config.run import EvaluationConfig
from spider.evaluation.result import BITS, BYTES, SHARE, Number, Result, Row, Table
from spider.evaluation.subject import Subject
from spider.evaluation.text import OUTSIDE_COPIES, Text

#: Bytes in a row that are called a copy.
COPIED = 50
#: Bytes in a row by which the wording of a document is compared.
COMMON = 12
#: Bytes of the training text looked up at a time.
CHUNK = 1 << 22

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_BITS = 24


@dataclass(frozen=True)
class DocumentScore:
    """The scores of one document of the text."""

    bytes: int
    bpb: float
    ppmd: float | None = None
    """Rate of PPMd, given as much training text as it is given."""
    common: float | None = None
    """Share of the document's stretches of `COMMON` bytes that the training text holds."""
    copied: float | None = None
    """Share of the document's bytes in copies."""


def measure(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return the model's score outside of copies, and its scores by how common the wording is."""
    measured, bits_B = subject.beside.result(), subject.bits_B
    size_D, bounds_D = subject.text.lengths(), subject.text.bounds_D[:-1]
    columns = {"bytes": size_D, "bpb": np.add.reduceat(bits_B, bounds_D) / size_D}
    if measured.ppmd_D is not None:
        columns["ppmd"] = measured.ppmd_D / size_D
    copied_B = measured.copied_N
    if copied_B is None or measured.common_D is None:
        return Result(title="Overlap", details={"by_document": _records(columns)})
    columns["copied"] = np.add.reduceat(copied_B.astype(float), bounds_D) / size_D
    columns["common"] = measured.common_D
    fresh_bytes, copied, searched = int((~copied_B).sum()), float(copied_B.mean()), measured.searched or 0.0
    searched_part = (
        "" if searched > 0.995 else f" of the {searched:.0%} of the training text that was searched"
    )
    note = f"{copied:.1%} of these bytes are copies ({COPIED} bytes or more in a row){searched_part}."
    row = Row(
        name="copies/bpb",
        label=OUTSIDE_COPIES,
        value=float(bits_B[~copied_B].sum() / fresh_bytes) if fresh_bytes else None,
        unit=BITS,
        better="lower",
        note=f"on the {fresh_bytes:,} bytes outside of copies",
    )
    records = _records(columns)
    return Result(
        title="Overlap",
        rows=[row],
        notes=[note],
        metrics={
            "copies/length": COPIED,
            "copies/copied": copied,
            "copies/searched": searched,
            "copies/fresh_bytes": fresh_bytes,
        },
        figures=[_quarters([DocumentScore(**record) for record in records])],
        details={"by_document": records},
    )


def _records(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return one mapping for each document from columns of values."""
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _quarters(documents: Sequence[DocumentScore]) -> Table:
    """Return scores in four parts of like size, by the share of wording that the training text holds."""
    known = sorted(documents, key=lambda one: one.common or 0.0)
    total = sum(one.bytes for one in known)
    done = 0
    parts = [list[DocumentScore]() for _ in range(4)]
    for one in known:
        parts[min(3, int(4 * (done + one.bytes / 2) / total))].append(one)
        done += one.bytes
    return Table(
        title="By how much of the wording the training text holds",
        head=f"common stretches of {COMMON} bytes",
        value="this model",
        rows=[_quarter(index, part) for index, part in enumerate(parts) if part],
        notes=["Documents in four parts of like size, by the share of their wording in the training text."],
    )


def _quarter(index: int, part: list[DocumentScore]) -> Row:
    """Return the mean scores of one part, weighted by bytes."""
    size = sum(one.bytes for one in part)

    def mean(name: str) -> float:
        return sum(one.bytes * getattr(one, name) for one in part) / size

    columns = {"bytes": Number(value=size, unit=BYTES), "in copies": Number(value=mean("copied"), unit=SHARE)}
    if part[0].ppmd is not None:
        columns["ppmd"] = Number(value=mean("ppmd"), unit=BITS)
    return Row(
        name=f"wording/{index}",
        label=f"{part[0].common:.0%} to {part[-1].common:.0%}",
        value=mean("bpb"),
        unit=BITS,
        better="lower",
        columns=columns,
    )


class Stretches:
    """Which stretches of ``length`` bytes of a text occur in what is shown to it (`look_in`)."""

    def __init__(self, text: Text, length: int) -> None:
        self.text, self.length = text, length
        self.at, hashes = _hashed(text, length)
        self._hashes, self._which = np.unique(hashes, return_inverse=True)
        self._seen = np.zeros(len(self._hashes), bool)
        self._mark_wanted()

    def _mark_wanted(self) -> None:
        self._wanted = np.zeros(1 << _BITS, bool)
        self._wanted[_top(self._hashes[~self._seen])] = True

    def look_in(self, other: Text) -> None:
        """Mark what occurs in another text."""
        _, hashes = _hashed(other, self.length)
        likely = hashes[self._wanted[_top(hashes)]]
        if not len(likely) or not len(self._hashes):
            return
        place = np.minimum(np.searchsorted(self._hashes, likely), len(self._hashes) - 1)
        self._seen[place[self._hashes[place] == likely]] = True
        self._mark_wanted()  # what was seen need not be looked for again

    def covered(self) -> np.ndarray:
        """The bytes that lie in a stretch that was seen: bool, one a byte of the text."""
        edges = np.zeros(len(self.text) + 1, np.int32)
        begins = self.at[self._seen[self._which]]
        np.add.at(edges, begins, 1)
        np.add.at(edges, begins + self.length, -1)
        return np.cumsum(edges)[:-1] > 0

    def shares(self) -> np.ndarray:
        """Of each document the share of its stretches that were seen: (D,) float; 0 for one too short."""
        document = np.searchsorted(self.text.bounds_D, self.at, side="right") - 1
        count = len(self.text.bounds_D) - 1
        all_D = np.bincount(document, minlength=count)
        return np.bincount(document, self._seen[self._which], count) / np.maximum(1, all_D)


def _hashed(text: Text, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each stretch within a document begins (int64), and its hash (uint64)."""
    count = len(text) - length + 1
    if count < 1:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    with np.errstate(over="ignore"):
        powers = _powers(_BASE, len(text))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(text.bytes_N * powers, dtype=np.uint64)])
        hashes = (sums[length:] - sums[:-length]) * _powers(_INVERSE, count)
    inside = np.ones(len(text) + length, bool)  # a document's last length - 1 places begin no stretch of it
    for back in range(1, length):
        inside[np.maximum(0, text.bounds_D[1:] - back)] = False
    at = np.flatnonzero(inside[:count])
    return at, hashes[at]


_TABLES: dict[int, np.ndarray] = {}


def _powers(base: int, count: int) -> np.ndarray:
    """base**i modulo 2**64 for i below ``count``."""
    table = _TABLES.get(base)
    if table is None or len(table) < count:
        steps = np.full(max(count, CHUNK), base, np.uint64)
        steps[0] = 1
        with np.errstate(over="ignore"):
            _TABLES[base] = table = np.cumprod(steps, dtype=np.uint64)
    return table[:count]


def _top(hashes: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (hashes * _MIX) >> np.uint64(64 - _BITS)
