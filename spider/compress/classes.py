"""Rows of like spread share a table: what a table of integers holds by one step is no one distribution.

The rows of an embedding that are seen often are long, and those of rare ids short; coded by one table, each
pays for the others. So rows are dealt by the mean square of their integers into a few classes of equal size,
each with a table, where that saves more than the tables and the rows' classes cost.

Shapes: R rows of I integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spider.compress import rans

#: Bytes that an entry of a table takes, packed.
_ENTRY = 1.3
MOST = 16


def dealt(symbol_RI: np.ndarray, reach: int) -> np.ndarray:
    """Each row's class, (R,) uint8; ``reach`` is the symbol of zero."""
    spread_R = np.square(symbol_RI.astype(np.float32) - reach).mean(1)
    best_R = np.zeros(len(symbol_RI), np.uint8)
    least = _cost(symbol_RI, best_R, 1)
    for count in (2, 4, 8, MOST):
        edges = np.quantile(spread_R, np.arange(1, count) / count)
        class_R = np.searchsorted(edges, spread_R).astype(np.uint8)
        if (cost := _cost(symbol_RI, class_R, count)) < least and len(np.unique(class_R)) == count:
            best_R, least = class_R, cost
    return best_R


def _cost(symbol_RI: np.ndarray, class_R: np.ndarray, count: int) -> float:
    """Bytes of the integers, their tables and the rows' classes."""
    counts = [np.bincount(run) for run in split(symbol_RI, class_R, count)]
    tables = sum(_ENTRY * np.count_nonzero(one) for one in counts)
    return sum(map(rans.bits, counts)) / 8 + tables + len(class_R) * np.log2(count) / 8


def split(symbol_RI: np.ndarray, class_R: np.ndarray, count: int) -> list[np.ndarray]:
    """The rows of each class, one behind the other."""
    return [symbol_RI[class_R == one].ravel() for one in range(count)]


def joined(runs: Sequence[np.ndarray], class_R: np.ndarray, width: int) -> np.ndarray:
    """What was `split`, (R, width)."""
    symbol_RI = np.empty((len(class_R), width), np.uint8)
    for one, run in enumerate(runs):
        symbol_RI[class_R == one] = run.reshape(-1, width)
    return symbol_RI
