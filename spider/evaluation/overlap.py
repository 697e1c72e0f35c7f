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

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spider.tokens import Tokens

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
class Text:
    """Documents end to end: their bytes (uint8), and where each begins, with the end of the last."""

    bytes_N: np.ndarray
    bounds_D: np.ndarray

    @classmethod
    def of(cls, tokens_N: np.ndarray, alphabet: Tokens) -> Text:
        """The text of a stream of ids; what lies before its first BOS is a document as well."""
        ends = np.cumsum(alphabet.bytes_of[tokens_N], dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        begins = ends[tokens_N == alphabet.bos]
        raw = np.frombuffer(alphabet.raw(tokens_N), np.uint8)
        return cls(raw, np.unique(np.concatenate([[0], begins, [total]])))

    def __len__(self) -> int:
        return len(self.bytes_N)

    def documents(self) -> list[bytes]:
        return [self.bytes_N[a:b].tobytes() for a, b in pairwise(self.bounds_D.tolist())]

    def lengths(self) -> np.ndarray:
        """Bytes of each document: (D,)."""
        return np.diff(self.bounds_D)


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
