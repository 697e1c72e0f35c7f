"""Candidates against a slow reference, and what they may depend on: the document so far, and nothing else."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from spider.ngram import candidates as module
from spider.ngram.candidates import BACK, HELD, LONGEST, REACH, Document
from spider.ngram.layout import BEGIN, END, Layout
from spider.ngram.table import MATCHED, successors
from tests.unit.ngram.texts import documents, followers, q, symbols, tables_of

ORDERS, RARE, MATCH_ORDERS = [1, 2, 3, 5, 9], 9, [2, 3, 6, 11]
TEXTS = documents(40, seed=2)
TABLES = tables_of(TEXTS, ORDERS, RARE)


def proposed(document: np.ndarray, candidates: int = 16) -> tuple[np.ndarray, Layout]:
    """Return the candidates after each symbol of a document that is read at once, and their layout."""
    layout = Layout(len(ORDERS), len(MATCH_ORDERS) + 1, candidates)
    out = np.zeros((len(document), layout.width), np.uint8)
    Document(layout, TABLES, MATCH_ORDERS).read(document, out)
    return out, layout


# --------------------------------------------------------------------------------------------- the reference


KNOWN = {order: followers(TEXTS, order) for order in ORDERS}
NGRAM = symbols(TEXTS).tobytes()


def likeliest(context: bytes, order: int) -> list[tuple[int, int]]:
    """Of a context in the n-gram index: its successors and how often, the likeliest first."""
    found = KNOWN[order].get(context)
    if not found or found.total() < (2 if order >= RARE else 1):
        return []
    return sorted(found.items(), key=lambda one: (-one[1], one[0]))[: successors(order)]


def places_of(document: bytes, i: int, order: int) -> list[int]:
    """The four latest places before i of a document after the same symbols, the newest first."""
    context = document[i - order : i] if i >= order else None
    return [j for j in range(i - 1, order - 1, -1) if document[j - order : j] == context][:4]


def match_of(document: bytes, i: int) -> tuple[int, int]:
    """What followed the last place of the index's text after the same `MATCHED` symbols, and how many are
    the same; a beginning where there is none."""
    context = document[i - MATCHED : i]
    ends = [j for j in range(MATCHED, len(NGRAM)) if NGRAM[j - MATCHED : j] == context and NGRAM[j] != BEGIN]
    if i < MATCHED or not ends:
        return BEGIN, 0
    place, length = ends[-1], 0
    while length < min(LONGEST, i, place) and NGRAM[place - 1 - length] == document[i - 1 - length]:
        length += 1
    return NGRAM[place], length


def reference(document: bytes, i: int, candidates: int) -> dict[str, Any]:
    """All that is to be proposed after ``document[:i]``."""
    rows = [likeliest(document[i - o : i], o) if i >= o else [] for o in ORDERS]
    places = [places_of(document, i, order) for order in MATCH_ORDERS]
    symbol, length = match_of(document, i)
    wanted = [symbol]
    wanted += [document[found[0]] for found in reversed(places) if found]
    wanted += [s for row in reversed(rows) for s, _ in row[:2]]
    wanted += [document[found[k]] for k in (1, 2, 3) for found in reversed(places) if len(found) > k]
    wanted += [s for row in reversed(rows) for s, _ in row[2:]]
    chosen = list(dict.fromkeys(s for s in wanted if s != BEGIN))[:candidates]
    totals = [KNOWN[o][document[i - o : i]] if row else {} for o, row in zip(ORDERS, rows, strict=True)]
    return {
        "symbols": chosen,
        "totals": [[q(sum(t.values())), q(len(t))] for t in totals],
        "seen": [[len(found), q(i - found[0]) if found else 0] for found in places]
        + [[int(length > 0), q(length)]],
        "counts": [[q(dict(row).get(s, 0)) for row in rows] for s in chosen],
        "places": [
            [sum((document[j] == s) << k for k, j in enumerate(found)) for found in places]
            + [int(length > 0 and s == symbol)]
            for s in chosen
        ],
    }


def said(row_W: np.ndarray, layout: Layout) -> dict[str, Any]:
    """What is proposed in the words of the reference."""
    there, chosen, totals, seen, counts, places = (part[0] for part in layout.views(row_W[None]))
    n = int(there[0])
    assert not chosen[n:].any() and not counts[n:].any() and not places[n:].any()
    return {
        "symbols": chosen[:n].tolist(),
        "totals": totals.tolist(),
        "seen": seen.tolist(),
        "counts": counts[:n].tolist(),
        "places": places[:n].tolist(),
    }


def new_document(seed: int, words: int = 60) -> np.ndarray:
    """A document that shares much with the n-gram index and with itself, and holds what is in neither."""
    draw = random.Random(seed)
    of_index = b" ".join(draw.sample(TEXTS, 4))
    own = documents(1, seed + 100, words)[0]
    return symbols([of_index[:200] + own + b" qqq zz " + own[: len(own) // 2] + of_index[50:150]])


@pytest.mark.parametrize("candidates", [16, 3, 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_candidates_and_all_that_is_said_of_them_are_those_of_the_reference(seed, candidates):
    document = new_document(seed)
    found, layout = proposed(document, candidates)
    matched = 0
    for i in range(1, len(document)):
        expected = reference(document.tobytes(), i, candidates)
        assert said(found[i - 1], layout) == expected, (i, document[:i].tobytes()[-20:])
        matched += expected["seen"][-1][0]
    assert matched > 50 and len(document) > 300


def test_nothing_follows_a_documents_end():
    document = new_document(2)
    found, _ = proposed(document)
    assert document[-1] == END and not found[-1].any() and found[:-1].any(1).mean() > 0.9


def test_a_match_is_the_last_of_several_and_is_compared_up_to_64_symbols_back():
    tables = tables_of([b"0123456789abcdefX", b"0123456789abcdefY", b"z" * 200], [1], 9)
    layout = Layout(1, 2, 4)
    for text, symbol, length in [(b"0123456789abcdef", b"Y", 17), (b"z" * 150, b"\xff", 64)]:
        document = np.frombuffer(bytes([BEGIN]) + text, np.uint8)
        out = np.zeros((len(document), layout.width), np.uint8)
        Document(layout, tables, [3]).read(document, out)
        last = said(out[-1], layout)
        assert last["symbols"][0] == symbol[0] and last["seen"][-1] == [1, q(length)]
        assert last["places"][0][-1] == 1


def test_no_scratch_buffer_is_written_outside_its_bounds(monkeypatch):
    """The buffers stand between guard bytes, because compiled code does not check the bounds of an array."""
    guard, guarded, made = 0xA5, [], module._scratch

    def between_guards(*arguments):
        inner = []
        for array in made(*arguments):
            whole = np.full(array.nbytes + 2 * 256, guard, np.uint8)
            inner.append(whole[256:-256].view(array.dtype).reshape(array.shape))
            inner[-1][...] = array
            guarded.append(whole)
        return tuple(inner)

    monkeypatch.setattr(module, "_scratch", between_guards)
    document = new_document(0)
    for orders, candidates in [(range(5, 30), 1), (range(1, 26), 1), ([5], 1), (range(5, 30), 3)]:
        tables, layout = tables_of(TEXTS[:8], list(orders), 9), Layout(len(orders), 2, candidates)
        out = np.zeros((len(document), layout.width), np.uint8)
        Document(layout, tables, [2]).read(document, out)
        assert out.any()
    assert guarded
    for whole in guarded:
        assert (whole[:256] == guard).all() and (whole[-256:] == guard).all()


# ------------------------------------------------------------------------------------------------ causality


@pytest.mark.parametrize("seed", range(3))
def test_what_comes_later_changes_nothing(seed):
    document, rng = new_document(seed), np.random.default_rng(seed)
    whole, _ = proposed(document)
    for t in [1, 2, 13, len(document) // 2, len(document) - 1]:
        changed = document.copy()
        changed[t:] = rng.integers(1, 250, len(document) - t)
        after, _ = proposed(changed)
        assert np.array_equal(after[:t], whole[:t]), t
        assert np.array_equal(proposed(document[:t])[0], whole[:t])
        assert not np.array_equal(after[t:], whole[t:]) or t == len(document) - 1


def test_a_document_that_is_read_in_pieces_has_the_candidates_of_one_that_is_read_at_once():
    """Also with pieces that are skipped, of one symbol, or longer than are looked up at a time."""
    document = np.concatenate([new_document(seed)[:-1] if seed < 3 else new_document(3) for seed in range(4)])
    document[1:][document[1:] == BEGIN] = ord(" ")
    whole, layout = proposed(document)
    borders = [0, 1, 2, 3, 40, 41, 100, 700, 900, len(document)]
    for skipped in ([], [0], [3, 5], range(0, 9, 2)):
        read = Document(layout, TABLES, MATCH_ORDERS)
        for number, (lo, hi) in enumerate(pairwise(borders)):
            if number in skipped:
                read.read(document[lo:hi])
                continue
            out = np.zeros((hi - lo, layout.width), np.uint8)
            read.read(document[lo:hi], out)
            assert np.array_equal(out, whole[lo:hi]), (skipped, lo)
    assert len(document) > 1000


# -------------------------------------------------------------------------------------------- long documents


@pytest.fixture(scope="module")
def long_text() -> np.ndarray:
    """More symbols than are held; most places have several earlier places near and far."""
    words = [text + b" " for text in documents(3000, seed=5) if text]
    draw = random.Random(6)
    text = b"".join(draw.choices(words, k=2 * HELD // 60))
    return np.frombuffer(bytes([BEGIN]) + text, np.uint8)[: HELD + 200_000]


def test_a_long_document_keeps_the_candidates_of_its_last_symbols_alone(long_text):
    """Matches beyond `REACH` are never followed, so a reader that begins `BACK` symbols before a place must
    find the same there as one that read everything."""
    layout = Layout(len(ORDERS), len(MATCH_ORDERS) + 1, 16)
    read, at = Document(layout, TABLES, MATCH_ORDERS), 0
    stops = [HELD // 2, HELD - 100, HELD - 20, HELD + 3000, 2 * HELD - BACK + 5, len(long_text) - 40]
    for stop in stops:
        read.read(long_text[at:stop])
        at = stop + 40
        found, alone = np.zeros((2, 40, layout.width), np.uint8)
        read.read(long_text[stop:at], found)
        fresh = Document(layout, TABLES, MATCH_ORDERS)
        fresh.read(long_text[stop - BACK : stop])
        fresh.read(long_text[stop:at], alone)
        assert np.array_equal(found, alone), stop
        before = long_text[:stop].tobytes()
        for order, (count, distance) in zip(MATCH_ORDERS, said(found[0], layout)["seen"], strict=False):
            # The symbol at `stop` was read as well: its place looks back on what ends with it.
            context = before[len(before) - order + 1 :] + long_text[stop : stop + 1].tobytes()
            last = before.rfind(context, max(0, stop + 1 - REACH - order))
            assert (count > 0) == (last >= 0), (stop, order)
            assert distance == (q(stop + 1 - last - order) if last >= 0 else 0), (stop, order)
    assert len(long_text) > 2 * HELD - BACK + 45


def test_the_work_for_a_symbol_does_not_grow_with_the_document(long_text, monkeypatch):
    """Work is the number of symbols that are indexed; held memory is counted as well."""
    indexed, real = [], module._index

    def counted(*arguments):
        indexed.append(arguments[-1] - arguments[-2])
        return real(*arguments)

    monkeypatch.setattr(module, "_index", counted)
    layout = Layout(len(ORDERS), len(MATCH_ORDERS) + 1, 16)
    read, out = Document(layout, TABLES, MATCH_ORDERS), np.zeros((1, layout.width), np.uint8)
    piece = 509
    for at in range(0, len(long_text), piece):
        read.read(long_text[at : at + piece - 1])
        read.read(long_text[at + piece - 1 : at + piece], out[: len(long_text[at + piece - 1 : at + piece])])
    assert sum(indexed) < 2.5 * len(long_text)
    again = [number for number in indexed if number > piece]
    assert len(again) < 12, "a text is indexed again only when its size has doubled, or `HELD` is reached"
    assert sum(value.nbytes for value in vars(read).values() if isinstance(value, np.ndarray)) < 160 * HELD
