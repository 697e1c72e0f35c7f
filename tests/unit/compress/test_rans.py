"""The entropy coder returns what it was given, near its entropy, and detects damage."""

import lzma

import brotli
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spider.checkpoints.compress import rans

RNG = np.random.default_rng(0)


def coded(*runs, symbols=255, lanes=None):
    tables = [rans.table(np.bincount(run, minlength=symbols)) for run in runs]
    lanes = lanes or rans.lanes_for(sum(map(len, runs)))
    return rans.encode(runs, tables, lanes), tables, lanes


def gaussian(count):
    return np.clip(np.round(RNG.normal(0, 2.4, count)) + 31, 0, 62).astype(np.uint8)


@pytest.mark.parametrize(
    "run",
    [np.array([7], np.uint8), np.full(5000, 3, np.uint8), RNG.integers(0, 255, 100_000).astype(np.uint8),
     gaussian(300_000)],
    ids=["one", "one symbol", "uniform", "gaussian"],
)  # fmt: skip
def test_decoding_returns_the_symbols_and_the_size_is_near_their_entropy(run):
    data, tables, lanes = coded(run)
    assert (rans.decode(data, [len(run)], tables, lanes)[0] == run).all()
    assert len(data) <= 1.003 * rans.entropy_bits(np.bincount(run)) / 8 + 5000


def test_it_is_smaller_than_general_compressors():
    run = gaussian(300_000)
    size = len(coded(run)[0])
    assert size < len(brotli.compress(run.tobytes(), quality=11))
    assert size < len(lzma.compress(run.tobytes(), preset=9 | lzma.PRESET_EXTREME))


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=300), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_runs_of_several_tables_share_a_stream(lists, lanes):
    runs = [np.array(run, np.uint8) for run in lists]
    data, tables, lanes = coded(*runs, symbols=21, lanes=lanes)
    found = rans.decode(data, [len(run) for run in runs], tables, lanes)
    assert all((a == b).all() for a, b in zip(found, runs, strict=True))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=255).filter(any))
def test_a_table_sums_to_its_total_and_holds_every_symbol_that_occurs(counts):
    frequencies = rans.table(np.array(counts))
    assert frequencies.sum(dtype=int) == rans.TOTAL and ((frequencies > 0) >= (np.array(counts) > 0)).all()


def test_damage_is_detected():
    run = gaussian(20_000)
    data, tables, lanes = coded(run, symbols=63)
    for wrong in (data[:-2], data + b"\0\0", data[:10]):
        with pytest.raises(ValueError, match=r"ends too soon|does not end where|too few"):
            rans.decode(wrong, [len(run)], tables, lanes)
    with pytest.raises(ValueError, match=r"table 0 sums to 16,383, not to 16,384"):
        rans.decode(data, [len(run)], [tables[0] - (np.arange(63) == tables[0].argmax())], lanes)
