"""Candidates equal a slow reference, and depend on the document so far alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from spider.config.model import NgramConfig
from spider.data.ngram.candidates import _HELD, MAX_DISTANCE, MAX_MATCH, Document, history_of
from spider.data.ngram.layout import BEGIN, Layout
from spider.data.ngram.table import MATCH_LENGTH, successors
from tests.unit.ngram.texts import context_before, documents, followers, q, symbols, tables_of

ORDERS, RARE, COUNTS = [1, 2, 3, 5, 9], 9, [1, 2, 4]
MATCHES = ["column", "indent", "above", 2, 3, "words1", 6, 11]
CONFIG = NgramConfig(contexts=ORDERS, rare=RARE, matches=MATCHES, counts=COUNTS)
HISTORY, BUFFER = history_of(CONFIG), _HELD * MAX_DISTANCE
TEXTS = documents(40, seed=2)
TABLES = tables_of(TEXTS, ORDERS, RARE)


def candidates_of(document: np.ndarray, candidates: int = 16) -> tuple[np.ndarray, Layout]:
    """Return the candidates after each symbol of a document that is read at once, and their layout."""
    layout = replace(Layout.of(CONFIG), candidates=candidates)
    out = np.zeros((len(document), layout.width), np.uint8)
    Document(layout, TABLES, CONFIG).read(document, out)
    return out, layout


# --------------------------------------------------------------------------------------------- the reference


FOLLOWERS = {order: followers(TEXTS, order) for order in ORDERS}
INDEXED = symbols(TEXTS).tobytes()


def successors_of(context: bytes, order: int) -> list[tuple[int, int]]:
    """Return the successors of a context in the n-gram index and their counts, the most frequent first."""
    found = FOLLOWERS[order].get(context)
    if not found or found.total() < (2 if order >= RARE else 1):
        return []
    return sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[: successors(order)]


def contexts_in(document: bytes, name: int | str) -> list[Any]:
    """Return the context of this kind before each position, None for none."""
    return [None, *(context_before(document[:i], name) for i in range(1, len(document)))]


def positions_of(contexts: list[Any], i: int) -> list[int]:
    """Return the four latest positions before i after the same context, the newest first."""
    if contexts[i] is None:
        return []
    return [j for j in range(i - 1, 0, -1) if contexts[j] == contexts[i]][:4]


def counts_of(document: bytes, contexts: list[Any], i: int) -> Counter[int]:
    """Count what followed the same context before position i."""
    if contexts[i] is None:
        return Counter()
    return Counter(document[j] for j in range(1, i) if contexts[j] == contexts[i])


def match_of(document: bytes, i: int) -> tuple[int, int]:
    """Return the symbol of the index match and the number of equal symbols, or `BEGIN` and 0."""
    context = document[i - MATCH_LENGTH : i]
    ends = [
        j
        for j in range(MATCH_LENGTH, len(INDEXED))
        if INDEXED[j - MATCH_LENGTH : j] == context and INDEXED[j] != BEGIN
    ]
    if i < MATCH_LENGTH or not ends:
        return BEGIN, 0
    position, length = ends[-1], 0
    while length < min(MAX_MATCH, i, position) and INDEXED[position - 1 - length] == document[i - 1 - length]:
        length += 1
    return INDEXED[position], length


def reference(document: bytes, i: int, candidates: int, contexts: dict[Any, list[Any]]) -> dict[str, Any]:
    """Return the candidates after ``document[:i]`` and their features; ``contexts`` has all kinds."""
    rows = [successors_of(document[i - o : i], o) if i >= o else [] for o in ORDERS]
    positions = [positions_of(contexts[name], i) for name in MATCHES]
    within = [counts_of(document, contexts[order], i) for order in COUNTS]
    symbol, length = match_of(document, i)
    wanted = [symbol]
    wanted += [document[found[0]] for found in reversed(positions) if found]
    wanted += [s for row in reversed(rows) for s, _ in row[:2]]
    wanted += [document[found[k]] for k in (1, 2, 3) for found in reversed(positions) if len(found) > k]
    wanted += [s for row in reversed(rows) for s, _ in row[2:]]
    chosen = list(dict.fromkeys(s for s in wanted if s != BEGIN))[:candidates]
    totals = [FOLLOWERS[o][document[i - o : i]] if row else {} for o, row in zip(ORDERS, rows, strict=True)]
    return {
        "symbols": chosen,
        "totals": [[q(sum(t.values())), q(len(t))] for t in totals]
        + [[q(found.total()), q(sum(found[s] > 0 for s in chosen))] for found in within],
        "matches": [[len(found), q(i - found[0]) if found else 0] for found in positions]
        + [[int(length > 0), q(length)]],
        "counts": [
            [q(dict(row).get(s, 0)) for row in rows] + [q(found[s]) for found in within] for s in chosen
        ],
        "bits": [
            [sum((document[j] == s) << k for k, j in enumerate(found)) for found in positions]
            + [int(length > 0 and s == symbol)]
            for s in chosen
        ],
    }


def features(row_W: np.ndarray, layout: Layout) -> dict[str, Any]:
    """Return the candidates of a position in the form of the reference."""
    number, chosen, totals, matches, counts, bits = (part[0] for part in layout.views(row_W[None]))
    n = int(number[0])
    assert not chosen[n:].any() and not counts[n:].any() and not bits[n:].any()
    return {
        "symbols": chosen[:n].tolist(),
        "totals": totals.tolist(),
        "matches": matches.tolist(),
        "counts": counts[:n].tolist(),
        "bits": bits[:n].tolist(),
    }


def new_document(seed: int, words: int = 60) -> np.ndarray:
    """Return a document that shares text with the n-gram index and with itself, and has text of its own."""
    rng = random.Random(seed)
    of_index = b" ".join(rng.sample(TEXTS, 4))
    own = documents(1, seed + 100, words)[0].replace(b"cat", b"\n  cat")
    return symbols([of_index[:200] + own + b" qqq zz " + own[: len(own) // 2] + of_index[50:150]])


@pytest.mark.parametrize(("seed", "candidates"), [(0, 16), (1, 3)])
def test_candidates_and_their_features_are_those_of_the_reference(seed, candidates):
    document = new_document(seed)
    found, layout = candidates_of(document, candidates)
    matched = shared = 0
    contexts = {name: contexts_in(document.tobytes(), name) for name in {*MATCHES, *COUNTS}}
    for i in range(1, len(document)):
        expected = reference(document.tobytes(), i, candidates, contexts)
        given = features(found[i - 1], layout)
        # Two contexts of a document may share a count, so a document count is too high now and then.
        (totals, exact_totals), (counts, exact_counts) = (
            (np.array(given.pop(part)).T, np.array(expected.pop(part)).T) for part in ("totals", "counts")
        )
        assert given == expected, (i, document[:i].tobytes()[-20:])
        assert np.array_equal(totals[:, : len(ORDERS)], exact_totals[:, : len(ORDERS)])
        assert np.array_equal(counts[: len(ORDERS)], exact_counts[: len(ORDERS)])
        assert (totals >= exact_totals).all() and (counts >= exact_counts).all()
        shared += int((counts > exact_counts).any() or (totals > exact_totals).any())
        matched += expected["matches"][-1][0]
    assert matched > 50 and len(document) > 300 and shared < len(document) / 20


def test_an_index_match_is_the_last_of_several_and_measures_up_to_64_symbols():
    tables = tables_of([b"0123456789abcdefX", b"0123456789abcdefY", b"z" * 200], [1], 9)
    config = NgramConfig(contexts=[1], matches=[3])
    layout = Layout.of(config)
    for text, symbol, length in [(b"0123456789abcdef", b"Y", 17), (b"z" * 150, b"\xff", 64)]:
        document = np.frombuffer(bytes([BEGIN]) + text, np.uint8)
        out = np.zeros((len(document), layout.width), np.uint8)
        Document(layout, tables, config).read(document, out)
        last = features(out[-1], layout)
        assert last["symbols"][0] == symbol[0] and last["matches"][-1] == [1, q(length)]
        assert last["bits"][0][-1] == 1


# ------------------------------------------------------------------------------------------------ causality


def test_a_document_read_in_pieces_has_the_same_candidates():
    """Pieces may be skipped, have one symbol, or be longer than a block."""
    document = np.concatenate([new_document(seed)[:-1] if seed < 3 else new_document(3) for seed in range(4)])
    document[1:][document[1:] == BEGIN] = ord(" ")
    whole, layout = candidates_of(document)
    borders = [0, 1, 2, 3, 40, 41, 100, 700, 900, len(document)]
    for skipped in ([], [0], [3, 5], range(0, 9, 2)):
        read = Document(layout, TABLES, CONFIG)
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
    """A text longer than the buffer. Most of its contexts occurred before, near and far."""
    words = [text + b" " for text in documents(3000, seed=5) if text]
    rng = random.Random(6)
    text = b"".join(rng.choices(words, k=2 * BUFFER // 60))
    return np.frombuffer(bytes([BEGIN]) + text, np.uint8)[: BUFFER + 200_000]


def test_candidates_of_a_long_document_depend_on_its_last_symbols_alone(long_text):
    """A reader that begins `HISTORY` symbols before a position finds the same there as one that read all."""
    layout = Layout.of(CONFIG)
    read = Document(layout, TABLES, CONFIG)
    at = 0
    stops = [
        BUFFER // 2,
        BUFFER - 100,
        BUFFER - 20,
        BUFFER + 3000,
        2 * BUFFER - HISTORY + 5,
        len(long_text) - 40,
    ]
    for stop in stops:
        read.read(long_text[at:stop])
        at = stop + 40
        found, alone = np.zeros((2, 40, layout.width), np.uint8)
        read.read(long_text[stop:at], found)
        fresh = Document(layout, TABLES, CONFIG)
        fresh.read(long_text[stop - HISTORY : stop])
        fresh.read(long_text[stop:at], alone)
        assert np.array_equal(found, alone), stop
        before = long_text[:stop].tobytes()
        for order, (count, distance) in zip(MATCHES, features(found[0], layout)["matches"], strict=False):
            if isinstance(order, str):
                continue
            # The symbol at `stop` was read as well, so contexts end with it.
            context = before[len(before) - order + 1 :] + long_text[stop : stop + 1].tobytes()
            last = before.rfind(context, max(0, stop + 1 - MAX_DISTANCE - order))
            assert (count > 0) == (last >= 0), (stop, order)
            assert distance == (q(stop + 1 - last - order) if last >= 0 else 0), (stop, order)
    assert len(long_text) > 2 * BUFFER - HISTORY + 45
