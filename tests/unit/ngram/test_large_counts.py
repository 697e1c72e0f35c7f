"""Tables of texts far larger than a test can count, from made-up counts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spider.data.ngram.table import quantized, write_first
from tests.unit.ngram.texts import built_of

#: The most occurrences that a run on disk can hold for one pair.
MOST = 2**32 - 1


def stored(count: int) -> int:
    """Return the byte that a table has for a count: 8 log2(1 + count), rounded, at most 255."""
    return min(255, round(8 * math.log2(1 + count)))


def run_of(counts: dict[bytes, int], context: int = 0x1234567) -> tuple[np.ndarray, np.ndarray]:
    """Return a run of one context, from the number of times that each symbol follows it."""
    symbols = sorted(symbol[0] for symbol in counts)
    keys = np.array([context << 8 | symbol for symbol in symbols], np.uint64)
    return keys, np.array([counts[bytes([symbol])] for symbol in symbols], np.uint32)


@pytest.mark.parametrize(
    "count", [0, 1, 255, 10**6, 4_100_000_000, 4_200_000_000, MOST, 8_400_000_000, 10**15]
)
def test_a_count_of_any_size_fits_its_byte(count):
    assert quantized(count) == stored(count)


@pytest.mark.parametrize("runs", [1, 2, 7])
def test_counts_of_many_runs_are_added_without_overflow(runs):
    """Two runs of 2^31 would add to 0 in 32 bits, and a total of 8.4e9 would be 8 in a byte (264 - 256)."""
    counts = {b"a": 2**31, b"b": 5, b"c": 2**31 - 1}
    first, rows, left_out = built_of([run_of(counts)] * runs, 5, 1)
    total = runs * sum(counts.values())
    pairs = [(b"a", runs * 2**31), (b"c", runs * (2**31 - 1)), (b"b", runs * 5)]
    expected = [stored(total), stored(3), *(v for symbol, times in pairs for v in (symbol[0], stored(times)))]
    assert (first[-1], left_out) == (1, 0)
    assert rows[0, 2 : 2 + len(expected)].tolist() == expected


def test_the_more_frequent_successor_comes_first_though_both_exceed_32_bits():
    runs = [run_of({b"a": MOST, b"z": MOST}), run_of({b"a": 1, b"z": 2})]
    _, rows, _ = built_of(runs, 5, 1)
    assert rows[0, 2:8].tolist() == [255, stored(2), ord("z"), 255, ord("a"), 255]


@pytest.mark.parametrize("last", [2, 3])
def test_rows_are_numbered_in_as_many_bits_as_they_need(tmp_path, last):
    """Buckets have two thousand million rows, and 32 bits hold numbers up to 2^32 - 1."""
    buckets = [2**31, 2**31 - 3, 0, last]
    for block in (1, 3, 4):
        blocks = (np.array(buckets[i : i + block], np.int64) for i in range(0, 4, block))
        write_first(tmp_path / "first.npy", blocks, sum(buckets))
        first = np.load(tmp_path / "first.npy")
        assert first.tolist() == [0, 2**31, 2**32 - 3, 2**32 - 3, 2**32 - 3 + last]
        assert first.dtype == (np.uint32 if last == 2 else np.int64)
