"""Windows, streams and texts being written are proposed the same, wherever they begin."""

from __future__ import annotations

import gc
import random
import shutil
import weakref

import numpy as np
import pytest

from spider.data.loader import Loader
from spider.data.shards import Shards
from spider.ngram import candidates
from spider.ngram.candidates import BACK, REACH
from spider.ngram.lookup import NgramLookup
from spider.ngram.store import open_index
from spider.tokens import BYTES
from tests.unit.ngram.small_index import CONFIG, make_shards
from tests.unit.ngram.texts import documents


@pytest.fixture(scope="module")
def train(shards) -> Shards:
    return Shards(shards, "train")


@pytest.fixture(scope="module")
def whole(train, lookup) -> np.ndarray:
    """Of the whole ring, at once."""
    return lookup.after(train.read(0, train.tokens), 0, train.tokens)


def ring(array: np.ndarray, start: int, length: int) -> np.ndarray:
    return array[np.arange(start, start + length) % len(array)]


def test_a_stream_is_proposed_piece_by_piece_as_at_once(train, whole, lookup):
    tokens = train.read(0, train.tokens)
    rng, lo = random.Random(0), 0
    while lo < len(tokens):
        hi = min(len(tokens), lo + rng.choice([1, 2, 7, 60, 300]))
        assert np.array_equal(lookup.after(tokens, lo, hi), whole[lo:hi])
        assert np.array_equal(lookup.after(tokens[:hi], lo, hi), whole[lo:hi]), "what comes later is not read"
        lo = hi
    assert whole.any(1).mean() > 0.9


@pytest.mark.parametrize("largest", [1, 30, 2000])
def test_a_stream_that_grows_has_the_candidates_of_the_whole_pass(train, whole, lookup, largest):
    """With pieces that hold several documents, and with some that are skipped."""
    tokens, rng = train.read(0, train.tokens), random.Random(largest)
    for skipped in (0.0, 0.5):
        stream, lo = lookup.stream(), 0
        while lo < len(tokens):
            hi = min(len(tokens), lo + rng.randint(0, largest))
            if rng.random() < skipped:
                stream.skip(tokens[lo:hi])
            else:
                assert np.array_equal(stream.extend(tokens[lo:hi]), whole[lo:hi]), lo
            lo = hi


@pytest.mark.parametrize("length", [1, 16, 500])
def test_windows_are_the_stream_in_any_order_over_borders_and_the_end_of_the_ring(
    train, whole, lookup, length
):
    borders = [*train.borders.tolist(), train.tokens - 1, train.tokens - length // 2]
    rng = np.random.default_rng(length)
    starts = np.array(
        [b + d for b in borders for d in (-1, 0, 1)] + rng.integers(0, train.tokens, 30).tolist()
    )
    starts = rng.permutation(starts % train.tokens)
    found = lookup.windows(train, starts, length)
    for start, one in zip(starts.tolist(), found, strict=True):
        assert np.array_equal(one, ring(whole, start, length)), start
        assert np.array_equal(lookup.windows(train, np.array([start]), length)[0], one), (
            "alone as with others"
        )


def test_what_comes_later_changes_no_proposal_before(train, whole, lookup):
    tokens, rng = train.read(0, train.tokens).copy(), np.random.default_rng(0)
    for t in [1, 50, 777, len(tokens) - 2]:
        changed = tokens.copy()
        changed[t:] = rng.integers(0, BYTES.size, len(tokens) - t)
        after = lookup.after(changed, 0, len(changed))
        assert np.array_equal(after[:t], whole[:t]) and not np.array_equal(after[t:], whole[t:])


def test_a_document_knows_nothing_of_those_before_it(train, whole, lookup):
    tokens = train.read(0, train.tokens)
    begins = np.flatnonzero(tokens == BYTES.bos)
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(tokens)], strict=True):
        alone = lookup.after(tokens[begin:end], 0, end - begin)
        assert np.array_equal(alone, whole[begin:end])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_loader_gives_each_row_its_proposals_and_the_rows_that_it_would_give_without(
    train, whole, lookup, rank
):
    """In every one of several processes."""
    share = {"seq_len": 32, "rows": 3, "seed": 5, "rank": rank, "world": 2}
    both = [Loader(train, lookup=one, **share) for one in (lookup, None)]
    for step in range(4):
        batch, plain = next(both[0]), next(both[1])
        assert np.array_equal(batch.rows_BT1, plain.rows_BT1) and plain.candidates_BTW is None
        assert batch.position == plain.position
        starts = both[0].starts(6 * step + 3 * rank + np.arange(3))
        assert np.array_equal(batch.candidates_BTW, [ring(whole, start, 32) for start in starts.tolist()])
    for loader in both:
        loader.close()


