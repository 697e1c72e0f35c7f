"""Windows, streams and generated texts have the same candidates, wherever they begin."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spider.config.model import NgramConfig
from spider.data.loader import Loader
from spider.data.ngram import candidates
from spider.data.ngram.candidates import MAX_DISTANCE
from spider.data.ngram.lookup import NgramLookup
from spider.data.ngram.store import open_index
from spider.data.shards import Shards
from spider.tokens import BYTES
from tests.unit.ngram.small_index import CONFIG, make_shards
from tests.unit.ngram.texts import documents


@pytest.fixture(scope="module")
def train(shards) -> Shards:
    return Shards(shards, "train")


@pytest.fixture(scope="module")
def whole(train, lookup) -> np.ndarray:
    """The candidates of the whole split, read at once."""
    return lookup.after(train.read(0, train.tokens), 0, train.tokens)


def ring(array: np.ndarray, start: int, length: int) -> np.ndarray:
    return array[np.arange(start, start + length) % len(array)]


@pytest.mark.parametrize("largest", [30, 2000])
def test_a_growing_stream_has_the_candidates_of_the_whole(train, whole, lookup, largest):
    """Pieces may hold several documents, and may be skipped."""
    tokens = train.read(0, train.tokens)
    rng = random.Random(largest)
    for skipped in (0.0, 0.5):
        stream = lookup.stream()
        lo = 0
        while lo < len(tokens):
            hi = min(len(tokens), lo + rng.randint(0, largest))
            if rng.random() < skipped:
                stream.read(tokens[lo:hi])
            else:
                assert np.array_equal(stream.extend(tokens[lo:hi]), whole[lo:hi]), lo
            lo = hi


def test_a_byte_takes_the_same_work_after_1000_and_after_60000(lookup, monkeypatch):
    """Work is the number of symbols that are added to the chains of the document."""
    added = []
    extend_chain = candidates._extend_chain

    def counted(contexts, *arguments):
        added.append(len(contexts))
        return extend_chain(contexts, *arguments)

    monkeypatch.setattr(candidates, "_extend_chain", counted)
    for before in (1000, 60_000):
        stream = lookup.stream()
        stream.read(BYTES.encode(b" ".join(documents(before // 10, 0))[:before])[:-1])
        stream.extend(np.array([ord(" ")], np.uint16))  # what is read without candidates waits for the next
        added.clear()
        for byte in b"the cat sat on":
            stream.extend(np.array([byte], np.uint16))
        assert sum(added) == 14 * len(CONFIG.matches), before


@pytest.mark.parametrize("length", [1, 16, 500])
def test_windows_in_any_order_have_the_streams_candidates_across_borders_and_the_end(
    train, whole, lookup, length
):
    borders = [*train.borders.tolist(), train.tokens - 1, train.tokens - length // 2]
    rng = np.random.default_rng(length)
    starts = np.array(
        [b + d for b in borders for d in (-1, 0, 1)] + rng.integers(0, train.tokens, 30).tolist()
    )
    starts = rng.permutation(starts % train.tokens)
    found = lookup.windows(train, starts, length)
    for start, window in zip(starts.tolist(), found, strict=True):
        assert np.array_equal(window, ring(whole, start, length)), start
        alone = lookup.windows(train, np.array([start]), length)[0]
        assert np.array_equal(alone, window), "other windows change nothing"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_loader_adds_candidates_and_gives_the_same_rows_as_without(train, whole, lookup, rank):
    """This holds in each of several processes."""
    share = {"seq_len": 32, "rows": 3, "seed": 5, "rank": rank, "world": 2}
    both = [Loader(train, lookup=either, **share) for either in (lookup, None)]
    for step in range(4):
        batch, plain = next(both[0]), next(both[1])
        assert np.array_equal(batch.rows_BT1, plain.rows_BT1) and plain.candidates_BTW is None
        assert batch.position == plain.position
        starts = both[0].starts(6 * step + 3 * rank + np.arange(3))
        assert np.array_equal(batch.candidates_BTW, [ring(whole, start, 32) for start in starts.tolist()])
    for loader in both:
        loader.close()


# ------------------------------------------------------------------------------------------- carry-over


class Always(NgramConfig):
    """Settings with which every window looks back."""

    CARRY_SHARE = 1.0


CARRYING = Always(**CONFIG.model_dump()).model_copy(update={"carry_over": 600})


@pytest.fixture(scope="module")
def carrying(indexes) -> NgramLookup:
    return NgramLookup(open_index(indexes["split"]), CARRYING, BYTES)


def test_a_stream_that_looks_back_is_the_same_wherever_it_begins(train, whole, carrying):
    tokens = train.read(0, train.tokens)
    stream = carrying.stream(600)
    read = np.concatenate([stream.extend(tokens[lo : lo + 97]) for lo in range(0, len(tokens), 97)])
    assert not np.array_equal(read, whole)
    for lo in (0, 5, 700, 1500, len(tokens) - 50):
        assert np.array_equal(carrying.after(tokens, lo, lo + 50, 600), read[lo : lo + 50]), lo
    distances = carrying.layout.views(read)[3][:, :-1, 1]
    assert distances.max() == round(8 * np.log2(601)), "no match is farther back than the carry-over"


def test_training_windows_look_back_within_their_shard(train, whole, carrying, indexes):
    starts = np.arange(0, train.tokens - 40, 117)
    windows = carrying.windows(train, starts, 40)
    for start, window in zip(starts.tolist(), windows, strict=True):
        shard, _, at, _ = train.document(start)
        size = min(40, len(train.maps[shard]) - at)
        expected = carrying.after(np.asarray(train.maps[shard]), at, at + size, 600)
        assert np.array_equal(window[:size], expected), start
    half = CONFIG.model_copy(update={"carry_over": 600})
    mixed = NgramLookup(open_index(indexes["split"]), half, BYTES).windows(train, starts, 40)
    alone = [np.array_equal(mixed[n], ring(whole, start, 40)) for n, start in enumerate(starts)]
    carried = [np.array_equal(one, other) for one, other in zip(mixed, windows, strict=True)]
    assert all(one or other for one, other in zip(alone, carried, strict=True))
    assert 0.1 < np.mean(carried) < 0.6


# ---------------------------------------------------------------------------------------- a long document


@pytest.fixture(scope="module")
def long_document(tmp_path_factory) -> Shards:
    """Each symbol at its end also stands `MAX_DISTANCE` before, some of them one nearer or farther."""
    rng = random.Random(3)
    block = "".join(rng.choices("abcdefghij ", k=MAX_DISTANCE))
    text = block + block[:500] + "-" + block[500:1000] + block[1001:1500]
    shards = make_shards(tmp_path_factory.mktemp("long"), {"0": [text] * 3, "1": ["short " * 9] * 20}, 0.01)
    return Shards(shards, "train")


def test_a_document_match_reaches_to_the_largest_distance_wherever_the_window_begins(long_document, lookup):
    tokens = long_document.read(0, long_document.tokens)
    begins = [*np.flatnonzero(tokens == BYTES.bos).tolist(), len(tokens)]
    begin = begins[int(np.argmax(np.diff(begins)))]
    size = MAX_DISTANCE + 1500
    whole = lookup.after(tokens[begin:], 0, size)
    for lo in (
        0,
        MAX_DISTANCE - 3,
        MAX_DISTANCE,
        MAX_DISTANCE + 1,
        MAX_DISTANCE + 2,
        MAX_DISTANCE + 7,
        MAX_DISTANCE + 13,
        MAX_DISTANCE + 490,
        MAX_DISTANCE + 1400,
    ):
        assert np.array_equal(lookup.after(tokens[begin:], lo, lo + 40), whole[lo : lo + 40]), lo
        window = lookup.windows(long_document, np.array([begin + lo]), 40)[0]
        assert np.array_equal(window, whole[lo : lo + 40]), lo
    matches = lookup.layout.views(whole)[3][:, -2]  # of the longest order
    far = [(MAX_DISTANCE + at) for at in (100, 300, 700, 1200)]
    assert matches[far, 0].tolist() == [1, 1, 0, 1] and matches[far[0], 1] == 128


# ----------------------------------------------------------------------------------------------- settings
