"""What an index of a large text costs, before it is made: extrapolated from how contexts grew on a small one.

The number of different contexts of a text of T bytes is close to a power of T (Heaps' law), with an exponent
of its own for each kind. Both were measured on the default corpus, at 14.6 and 23.7 million symbols of
English documentation. Far beyond that, or of other text, this is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from spider.config.ngram import NgramConfig
from spider.ngram.table import MATCHED, bucket_bits, place_bits, width
from spider.requests import FAN_IN, PIECE

#: Symbols that the figures below are of.
_TEXT = 23.7e6


class _Growth(NamedTuple):
    once: float
    """Millions of contexts that occur at all, in `_TEXT`, and their exponent."""
    once_exponent: float
    twice: float
    """The same of those that occur twice at least."""
    twice_exponent: float
    pairs: float
    """Millions of pairs of a context and a symbol behind it, and their exponent."""
    pairs_exponent: float


_GROWTH = {
    1: _Growth(0.000167, 0.115, 0.000159, 0.162, 0.007792, 0.171),
    2: _Growth(0.007773, 0.188, 0.006913, 0.204, 0.09345, 0.397),
    3: _Growth(0.09318, 0.419, 0.06878, 0.445, 0.3788, 0.533),
    4: _Growth(0.3776, 0.549, 0.2393, 0.571, 0.9499, 0.615),
    5: _Growth(0.9464, 0.631, 0.5302, 0.658, 1.833, 0.680),
    6: _Growth(1.827, 0.702, 0.9175, 0.734, 2.999, 0.739),
    7: _Growth(2.989, 0.763, 1.35, 0.797, 4.397, 0.790),
    9: _Growth(5.94, 0.860, 2.189, 0.886, 7.569, 0.876),
    12: _Growth(10.65, 0.957, 2.917, 0.955, 12.05, 0.962),
    16: _Growth(15.27, 1.023, 2.943, 0.960, 16.05, 1.021),
    22: _Growth(18.38, 1.047, 2.446, 0.896, 18.66, 1.041),
    ~0: _Growth(0.9199, 0.985, 0.4298, 0.936, 1.568, 0.872),
    ~1: _Growth(5.645, 0.918, 1.917, 0.872, 7.292, 0.897),
    ~2: _Growth(12.51, 0.991, 2.897, 0.932, 13.86, 0.983),
}
#: Seconds of a processor for a symbol and a kind of contexts: counting, merging.
_SECONDS = 1.2e-7
#: Bytes that memory is read in.
_LINE = 64


class Cost(NamedTuple):
    text: float
    """Symbols that are counted."""
    disk: float
    """Bytes of the finished n-gram index."""
    runs: float
    """Bytes of the runs, which are on disk until they are merged, and of what merging adds to them."""
    seconds: float
    """Of one processor, to count and to merge."""
    look_up: int
    """Bytes of memory read for a place."""


def cost(config: NgramConfig, text: float) -> Cost:
    """Return what an n-gram index of so many symbols costs."""
    kinds = config.contexts
    rows = {kind: _contexts(kind, text, rare=not 0 < kind < config.rare) for kind in kinds}
    buckets = sum(4 << bucket_bits(round(n)) for n in rows.values())
    places = 4 << place_bits(text)
    disk = sum(n * width(kind) for kind, n in rows.items()) + buckets + places + text
    lines = sum(1 + math.ceil(6 * width(kind) / _LINE) for kind in kinds) + 1 + math.ceil(MATCHED / _LINE)
    return Cost(text, disk, _runs(kinds, text), _SECONDS * len(kinds) * text, _LINE * lines)


def _runs(kinds: list[int], text: float) -> float:
    """Return the most bytes that runs of a text take on disk at a time.

    Each piece has its own runs, of 12 bytes a pair, and a copy of its text. More runs than can be merged at a
    time are merged in groups, of 16 bytes a pair, for two kinds of contexts at a time.
    """
    pieces = max(1.0, text / PIECE)
    pairs = [pieces * _pairs(kind, text / pieces) for kind in kinds]
    groups = sum(sorted(pairs)[-2:]) if pieces > FAN_IN else 0
    return text + 12 * sum(pairs) + 16 * groups


def _contexts(kind: int, text: float, rare: bool) -> float:
    """Return how many contexts of a kind are kept."""
    if rare:
        number = _grown(kind, text, lambda measured: (measured.twice, measured.twice_exponent))
    else:
        number = _grown(kind, text, lambda measured: (measured.once, measured.once_exponent))
    return min(number, text, 256.0**kind if kind > 0 else math.inf)


def _pairs(kind: int, text: float) -> float:
    """Return how many different pairs of a context of a kind and a symbol there are."""
    number = _grown(kind, text, lambda measured: (measured.pairs, measured.pairs_exponent))
    return min(number, text)


def _grown(kind: int, text: float, measure: Callable[[_Growth], tuple[float, float]]) -> float:
    """Return a measured number of millions as it is for another text, and for kinds between measured ones."""

    def at(measured: _Growth) -> float:
        millions, exponent = measure(measured)
        return math.log(1e6 * millions) + exponent * math.log(text / _TEXT)

    low, high, between = _neighbours(kind)
    return math.exp((1 - between) * at(_GROWTH[low]) + between * at(_GROWTH[high]))


def _neighbours(kind: int) -> tuple[int, int, float]:
    """The measured kinds that one lies between, and how far."""
    known = sorted(one for one in _GROWTH if (one < 0) == (kind < 0))
    low = max((one for one in known if one <= kind), default=known[0])
    high = min((one for one in known if one >= kind), default=known[-1])
    return low, high, 0.0 if low == high else (kind - low) / (high - low)
