"""What a memory of a large text costs, before it is made: extrapolated from how contexts grew on a small one.

The number of different contexts of a text of T bytes is close to a power of T (Heaps' law), with an exponent
of its own for each kind. Both were measured on the default corpus by ``benchmarks/memory.py``, at 14.6 and
23.7 million symbols of English documentation. Far beyond that, or of other text, this is an estimate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from spider.config.memory import MemoryConfig
from spider.memory.table import MATCHED, bucket_bits, place_bits, width

#: Symbols that the figures below are of.
_TEXT = 23.7e6


class _Growth(NamedTuple):
    once: float
    """Millions of contexts that occur at all, in `_TEXT`, and their exponent."""
    once_exponent: float
    twice: float
    """The same of those that occur twice at least."""
    twice_exponent: float


_GROWTH = {
    1: _Growth(0.000167, 0.115, 0.000159, 0.162),
    2: _Growth(0.007773, 0.188, 0.006913, 0.204),
    3: _Growth(0.09318, 0.419, 0.06878, 0.445),
    4: _Growth(0.3776, 0.549, 0.2393, 0.571),
    5: _Growth(0.9464, 0.631, 0.5302, 0.658),
    6: _Growth(1.827, 0.702, 0.9175, 0.734),
    7: _Growth(2.989, 0.763, 1.35, 0.797),
    9: _Growth(5.94, 0.860, 2.189, 0.886),
    12: _Growth(10.65, 0.957, 2.917, 0.955),
    16: _Growth(15.27, 1.023, 2.943, 0.960),
    22: _Growth(18.38, 1.047, 2.446, 0.896),
    ~0: _Growth(0.9199, 0.985, 0.4298, 0.936),
    ~1: _Growth(5.645, 0.918, 1.917, 0.872),
    ~2: _Growth(12.51, 0.991, 2.897, 0.932),
}
#: Seconds of a processor for a symbol and a kind of contexts: counting, merging.
_SECONDS = 1.2e-7
#: Bytes that memory is read in.
_LINE = 64


class Cost(NamedTuple):
    text: float
    """Symbols that are counted."""
    disk: float
    """Bytes."""
    seconds: float
    """Of one processor, to count and to merge."""
    look_up: int
    """Bytes of memory read for a place."""


def cost(config: MemoryConfig, text: float) -> Cost:
    """Of a memory of so many symbols."""
    kinds = config.contexts
    rows = {kind: _contexts(kind, text, rare=not 0 < kind < config.rare) for kind in kinds}
    buckets = sum(4 << bucket_bits(round(n)) for n in rows.values())
    places = 4 << place_bits(text)
    disk = sum(n * width(kind) for kind, n in rows.items()) + buckets + places + text
    lines = sum(1 + math.ceil(6 * width(kind) / _LINE) for kind in kinds) + 1 + math.ceil(MATCHED / _LINE)
    return Cost(text, disk, _SECONDS * len(kinds) * text, _LINE * lines)


def _contexts(kind: int, text: float, rare: bool) -> float:
    """How many are kept."""
    low, high, between = _neighbours(kind)

    def at(measured: _Growth) -> float:
        if rare:
            return math.log(1e6 * measured.twice) + measured.twice_exponent * math.log(text / _TEXT)
        return math.log(1e6 * measured.once) + measured.once_exponent * math.log(text / _TEXT)

    number = math.exp((1 - between) * at(_GROWTH[low]) + between * at(_GROWTH[high]))
    return min(number, text, 256.0**kind if kind > 0 else math.inf)


def _neighbours(kind: int) -> tuple[int, int, float]:
    """The measured kinds that one lies between, and how far."""
    known = sorted(one for one in _GROWTH if (one < 0) == (kind < 0))
    low = max((one for one in known if one <= kind), default=known[0])
    high = min((one for one in known if one >= kind), default=known[-1])
    return low, high, 0.0 if low == high else (kind - low) / (high - low)
