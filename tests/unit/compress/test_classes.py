"""Rows are dealt into classes where that saves, and come back as they were."""

import numpy as np

from spider.compress import rans
from spider.compress.classes import dealt, joined, split

DRAW = np.random.default_rng(0)


def rows(spreads, width=64):
    values = DRAW.normal(0, 1, (len(spreads), width)) * np.array(spreads)[:, None]
    return np.clip(np.round(values) + 127, 0, 254).astype(np.uint8)


def test_rows_of_several_spreads_are_coded_shorter_and_come_back():
    symbol_RI = rows(np.repeat([1.0, 4.0, 20.0], 400)[DRAW.permutation(1200)])
    class_R = dealt(symbol_RI, 127)
    count = int(class_R.max()) + 1
    runs = split(symbol_RI, class_R, count)
    assert count > 1 and (joined(runs, class_R, 64) == symbol_RI).all()
    apart = sum(rans.bits(np.bincount(run)) for run in runs)
    assert apart < 0.9 * rans.bits(np.bincount(symbol_RI.ravel()))


def test_rows_of_one_spread_share_their_table():
    assert not dealt(rows(np.full(500, 5.0)), 127).any()
    assert not dealt(rows([3.0]), 127).any() and not dealt(np.full((40, 8), 127, np.uint8), 127).any()
