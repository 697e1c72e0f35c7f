"""Estimate the size of the n-gram index of a large text, from how contexts grew on a small one.

The number of different contexts of a text of T bytes is close to a power of T (Heaps' law), with an exponent
for each kind. Number and exponent were measured on the default corpus, at 14.6 and 23.7 million symbols of
English documentation. For much larger or other text the estimate is rough.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from spider.config.ngram import NgramConfig
from spider.config.requests import FAN_IN, PIECE
from spider.data.ngram.table import MATCH_LENGTH, bucket_bits, position_bits, width

#: Symbols of the text that the measured numbers are from.
_MEASURED = 23.7e6
#: For each kind of context: millions of contexts, of contexts that occur at least twice, and of pairs of a
#: context and the next symbol; each with its exponent.
_GROWTH = {
    1: ((0.000167, 0.115), (0.000159, 0.162), (0.007792, 0.171)),
    2: ((0.007773, 0.188), (0.006913, 0.204), (0.09345, 0.397)),
    3: ((0.09318, 0.419), (0.06878, 0.445), (0.3788, 0.533)),
    4: ((0.3776, 0.549), (0.2393, 0.571), (0.9499, 0.615)),
    5: ((0.9464, 0.631), (0.5302, 0.658), (1.833, 0.680)),
    6: ((1.827, 0.702), (0.9175, 0.734), (2.999, 0.739)),
    7: ((2.989, 0.763), (1.35, 0.797), (4.397, 0.790)),
    9: ((5.94, 0.860), (2.189, 0.886), (7.569, 0.876)),
    12: ((10.65, 0.957), (2.917, 0.955), (12.05, 0.962)),
    16: ((15.27, 1.023), (2.943, 0.960), (16.05, 1.021)),
    22: ((18.38, 1.047), (2.446, 0.896), (18.66, 1.041)),
    ~0: ((0.9199, 0.985), (0.4298, 0.936), (1.568, 0.872)),
    ~1: ((5.645, 0.918), (1.917, 0.872), (7.292, 0.897)),
    ~2: ((12.51, 0.991), (2.897, 0.932), (13.86, 0.983)),
}
_ONCE, _TWICE, _PAIRS = range(3)
#: Processor seconds to count and merge a symbol, for each kind of context.
_SECONDS = 1.2e-7
#: Bytes of a cache line.
_LINE = 64


class Cost(NamedTuple):
    """Estimated cost of an n-gram index."""

    text: float
    """Symbols that are counted."""
    disk: float
    """Bytes of the finished n-gram index."""
    runs: float
    """Bytes of the runs, which are on disk until they are merged, and of merged groups of runs."""
    seconds: float
    """Processor seconds to count and to merge."""
    look_up: int
    """Bytes of memory that are read for a position."""


def cost(config: NgramConfig, text: float) -> Cost:
    """Return the cost of the n-gram index of a text of so many symbols."""
    kinds = config.context_kinds
    rows = {}
    for kind in kinds:
        number = _number(kind, text, _ONCE if 0 < kind < config.rare else _TWICE)
        rows[kind] = min(number, text, 256.0**kind if kind > 0 else math.inf)
    buckets = sum(4 << bucket_bits(round(n)) for n in rows.values())
    last = 4 << position_bits(text)
    lines = sum(1 + math.ceil(6 * width(kind) / _LINE) for kind in kinds)
    lines += 1 + math.ceil(MATCH_LENGTH / _LINE)
    return Cost(
        text=text,
        disk=sum(n * width(kind) for kind, n in rows.items()) + buckets + last + text,
        runs=_runs(kinds, text),
        seconds=_SECONDS * len(kinds) * text,
        look_up=_LINE * lines,
    )


def _runs(kinds: list[int], text: float) -> float:
    """Return the largest size of the runs on disk.

    Each piece of the text has its own runs, of 12 bytes a pair, and a copy of its symbols. More runs than can
    be merged at a time are merged in groups, of 16 bytes a pair, for two kinds of contexts at a time.
    """
    pieces = max(1.0, text / PIECE)
    pairs = [pieces * min(_number(kind, text / pieces, _PAIRS), text / pieces) for kind in kinds]
    groups = sum(sorted(pairs)[-2:]) if pieces > FAN_IN else 0
    return text + 12 * sum(pairs) + 16 * groups


def _number(kind: int, text: float, measure: int) -> float:
    """Return a measured number for a text of another size, interpolated between the measured kinds."""
    measured = sorted(other for other in _GROWTH if (other < 0) == (kind < 0))
    logarithms = []
    for other in measured:
        millions, exponent = _GROWTH[other][measure]
        logarithms.append(math.log(1e6 * millions) + exponent * math.log(text / _MEASURED))
    return math.exp(np.interp(kind, measured, logarithms))
