"""Rows are clustered where that saves bytes, and are restored exactly."""

import numpy as np

from spider.checkpoints.compress import rans
from spider.checkpoints.compress.clusters import assign_clusters, split, subtract_base
from spider.checkpoints.compress.format import join_clusters

RNG = np.random.default_rng(0)
ZERO = 127


def rows(deviations, width=64):
    values = RNG.normal(0, 1, (len(deviations), width)) * np.array(deviations)[:, None]
    return np.clip(np.round(values) + ZERO, 0, 2 * ZERO).astype(np.uint8)


def coded(symbol_RI):
    """Return the bytes of the clustered integers, the clusters and the base row, and check the way back."""
    cluster_R, base_I = assign_clusters(symbol_RI, ZERO)
    runs = split(subtract_base(symbol_RI, cluster_R, base_I, ZERO), cluster_R)
    restored_RI = join_clusters(runs, cluster_R, base_I, ZERO)
    assert (restored_RI == symbol_RI).all() and restored_RI.dtype == np.uint8
    return sum(rans.entropy_bits(np.bincount(run)) for run in runs) / 8, cluster_R, base_I


def plain(symbol_RI):
    return rans.entropy_bits(np.bincount(symbol_RI.ravel())) / 8


def test_rows_of_several_deviations_take_fewer_bytes():
    symbol_RI = rows(np.repeat([1.0, 4.0, 20.0], 400)[RNG.permutation(1200)])
    size, cluster_R, base_I = coded(symbol_RI)
    assert cluster_R.any() and size < 0.9 * plain(symbol_RI) and (base_I == ZERO).all()


def test_rows_close_to_one_row_are_coded_as_differences_from_it():
    symbol_RI = rows(np.full(600, 15.0))
    close = RNG.permutation(600)[:60]
    symbol_RI[close] = np.clip(symbol_RI[0] + RNG.integers(-1, 2, (60, 64)), 0, 2 * ZERO)
    size, cluster_R, _ = coded(symbol_RI)
    assert sorted({0, *close}) == np.flatnonzero(cluster_R == 0).tolist()
    assert size < plain(symbol_RI[cluster_R > 0]) + 61 * 64 * 1.7 / 8 < 0.97 * plain(symbol_RI)


def test_differences_wrap_around_at_the_number_of_symbols():
    symbol_RI = RNG.integers(0, 2 * 3 + 1, (90, 20)).astype(np.uint8)
    base_I = RNG.integers(0, 2 * 3 + 1, 20).astype(np.uint8)
    cluster_R = RNG.integers(0, 3, 90).astype(np.uint8)
    coded_RI = subtract_base(symbol_RI, cluster_R, base_I, 3)
    assert coded_RI.max() == 6 and (coded_RI != symbol_RI).any(1)[cluster_R == 0].all()
    assert (join_clusters(split(coded_RI, cluster_R), cluster_R, base_I, 3) == symbol_RI).all()


def test_rows_of_one_deviation_share_their_table():
    for symbol_RI in (rows(np.full(500, 5.0)), rows([3.0]), np.full((40, 8), ZERO, np.uint8)):
        _, cluster_R, base_I = coded(symbol_RI)
        assert not cluster_R.any() and (base_I == ZERO).all()
