"""Counts against a dictionary, and tables that do not depend on how a text was cut."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from spider.memory import table
from spider.memory.contexts import contexts_of, reach
from spider.memory.count import count, pieces, write_runs
from spider.memory.hashes import mixed, power, prefix_hashes
from spider.memory.propose import _look_up, _shift
from spider.memory.symbols import BEGIN, END
from tests.unit.memory.texts import (
    built_of,
    documents,
    followers,
    followers_of_words,
    q,
    symbols,
    words_before,
)

TEXTS = documents(60, seed=1)


def hash_of(context: bytes) -> int:
    """Of a context alone, whatever stood before it: 56 bits."""
    hashes = prefix_hashes(np.frombuffer(context, np.uint8))
    return int(mixed(hashes[0], hashes[-1], np.uint64(power(len(context))))) >> 8


def look_up(texts: list[bytes], order: int, built: tuple[np.ndarray, np.ndarray]) -> dict[int, list[int]]:
    """By place of the documents in a row: what the table says of the context before it."""
    text, (first, rows) = symbols(texts), built
    found = np.zeros((len(text), 1, rows.shape[1] - 2), np.uint8)
    contexts = contexts_of(text, prefix_hashes(text), order, 1, len(text) + 1)
    bounds = np.zeros((len(text), 2), np.int64)
    _look_up(contexts, _shift(len(first) - 1), first, rows, found, 0, bounds)
    return {i + 1: row.tolist() for i, row in enumerate(found[:, 0])}


def row_of(successors: Counter[int], per: int) -> list[int]:
    """What a table has to say of a context."""
    likely = sorted(successors.items(), key=lambda one: (-one[1], one[0]))[:per]
    pairs = [value for symbol, times in likely for value in (symbol, q(times))]
    return [q(successors.total()), q(len(successors)), *pairs, *[0] * (2 * per - len(pairs))]


@pytest.mark.parametrize("order", range(1, 23))
def test_counts_are_those_of_a_dictionary(order):
    keys, counts = count(symbols(TEXTS), order)
    expected = {
        (hash_of(context) << 8) + symbol: times
        for context, found in followers(TEXTS, order).items()
        for symbol, times in found.items()
    }
    assert np.all(keys[1:] > keys[:-1])
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == expected


@pytest.mark.parametrize("words", [0, 1, 2, 4])
def test_counts_of_words_are_those_of_a_dictionary(words):
    texts = [
        *TEXTS,
        b"One, two;\n  THREE_3 one   two",
        b"x" * 40 + b" one two, one",
        "né NÉ né".encode(),
        b"  , ",
    ]
    _, counts = count(symbols(texts), ~words)
    expected = [times for found in followers_of_words(texts, words).values() for times in found.values()]
    assert sorted(counts.tolist()) == sorted(expected) and len(expected) > 100


def test_contexts_of_words_are_equal_where_the_words_are():
    text = symbols([b"The cat, \n sat on a mat. the  cat\tsat_on a dog " + b"y" * 33 + b" the cat sat"])
    whole = text.tobytes()
    for words in (0, 1, 2):
        hashed = contexts_of(text, prefix_hashes(text), ~words, 0, len(text))
        told = [words_before(whole[:i], words) if i else None for i in range(len(text))]
        assert [known is None for known in told] == [one == 0 for one in hashed.tolist()]
        by_context = {}
        for known, one in zip(told, hashed.tolist(), strict=True):
            assert by_context.setdefault(known, one) == one, known
        assert len(set(by_context.values())) == len(by_context)


@pytest.mark.parametrize("words", [0, 1, 3])
def test_contexts_of_words_depend_on_no_more_than_they_reach(words):
    draw = np.random.default_rng(words)
    letters = np.frombuffer(b"ab cd,\n", np.uint8)
    text = np.concatenate(
        [symbols([draw.choice(letters, 2000).tobytes() + b"z" * 50]), *[draw.choice(letters, 500)]]
    )
    whole = contexts_of(text, prefix_hashes(text), ~words, 0, len(text))
    for lo in (0, 1, 500, 1990, 2060, 2100):
        assert np.array_equal(contexts_of(text, prefix_hashes(text), ~words, lo, len(text)), whole[lo:])
        begin = max(0, lo - reach(words))
        part = text[begin:]
        cut = contexts_of(part, prefix_hashes(part), ~words, lo - begin, len(part))
        assert np.array_equal(cut, whole[lo:]), lo


def test_nothing_is_counted_before_the_first_document_and_nothing_of_no_text():
    """A part may be empty; and what stands before a beginning is no document."""
    assert [len(one) for one in count(np.zeros(0, np.uint8), 3)] == [0, 0]
    cut = np.concatenate([np.frombuffer(b"a tail of another", np.uint8), symbols(TEXTS[:3])])
    for a, b in zip(count(cut, 2), count(symbols(TEXTS[:3]), 2), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("size", [1, 50, 300, 10**6])
def test_pieces_are_the_text_cut_where_documents_begin(size):
    text = symbols(TEXTS)
    cut = list(pieces(text, size))
    assert np.array_equal(np.concatenate(cut), text)
    assert all(piece[0] == BEGIN and len(piece) >= size for piece in cut[:-1]) and cut[-1][0] == BEGIN
    assert len(cut) == {1: 60, 10**6: 1}.get(size, len(cut))


@pytest.mark.parametrize("order", [1, 2, 4, 9, 16, ~1])
@pytest.mark.parametrize("parts", [2, 5])
def test_tables_of_a_text_in_parts_pieces_and_slices_are_those_of_it_whole(order, parts):
    least = 2 if order >= 9 else 1
    whole = built_of([count(symbols(TEXTS), order)], order, least)
    for piece, slice_ in [(1, 16), (100, 64), (700, 1 << 24)]:
        runs = [
            count(cut, order)
            for part in range(parts)
            for cut in pieces(symbols(TEXTS[60 * part // parts : 60 * (part + 1) // parts]), piece)
        ]
        first, rows, left_out = built_of(runs, order, least, slice_)
        assert left_out == whole[2]
        assert first.tobytes() == whole[0].tobytes() and rows.tobytes() == whole[1].tobytes()
        again = built_of(runs[::-1], order, least, slice_)
        assert again[1].tobytes() == rows.tobytes(), "runs are added up in any order"


def test_runs_on_disk_do_not_depend_on_threads(tmp_path):
    for threads in (1, 3):
        (tmp_path / f"{threads}").mkdir()
        write_runs(symbols(TEXTS), [1, 3, 9, ~1], tmp_path / f"{threads}", threads, piece=200)
    one, three = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("1", "3"))
    assert one == three and len(one) > 4 * 2 * 3 and {"9.001.counts.npy", "words1.000.keys.npy"} <= set(one)


# ------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5, 8, 9, 12, 22])
@pytest.mark.parametrize("least", [1, 2])
def test_a_table_has_each_context_its_likeliest_successors_in_order_and_all_else_left_out(order, least):
    known = followers(TEXTS, order)
    first, rows, left_out = built_of([count(symbols(TEXTS), order)], order, least)
    often = {context for context, found in known.items() if found.total() >= least}
    assert (len(rows), left_out) == (len(often), len(known) - len(often)) and first[-1] == len(rows)
    text, found = symbols(TEXTS).tobytes(), look_up(TEXTS, order, (first, rows))
    kept = absent = noise = 0
    for i in range(order, len(text)):
        context = text[i - order : i]
        if context in often:
            kept += 1
            assert found[i] == row_of(known[context], table.successors(order)), context
        else:
            absent += 1
            noise += any(found[i])
    assert kept and noise <= 1 + absent / 1000


def test_a_context_that_does_not_occur_is_nearly_never_found():
    others = [bytes(draw) for draw in np.random.default_rng(0).integers(1, 250, (20, 1000), np.uint8)]
    built = built_of([count(symbols(TEXTS), 5)], 5, 1)
    found = look_up(others, 5, built[:2])
    taken = np.mean([any(row) for row in found.values()])
    assert taken < 4 * 8 / 65536


def test_equals_stand_in_the_order_of_their_symbols_and_counts_are_of_all():
    texts = [b"x" + bytes([symbol]) for symbol in b"qponmlkjihgfedcba"] + [b"xz", b"xz"]
    found = look_up(texts, 5, built_of([count(symbols(texts), 5)], 5, 1)[:2])
    assert not any(any(row) for row in found.values()), "no document is so long"
    order_1 = look_up(texts, 1, built_of([count(symbols(texts), 1)], 1, 1)[:2])
    assert order_1[2][:8] == [q(19), q(18), ord("z"), q(2), ord("a"), q(1), ord("b"), q(1)]
    order_2 = look_up(texts, 2, built_of([count(symbols(texts), 2)], 2, 1)[:2])
    assert order_2[2][:4] == [q(19), q(18), ord("z"), q(2)]


# ------------------------------------------------------------------------------------------ last places


def test_last_places_are_the_last_after_the_same_symbols():
    last, expected, at = table.last_places(symbols(TEXTS), 12), {}, 0
    for text in TEXTS:
        document = bytes([BEGIN, *text, END])
        for i in range(table.MATCHED, len(document)):
            # Who shares the top bits of a hash with an earlier one takes its place.
            expected[hash_of(document[i - table.MATCHED : i]) >> (56 - 12)] = at + i + 1
        at += len(document)
    assert {bucket: place for bucket, place in enumerate(last.tolist()) if place} == expected
    assert 1000 < len(expected) < 4096
