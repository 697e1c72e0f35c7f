"""Counts equal those of a dictionary, and tables do not depend on how a text was cut."""

from __future__ import annotations

import os
import resource
from collections import Counter

import numpy as np
import pytest

from spider.config.model import STRUCTURES, kind_of
from spider.data.ngram import table
from spider.data.ngram.candidates import _read_rows, _shift
from spider.data.ngram.contexts import contexts_of, mixed, power, prefix_hashes, reach
from spider.data.ngram.layout import BEGIN, END
from spider.data.ngram.table import count, merge, runs_of, stretches, write_runs
from tests.unit.ngram.texts import built_of, context_before, documents, followers, last_of, q, symbols

TEXTS = documents(60, seed=1)


def hash_of(context: bytes) -> int:
    """Return the hash of a context, 56 bits."""
    hashes = prefix_hashes(np.frombuffer(context, np.uint8))
    return int(mixed(hashes[0], hashes[-1], np.uint64(power(len(context))))) >> 8


def look_up(texts: list[bytes], order: int, built: tuple[np.ndarray, np.ndarray]) -> dict[int, list[int]]:
    """Return the row of the context before each position of the concatenated documents."""
    text = symbols(texts)
    first, rows = built
    found = np.zeros((len(text), 1, rows.shape[1] - 2), np.uint8)
    contexts = contexts_of(text, prefix_hashes(text), order, 1, len(text) + 1)
    bounds = np.zeros((len(text), 2), np.int64)
    _read_rows(contexts, _shift(len(first) - 1), first, rows, found, 0, bounds)
    return {i + 1: row.tolist() for i, row in enumerate(found[:, 0])}


def row_of(successors: Counter[int], per: int) -> list[int]:
    """Return the row that a table must have for a context."""
    frequent = sorted(successors.items(), key=lambda pair: (-pair[1], pair[0]))[:per]
    pairs = [value for symbol, times in frequent for value in (symbol, q(times))]
    return [q(successors.total()), q(len(successors)), *pairs, *[0] * (2 * per - len(pairs))]


@pytest.mark.parametrize("order", [1, 2, 3, 5, 9, 16, 22])
def test_counts_are_those_of_a_dictionary(order):
    keys, counts = count(symbols(TEXTS), order)
    expected = {
        (hash_of(context) << 8) + symbol: times
        for context, found in followers(TEXTS, order).items()
        for symbol, times in found.items()
    }
    assert np.all(keys[1:] > keys[:-1])
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == expected


LINES = b"def one(a, b):\n    x = 1\n        y = 2\n\nname   value   12\nother  thing   77\n"
LINES += b"w" * 300 + b"\n  end\n"
WORDS = b"The cat, \n sat on a mat. the  cat\tsat_on a dog " + b"y" * 33 + " the cat sat NÉ né".encode()


@pytest.mark.parametrize("name", ["words0", "words1", "words3", *STRUCTURES])
def test_contexts_are_equal_if_their_symbols_or_words_are(name):
    text = symbols([LINES * 2, b"", b"  short", WORDS, LINES])
    kind, whole = kind_of(name), text.tobytes()
    hashed = contexts_of(text, prefix_hashes(text), kind, 1, len(text))
    begins = np.maximum.accumulate(np.where(text == BEGIN, np.arange(len(text)), 0))
    contexts = [context_before(whole[begins[i - 1] : i], name) for i in range(1, len(text))]
    assert [context is None for context in contexts] == [value == 0 for value in hashed.tolist()]
    by_context = {}
    for context, value in zip(contexts, hashed.tolist(), strict=True):
        assert by_context.setdefault(context, value) == value, context
    assert len(set(by_context.values())) == len(by_context) > 20
    for lo in range(1, len(text), 41):  # They depend on the symbols within their reach.
        begin = max(0, lo - reach(kind))
        part = text[begin:]
        cut = contexts_of(part, prefix_hashes(part), kind, lo - begin, len(part))
        assert np.array_equal(cut, hashed[lo - 1 :]), lo


def counted(folder, text, kinds, piece):
    """Count a text on disk and return its runs as arrays, by kind of context."""
    folder.mkdir()
    np.save(folder / "text.npy", text)
    write_runs(folder, kinds, piece)
    counts = lambda keys: keys.with_name(keys.name.replace("keys", "counts"))  # noqa: E731
    return {kind: [(np.load(run), np.load(counts(run))) for run in runs_of(folder, kind)] for kind in kinds}


