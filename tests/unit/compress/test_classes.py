"""Rows are dealt into classes where that saves, and come back as they were."""

import numpy as np

from spider.compress import rans
from spider.compress.classes import back, dealt, joined, less, split

DRAW = np.random.default_rng(0)
REACH = 127


def rows(spreads, width=64):
    values = DRAW.normal(0, 1, (len(spreads), width)) * np.array(spreads)[:, None]
    return np.clip(np.round(values) + REACH, 0, 2 * REACH).astype(np.uint8)


def coded(symbol_RI):
    """Bytes of the integers, classed; they come back."""
    class_R, base_I = dealt(symbol_RI, REACH)
    runs = split(less(symbol_RI, class_R, base_I, REACH), class_R)
    again = back(joined(runs, class_R, symbol_RI.shape[1]), class_R, base_I, REACH)
    assert (again == symbol_RI).all() and again.dtype == np.uint8
    return sum(rans.bits(np.bincount(run)) for run in runs) / 8, class_R, base_I


def plain(symbol_RI):
    return rans.bits(np.bincount(symbol_RI.ravel())) / 8


def test_rows_of_several_spreads_are_coded_shorter():
    symbol_RI = rows(np.repeat([1.0, 4.0, 20.0], 400)[DRAW.permutation(1200)])
    size, class_R, base_I = coded(symbol_RI)
    assert class_R.any() and size < 0.9 * plain(symbol_RI) and (base_I == REACH).all()


def test_rows_near_one_are_coded_against_it():
    symbol_RI, near = rows(np.full(600, 15.0)), DRAW.permutation(600)[:60]
    symbol_RI[near] = np.clip(symbol_RI[0] + DRAW.integers(-1, 2, (60, 64)), 0, 2 * REACH)
    size, class_R, _ = coded(symbol_RI)
    assert sorted({0, *near}) == np.flatnonzero(class_R == 0).tolist()
    assert size < plain(symbol_RI[class_R > 0]) + 61 * 64 * 1.7 / 8 < 0.97 * plain(symbol_RI)


def test_a_difference_goes_round_the_alphabet():
    symbol_RI, base_I = (DRAW.integers(0, 2 * 3 + 1, shape).astype(np.uint8) for shape in ((90, 20), (20,)))
    class_R = DRAW.integers(0, 3, 90).astype(np.uint8)
    coded_RI = less(symbol_RI, class_R, base_I, 3)
    assert coded_RI.max() == 6 and (coded_RI != symbol_RI).any(1)[class_R == 0].all()
    assert (back(coded_RI, class_R, base_I, 3) == symbol_RI).all()


def test_rows_of_one_spread_share_their_table():
    for symbol_RI in (rows(np.full(500, 5.0)), rows([3.0]), np.full((40, 8), REACH, np.uint8)):
        _, class_R, base_I = coded(symbol_RI)
        assert not class_R.any() and (base_I == REACH).all()
