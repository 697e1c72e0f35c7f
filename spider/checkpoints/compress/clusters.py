"""Cluster the rows of a quantized tensor; each cluster has its own frequency table.

Rows of one matrix differ in entropy: in an embedding, rows of frequent tokens have large norms and rows of
rare tokens small ones. One table for all rows would cost more bits. So rows are sorted by the mean square of
their integers into 2 to 16 clusters of equal size. This is done only if it saves more than the tables and the
rows' cluster numbers cost.

Tokens that never occur in training all get nearly the same gradient, so their rows end nearly equal. If
many rows are close to one row, they become cluster 0, which is coded as differences from that base row,
modulo the number of symbols.

Shapes: R rows of I integers, stored as symbols 0 .. 2 zero; ``zero`` is the symbol of the integer 0.
"""

from __future__ import annotations

import numpy as np

from spider.checkpoints.compress import rans

#: Packed bytes per entry of a frequency table.
_ENTRY_BYTES = 1.3
#: Numbers of clusters that are tried, not counting the rows close to a base row.
_COUNTS = (2, 4, 8, 16)
#: Rows that are tried as the base row, and rows whose distance to each of them is measured.
_CANDIDATES, _SAMPLE = 1 << 8, 1 << 12
#: A row is close to another if their squared distance is below this share of its mean square. That saves one
#: bit per weight.
_CLOSE = 0.25


def assign_clusters(symbol_RI: np.ndarray, zero: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's cluster, (R,) uint8, and the base row of cluster 0, (I,) uint8.

    A base row that consists of ``zero`` leaves cluster 0 unchanged.
    """
    zero_I = np.full(symbol_RI.shape[1], zero, np.uint8)
    options = [(_by_mean_square(symbol_RI, zero), zero_I)]
    close_R, base_I = _close_rows(symbol_RI, zero)
    if close_R.any() and not close_R.all():
        cluster_R = np.zeros(len(symbol_RI), np.uint8)
        cluster_R[~close_R] = 1 + _by_mean_square(symbol_RI[~close_R], zero)
        options.append((cluster_R, base_I))
    costs = []
    for cluster_R, base_I in options:
        coded_RI = subtract_base(symbol_RI, cluster_R, base_I, zero)
        costs.append(_cost(coded_RI, cluster_R) + np.count_nonzero(base_I != zero))
    return options[int(np.argmin(costs))]


def _by_mean_square(symbol_RI: np.ndarray, zero: int) -> np.ndarray:
    """Return the cheapest assignment to clusters of equal size in the order of mean squares, (R,) uint8."""
    square_R = _distance(symbol_RI, zero)
    best_R = np.zeros(len(symbol_RI), np.uint8)
    least = _cost(symbol_RI, best_R)
    for count in _COUNTS:
        edges = np.quantile(square_R, np.arange(1, count) / count)
        cluster_R = np.searchsorted(edges, square_R).astype(np.uint8)
        if len(np.unique(cluster_R)) < count:
            continue
        cost = _cost(symbol_RI, cluster_R)
        if cost < least:
            best_R, least = cluster_R, cost
    return best_R


def _close_rows(symbol_RI: np.ndarray, zero: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask of the rows close to the row with most close rows, (R,), and their median, (I,) uint8."""

    def sample(size: int) -> np.ndarray:
        # Sums of integers are exact in float64, so they do not depend on their order.
        return symbol_RI[:: -(-len(symbol_RI) // size)].astype(np.float64) - zero

    candidate_CI = sample(_CANDIDATES)
    row_NI = sample(_SAMPLE)
    square_C = np.square(candidate_CI).sum(1)
    square_N = np.square(row_NI).sum(1)
    # |c - r|^2 < CLOSE |r|^2, without the term |r|^2 on the left.
    close_C = (square_C[:, None] - 2 * candidate_CI @ row_NI.T < (_CLOSE - 1) * square_N).sum(1)
    base_I = candidate_CI[close_C.argmax()] + zero
    for _ in range(3):
        close_R = _distance(symbol_RI, base_I) < _CLOSE * _distance(symbol_RI, zero)
        if close_R.any():
            base_I = np.median(symbol_RI[close_R], axis=0).round()
    return close_R, base_I.astype(np.uint8)


def _distance(symbol_RI: np.ndarray, center: np.ndarray | int) -> np.ndarray:
    """Return the mean squared distance of each row from a center, (R,)."""
    return np.square(symbol_RI - np.float32(center)).mean(1)


def _cost(symbol_RI: np.ndarray, cluster_R: np.ndarray) -> float:
    """Estimate the bytes of the integers, their tables and the rows' cluster numbers."""
    counts = [np.bincount(run) for run in split(symbol_RI, cluster_R)]
    tables = sum(_ENTRY_BYTES * np.count_nonzero(count) for count in counts)
    return sum(map(rans.entropy_bits, counts)) / 8 + tables + len(cluster_R) * np.log2(len(counts)) / 8


def subtract_base(symbol_RI: np.ndarray, cluster_R: np.ndarray, base_I: np.ndarray, zero: int) -> np.ndarray:
    """Replace the rows of cluster 0 by their differences from the base row, modulo the number of symbols."""
    coded_RI = (symbol_RI + (zero - base_I.astype(np.int16))) % (2 * zero + 1)
    return np.where(cluster_R[:, None] == 0, coded_RI, symbol_RI).astype(np.uint8)


def split(symbol_RI: np.ndarray, cluster_R: np.ndarray) -> list[np.ndarray]:
    """Return the concatenated rows of each cluster."""
    return [symbol_RI[cluster_R == cluster].ravel() for cluster in range(int(cluster_R.max()) + 1)]