def test_without_an_index_of_documents_it_is_named_and_what_to_do(shards, lookup, tmp_path):
    own = shutil.copytree(shards, tmp_path / "shards")
    (own / "train/000.idx").unlink()
    with pytest.raises(
        ValueError, match=r"train/000\.idx: no index of documents, which an n-gram index needs; encode th"
    ):
        lookup.windows(Shards(own, "train"), np.array([3]), 8)


def test_a_view_of_shards_is_let_go_though_its_documents_were_looked_at(shards, lookup):
    view = Shards(shards, "train")
    lookup.windows(view, np.array([3]), 8)
    known = weakref.ref(view)
    del view
    gc.collect()
    assert known() is None


# ---------------------------------------------------------------------------------------- a long document


@pytest.fixture(scope="module")
def long_document(tmp_path_factory) -> Shards:
    """One in which every symbol stood `REACH` before as well, and some of them nearer or farther by one."""
    draw = random.Random(3)
    block = "".join(draw.choices("abcdefghij ", k=REACH))
    text = block + block[:500] + "-" + block[500:1000] + block[1001:1500]
    shards = make_shards(tmp_path_factory.mktemp("long"), {"0": [text] * 3, "1": ["short " * 9] * 20}, 0.01)
    return Shards(shards, "train")


def test_a_pointer_reaches_so_far_and_no_farther_wherever_the_window_begins(long_document, lookup):
    tokens = long_document.read(0, long_document.tokens)
    begins = [*np.flatnonzero(tokens == BYTES.bos).tolist(), len(tokens)]
    begin = begins[int(np.argmax(np.diff(begins)))]
    size = REACH + 1500
    whole = lookup.after(tokens[begin:], 0, size)
    for lo in (0, REACH - 3, REACH, REACH + 1, REACH + 2, REACH + 7, REACH + 13, REACH + 490, REACH + 1400):
        assert np.array_equal(lookup.after(tokens[begin:], lo, lo + 40), whole[lo : lo + 40]), lo
        window = lookup.windows(long_document, np.array([begin + lo]), 40)[0]
        assert np.array_equal(window, whole[lo : lo + 40]), lo
    seen = lookup.layout.views(whole)[3][:, -2]  # of the longest order
    far = [(REACH + at) for at in (100, 300, 700, 1200)]
    assert seen[far, 0].tolist() == [1, 1, 0, 1] and seen[far[0], 1] == 128


def test_what_lies_between_windows_far_apart_is_not_read(tmp_path, lookup, monkeypatch):
    """Windows of one giant document: the symbols that are indexed and the index that is held are counted."""
    draw = random.Random(4)
    words = [text.decode() + " " for text in documents(500, seed=8) if text]
    giant = "".join(draw.choices(words, k=60_000))
    shards = make_shards(tmp_path, {"0": [giant], "1": ["short " * 9] * 20}, 0.01)
    view = Shards(shards, "train")
    begins = view.begins(0)
    begin = int(begins[np.argmax(np.diff([*begins.tolist(), len(view.maps[0])]))])
    indexed, held, real = [], [], candidates._index

    def counted(*arguments):
        indexed.append(arguments[-1] - arguments[-2])
        held.append(sum(one.nbytes for one in arguments if isinstance(one, np.ndarray)))
        return real(*arguments)

    monkeypatch.setattr(candidates, "_index", counted)
    at = [9, 300_000, 300_060, 300_000 + BACK, 900_000, 900_040, 900_040]
    found = lookup.windows(view, begin + np.array(at), 60)
    assert len(giant) > 1_500_000
    assert sum(indexed) < 69 + (BACK + 60 + BACK + 60) + (BACK + 100) + 1
    assert max(held) < 300 * (2 * BACK + 120)
    tokens = view.read(begin, 1_000_000)
    for start, window in zip(at, found, strict=True):
        assert np.array_equal(window, lookup.after(tokens, start, start + 60)), start


# ----------------------------------------------------------------------------------------------- settings


def test_an_index_of_other_settings_is_refused(indexes):
    other = CONFIG.model_copy(update={"orders": [1, 2, 3]})
    with pytest.raises(
        ValueError, match=r"ngram: counted with other settings than model\.ngram has"
    ) as error:
        NgramLookup(open_index(indexes["split"]), other, BYTES)
    assert "it has contexts of 1, 2, 3, 5, 9, words0, words2, asked for are 1, 2, 3, words0, words2" in str(
        error.value
    )
    assert "run its jobs again" in str(error.value)
    NgramLookup(
        open_index(indexes["split"]), CONFIG.model_copy(update={"match_orders": [3], "hidden": 99}), BYTES
    )
