"""Rows are clustered where that saves bytes, and are restored exactly."""

import numpy as np

from spider.checkpoints.compress import rans
from spider.checkpoints.compress.format import join_clusters
from spider.checkpoints.compress.writer import assign_clusters, split

RNG = np.random.default_rng(0)
ZERO = 127


def rows(deviations, width=64):
    values = RNG.normal(0, 1, (len(deviations), width)) * np.array(deviations)[:, None]
    return np.clip(np.round(values) + ZERO, 0, 2 * ZERO).astype(np.uint8)


def test_rows_of_several_deviations_take_fewer_bytes_and_come_back():
    symbol_RI = rows(np.repeat([1.0, 4.0, 20.0], 400)[RNG.permutation(1200)])
    cluster_R = assign_clusters(symbol_RI, ZERO)
    runs = split(symbol_RI, cluster_R)
    assert (join_clusters(runs, cluster_R) == symbol_RI).all()
    size, plain = (
        sum(rans.entropy_bits(np.bincount(run)) for run in of) for of in (runs, [symbol_RI.ravel()])
    )
    assert cluster_R.any() and size < 0.9 * plain


def test_rows_of_one_deviation_share_their_table():
    for symbol_RI in (rows(np.full(500, 5.0)), rows([3.0]), np.full((40, 8), ZERO, np.uint8)):
        assert not assign_clusters(symbol_RI, ZERO).any()
