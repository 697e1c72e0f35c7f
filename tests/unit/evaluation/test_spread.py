"""Tests of `spider.evaluation.spread`: the bootstrap over documents, and the spread over groups."""

from __future__ import annotations

import numpy as np
import pytest

from spider.evaluation.spread import bootstrap_interval


def test_the_interval_is_that_of_resampled_documents() -> None:
    random = np.random.default_rng(1)
    bytes_D = random.integers(100, 16_000, size=92)
    bits_D = bytes_D * random.normal(1.2, 0.3, size=92)
    # The same in another way: counts of each document instead of its number.
    counts_RD = random.multinomial(92, np.full(92, 1 / 92), size=20_000)
    low, high = np.percentile(counts_RD @ bits_D / (counts_RD @ bytes_D), [2.5, 97.5])
    interval = bootstrap_interval(bits_D, bytes_D)
    assert interval == bootstrap_interval(bits_D, bytes_D)
    width = high - low
    assert interval == pytest.approx((low, high), abs=0.1 * width)


def test_the_interval_is_of_the_ratio_of_sums() -> None:
    bits_D, bytes_D = np.array([1.0, 8000.0]), np.array([100, 1000])
    assert bootstrap_interval(bits_D, bytes_D) == (0.01, 8.0)
    assert bootstrap_interval(2.5 * bytes_D, bytes_D) == (2.5, 2.5)


def test_one_document_has_no_interval() -> None:
    assert bootstrap_interval(np.array([5.0]), np.array([3])) is None
