"""Rows alike share a table: what a table of integers holds by one step is no one distribution.

The rows of an embedding that are seen often are long, and those of rare ids short; coded by one table, each
pays for the others. So rows are dealt by the mean square of their integers into a few classes of equal size,
each with a table, where that saves more than the tables and the rows' classes cost.

The rows of ids that training never saw are only ever pushed away from what was predicted, all of them alike,
and end as nearly one row. Where many rows lie near one, they are class 0, coded by what they differ from it,
modulo the alphabet.

Shapes: R rows of I integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spider.compress import rans

#: Bytes that an entry of a table takes, packed.
_ENTRY = 1.3
_COUNTS = (2, 4, 8, 16)
#: Classes of a tensor at most: those, and that of the rows near one.
MOST = _COUNTS[-1] + 1
#: Rows that are tried as the one that others lie near, and rows that are looked at for it; how near: this
#: share of a row's mean square saves it a bit a weight.
_TRIED, _LOOKED_AT, _NEAR = 1 << 8, 1 << 12, 0.25


def dealt(symbol_RI: np.ndarray, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's class, (R,) uint8, and what those of class 0 are coded against, (I,) uint8; ``reach`` is the
    symbol of zero, and a row of it changes nothing."""
    zero_I = np.full(symbol_RI.shape[1], reach, np.uint8)
    ways = [(_by_spread(symbol_RI, reach), zero_I)]
    near_R, base_I = _near_one(symbol_RI, reach)
    if near_R.any() and not near_R.all():
        class_R = np.zeros(len(symbol_RI), np.uint8)
        class_R[~near_R] = 1 + _by_spread(symbol_RI[~near_R], reach)
        ways.append((class_R, base_I))
    costs = [_cost(less(symbol_RI, c, base, reach), c) + np.count_nonzero(base != reach) for c, base in ways]
    return ways[int(np.argmin(costs))]


def _by_spread(symbol_RI: np.ndarray, reach: int) -> np.ndarray:
    spread_R = _distance(symbol_RI, reach)
    best_R = np.zeros(len(symbol_RI), np.uint8)
    least = _cost(symbol_RI, best_R)
    for count in _COUNTS:
        edges = np.quantile(spread_R, np.arange(1, count) / count)
        class_R = np.searchsorted(edges, spread_R).astype(np.uint8)
        if len(np.unique(class_R)) == count and (cost := _cost(symbol_RI, class_R)) < least:
            best_R, least = class_R, cost
    return best_R


def _near_one(symbol_RI: np.ndarray, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows lie near the one that most do, (R,), and the middle of them, (I,) uint8."""
    rows = len(symbol_RI)
    # In float64 whole numbers have whole sums, whatever their order.
    tried_CI, row_NI = (symbol_RI[:: -(-rows // n)].astype(np.float64) - reach for n in (_TRIED, _LOOKED_AT))
    square_C, square_N = (np.square(one).sum(1) for one in (tried_CI, row_NI))
    near_C = (square_C[:, None] - 2 * tried_CI @ row_NI.T < (_NEAR - 1) * square_N).sum(1)
    middle_I = tried_CI[near_C.argmax()] + reach
    for _ in range(3):
        near_R = _distance(symbol_RI, middle_I) < _NEAR * _distance(symbol_RI, reach)
        if near_R.any():
            middle_I = np.median(symbol_RI[near_R], axis=0).round()
    return near_R, middle_I.astype(np.uint8)


def _distance(symbol_RI: np.ndarray, of: np.ndarray | int) -> np.ndarray:
    """Mean squares, (R,)."""
    return np.square(symbol_RI - np.float32(of)).mean(1)


def _cost(symbol_RI: np.ndarray, class_R: np.ndarray) -> float:
    """Bytes of the integers, their tables and the rows' classes."""
    counts = [np.bincount(run) for run in split(symbol_RI, class_R)]
    tables = sum(_ENTRY * np.count_nonzero(one) for one in counts)
    return sum(map(rans.bits, counts)) / 8 + tables + len(class_R) * np.log2(len(counts)) / 8


def less(symbol_RI: np.ndarray, class_R: np.ndarray, base_I: np.ndarray, reach: int) -> np.ndarray:
    """With the rows of class 0 as what they differ from a base."""
    return _moved(symbol_RI, class_R, reach - base_I.astype(np.int16), reach)


def back(symbol_RI: np.ndarray, class_R: np.ndarray, base_I: np.ndarray, reach: int) -> np.ndarray:
    """What was `less`."""
    return _moved(symbol_RI, class_R, base_I.astype(np.int16) - reach, reach)


def _moved(symbol_RI: np.ndarray, class_R: np.ndarray, by_I: np.ndarray, reach: int) -> np.ndarray:
    moved_RI = (symbol_RI + by_I) % (2 * reach + 1)
    return np.where(class_R[:, None] == 0, moved_RI, symbol_RI).astype(np.uint8)


def split(symbol_RI: np.ndarray, class_R: np.ndarray) -> list[np.ndarray]:
    """The rows of each class, one behind the other."""
    return [symbol_RI[class_R == one].ravel() for one in range(int(class_R.max()) + 1)]


def joined(runs: Sequence[np.ndarray], class_R: np.ndarray, width: int) -> np.ndarray:
    """What was `split`, (R, width)."""
    symbol_RI = np.empty((len(class_R), width), np.uint8)
    for one, run in enumerate(runs):
        symbol_RI[class_R == one] = run.reshape(-1, width)
    return symbol_RI