def test_an_empty_text_and_text_before_the_first_document_are_not_counted(tmp_path):
    """A part may be empty, and may begin in the middle of a document."""
    assert counted(tmp_path / "none", np.zeros(0, np.uint8), [3], 100) == {3: []}
    tail = np.frombuffer(b"a tail of another", np.uint8)
    assert counted(tmp_path / "tail", tail, [3], 5) == {3: []}
    whole = count(symbols(TEXTS[:3]), 2)
    for piece in (7, 10**6):
        cut = counted(tmp_path / f"{piece}", np.concatenate([tail, symbols(TEXTS[:3])]), [2], piece)[2]
        for a, b in zip(merge(cut), whole, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(("size", "back"), [(1, 3), (50, 0), (50, 400), (10**6, 3)])
def test_stretches_join_to_the_text_and_carry_the_symbols_before_them(tmp_path, size, back):
    text = symbols(TEXTS)
    np.save(tmp_path / "text.npy", text)
    cut = list(stretches(tmp_path / "text.npy", back, size))
    assert np.array_equal(np.concatenate([stretch.text[stretch.before :] for stretch in cut]), text)
    for stretch in cut:
        assert stretch.before == min(back, stretch.at) and len(stretch.text) <= back + size
        assert np.array_equal(stretch.text, text[stretch.at - stretch.before : stretch.at + size])


@pytest.mark.parametrize(("order", "parts"), [(1, 2), (4, 5), (9, 2), (~1, 3)])
def test_tables_do_not_depend_on_parts_pieces_and_slices(tmp_path, order, parts):
    """Pieces end inside documents, and many runs are merged in groups, with few files open at once."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    least = 2 if order >= 9 else 1
    whole = built_of([count(symbols(TEXTS), order)], order, least)
    for piece, slice_, most in [(40, 16, 3), (100, 64, 8), (700, 1 << 24, 2), (1 << 20, 8, 64)]:
        runs = [
            run
            for part in range(parts)
            for run in counted(
                tmp_path / f"{piece}-{part}",
                symbols(TEXTS[60 * part // parts : 60 * (part + 1) // parts]),
                [order],
                piece,
            )[order]
        ]
        first, rows, left_out = built_of(runs, order, least, size=slice_, most=most)
        assert left_out == whole[2]
        assert first.tobytes() == whole[0].tobytes() and rows.tobytes() == whole[1].tobytes()
        again = built_of(runs[::-1], order, least, size=slice_, most=most)
        assert again[1].tobytes() == rows.tobytes(), "runs can be added in any order"
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(("order", "least"), [(1, 1), (3, 2), (4, 1), (9, 2), (22, 1)])
def test_a_table_has_the_most_frequent_successors_of_each_context_in_order(order, least):
    expected = followers(TEXTS, order)
    first, rows, left_out = built_of([count(symbols(TEXTS), order)], order, least)
    often = {context for context, found in expected.items() if found.total() >= least}
    assert (len(rows), left_out) == (len(often), len(expected) - len(often)) and first[-1] == len(rows)
    text = symbols(TEXTS).tobytes()
    found = look_up(TEXTS, order, (first, rows))
    kept = absent = noise = 0
    for i in range(order, len(text)):
        context = text[i - order : i]
        if context in often:
            kept += 1
            assert found[i] == row_of(expected[context], table.successors(order)), context
        else:
            absent += 1
            noise += any(found[i])
    assert kept and noise <= 1 + absent / 1000


# --------------------------------------------------------------------------------------- last positions


def test_last_positions_are_the_last_after_the_same_symbols():
    """They do not depend on the size of blocks and pieces."""
    last = last_of(symbols(TEXTS), 12)
    expected = {}
    at = 0
    for text in TEXTS:
        document = bytes([BEGIN, *text, END])
        for i in range(table.MATCH_LENGTH, len(document)):
            # A later position replaces an earlier one with the same top bits of the hash.
            expected[hash_of(document[i - table.MATCH_LENGTH : i]) >> (56 - 12)] = at + i + 1
        at += len(document)
    assert {entry: position for entry, position in enumerate(last.tolist()) if position} == expected
    assert 1000 < len(expected) < 4096
    for size, piece in [(1 << 10, 1 << 20), (1 << 12, 5), (1 << 11, 100)]:
        assert np.array_equal(last_of(symbols(TEXTS), 12, size=size, piece=piece), last)


def test_the_text_is_read_once_for_all_blocks(monkeypatch):
    begun = []
    read = table.stretches
    monkeypatch.setattr(table, "stretches", lambda *given: begun.append(1) or read(*given))
    blocks = [last_of(symbols(TEXTS), 12, size=1 << 6, piece=1000), last_of(symbols(TEXTS), 12)]
    assert np.array_equal(*blocks) and len(begun) == 2, "64 blocks, and one"


def test_positions_that_32_bits_cannot_hold_are_left_out(monkeypatch):
    text = symbols(TEXTS)
    most = len(text) // 3
    expected = last_of(text[:most], 12)
    monkeypatch.setattr(table, "_POSITIONS", most)
    assert (
        np.array_equal(last_of(text, 12, size=1 << 10, piece=1000), expected) and 0 < expected.max() <= most
    )
