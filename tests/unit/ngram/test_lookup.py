"""Windows, streams and generated texts have the same candidates, wherever they begin."""

from __future__ import annotations

import gc
import random
import shutil
import weakref

import numpy as np
import pytest

from spider.config.ngram import NgramConfig
from spider.data.loader import Loader
from spider.data.ngram import candidates
from spider.data.ngram.candidates import MAX_DISTANCE, history_of
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


def test_a_stream_in_pieces_has_the_candidates_of_the_whole(train, whole, lookup):
    tokens = train.read(0, train.tokens)
    rng = random.Random(0)
    lo = 0
    while lo < len(tokens):
        hi = min(len(tokens), lo + rng.choice([1, 2, 7, 60, 300]))
        assert np.array_equal(lookup.after(tokens, lo, hi), whole[lo:hi])
        assert np.array_equal(lookup.after(tokens[:hi], lo, hi), whole[lo:hi]), "later tokens are not read"
        lo = hi
    assert whole.any(1).mean() > 0.9


@pytest.mark.parametrize("largest", [1, 30, 2000])
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


def test_later_tokens_change_no_earlier_candidates(train, whole, lookup):
    tokens = train.read(0, train.tokens).copy()
    rng = np.random.default_rng(0)
    for t in [1, 50, 777, len(tokens) - 2]:
        changed = tokens.copy()
        changed[t:] = rng.integers(0, BYTES.size, len(tokens) - t)
        after = lookup.after(changed, 0, len(changed))
        assert np.array_equal(after[:t], whole[:t]) and not np.array_equal(after[t:], whole[t:])


def test_candidates_do_not_depend_on_earlier_documents(train, whole, lookup):
    tokens = train.read(0, train.tokens)
    begins = np.flatnonzero(tokens == BYTES.bos)
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(tokens)], strict=True):
        alone = lookup.after(tokens[begin:end], 0, end - begin)
        assert np.array_equal(alone, whole[begin:end])


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


def test_a_missing_index_of_documents_is_an_error_with_its_remedy(shards, lookup, tmp_path):
    own = shutil.copytree(shards, tmp_path / "shards")
    (own / "train/000.idx").unlink()
    with pytest.raises(ValueError, match=r"train/000\.idx: no index of documents; delete "):
        lookup.windows(Shards(own, "train"), np.array([3]), 8)


def test_shards_are_freed_after_their_documents_were_read(shards, lookup):
    view = Shards(shards, "train")
    lookup.windows(view, np.array([3]), 8)
    reference = weakref.ref(view)
    del view
    gc.collect()
    assert reference() is None


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


def test_the_first_document_alone_has_the_same_candidates_with_a_carry_over(train, whole, carrying):
    first = int(train.begins(0)[1])
    found = carrying.after(train.read(0, train.tokens), 0, first, 1 << 16)
    assert np.array_equal(found, whole[:first])


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


def test_a_carry_over_beyond_the_memory_is_refused(lookup):
    with pytest.raises(ValueError, match=r"carry_over: looking back on 1,000,000,000,000 bytes needs .* GB"):
        lookup.stream(10**12)


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


def test_text_between_windows_that_are_far_apart_is_not_read(tmp_path, lookup, monkeypatch):
    """The test counts the symbols that are added to the chains of a giant document, and the chains' bytes."""
    rng = random.Random(4)
    words = [text.decode() + " " for text in documents(500, seed=8) if text]
    giant = "".join(rng.choices(words, k=60_000))
    shards = make_shards(tmp_path, {"0": [giant], "1": ["short " * 9] * 20}, 0.01)
    view = Shards(shards, "train")
    begins = view.begins(0)
    begin = int(begins[np.argmax(np.diff([*begins.tolist(), len(view.maps[0])]))])
    added = []
    held = []
    extend_chain = candidates._extend_chain

    def counted(contexts, *arguments):
        added.append(len(contexts) / len(CONFIG.matches))
        held.append(sum(array.nbytes for array in arguments if isinstance(array, np.ndarray)))
        return extend_chain(contexts, *arguments)

    monkeypatch.setattr(candidates, "_extend_chain", counted)
    history = history_of(CONFIG)
    at = [9, 300_000, 300_060, 300_000 + history, 900_000, 900_040, 900_040]
    found = lookup.windows(view, begin + np.array(at), 60)
    assert len(giant) > 1_500_000
    assert sum(added) < 69 + (history + 60 + history + 60) + (history + 100) + 1
    assert max(held) < 60 * (2 * history + 120)
    tokens = view.read(begin, 1_000_000)
    for start, window in zip(at, found, strict=True):
        assert np.array_equal(window, lookup.after(tokens, start, start + 60)), start


# ----------------------------------------------------------------------------------------------- settings


def test_an_index_of_other_settings_is_an_error(indexes):
    other = CONFIG.model_copy(update={"contexts": [1, 2, 3, "words0", "words2"]})
    with pytest.raises(
        ValueError, match=r"split: counted with other settings than those of model\.ngram"
    ) as error:
        NgramLookup(open_index(indexes["split"]), other, BYTES)
    assert "contexts 1, 2, 3, 5, 9, words0, words2 instead of 1, 2, 3, words0, words2" in str(error.value)
    assert "counts the text anew" in str(error.value)
    same = CONFIG.model_copy(update={"matches": [3], "hidden": 99})
    NgramLookup(open_index(indexes["split"]), same, BYTES)
