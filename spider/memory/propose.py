"""What memory proposes for the next symbol: the union of its sources, and what each says of every candidate.

Three sources, each a pure function of the document so far and of a frozen text:

    counts     what followed each context of the place in the memory's text, and how often
    pointers   the four latest places of *this document* after the same o symbols, and what followed there:
               an induction head by hashing, exact to the byte, no further back than `REACH`
    match      the last place of the memory's text after the same `MATCHED` symbols, compared backwards

A place has at most C candidates, chosen in this order: the match; the newest pointer of each order, the
longest first; the two most frequent successors of each context, the last kind first; older pointers; rarer
successors. A place after a document's end has none.

Shapes: N places, O kinds of contexts that are counted, P orders of pointers (and the match as one more), C
candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from spider.config.memory import LONGEST_ORDER
from spider.memory.contexts import contexts_of
from spider.memory.hashes import mixed, power, prefix_hashes
from spider.memory.layout import PLACES
from spider.memory.symbols import BEGIN, END
from spider.memory.table import MATCHED, Tables, quantized, width

#: How far back in its document a pointer looks, in symbols.
REACH = 1 << 16
#: How far back a document must be known for that: the context of the farthest place is needed as well.
BACK = REACH + LONGEST_ORDER
#: Places whose rows are read at a time.
_BLOCK = 1 << 8
#: How far a match is compared, in symbols.
LONGEST = 64


class Span(NamedTuple):
    """Places of a document whose proposals are asked for."""

    before: int
    """Symbols before the first of them, less one: it is ``text[: before + 1]`` that is followed."""
    parts: tuple[np.ndarray, ...]
    """Views of what is to be filled, zeros, in the order of `Layout.parts`, N places each."""


@njit(nogil=True, cache=True)
def _look_up(contexts, first, table, rows):  # type: ignore[no-untyped-def]
    """Copy for each place (n, >= width) what a table has of its context, fingerprint apart.

    In two passes, so that the processor waits for many reads at once.
    """
    n = len(rows)
    bounds, shift = np.zeros((n, 2), np.int64), 64 - round(np.log2(len(first) - 1))
    for i in range(n):
        if contexts[i]:
            bucket = contexts[i] >> np.uint64(shift)
            bounds[i, 0], bounds[i, 1] = first[bucket], first[bucket + np.uint64(1)]
    for i in range(n):
        context = contexts[i] >> np.uint64(8)
        high, low = np.uint8((context >> np.uint64(8)) & np.uint64(0xFF)), np.uint8(context & np.uint64(0xFF))
        for row in range(bounds[i, 0], bounds[i, 1]):
            if table[row, 0] == high and table[row, 1] == low:
                for k in range(2, table.shape[1]):
                    rows[i, k - 2] = table[row, k]
                break


@njit(nogil=True, cache=True)
def _chain(hashes: np.ndarray, order: int) -> np.ndarray:
    """For each place of a document the latest before it whose symbols may be the same: (N + 1,) int32, 0 for
    none."""
    end, bits = len(hashes) - 1, 4
    while 1 << bits < 2 * end:
        bits += 1
    heads, before, grown = np.zeros(1 << bits, np.int32), np.zeros(end + 1, np.int32), power(order)
    for i in range(order, end + 1):
        bucket = mixed(hashes[i - order], hashes[i], grown) >> np.uint64(64 - bits)
        before[i] = heads[bucket]
        heads[bucket] = i
    return before


@njit(nogil=True, cache=True)
def _find_pointers(text, hashes, lo, order, before, followed, counts, far):  # type: ignore[no-untyped-def]
    """Of each place what followed the latest places of its document after the same symbols (n, PLACES), the
    newest first, how many they are, and how far away the newest is."""
    grown = power(order)
    for i in range(max(order, lo + 1), lo + 1 + len(counts)):
        mine, found, place = hashes[i] - hashes[i - order] * grown, 0, before[i]
        while place > 0 and found < PLACES and i - place <= REACH:
            if hashes[place] - hashes[place - order] * grown == mine:
                followed[i - lo - 1, found] = text[place]
                if found == 0:
                    far[i - lo - 1] = i - place
                found += 1
            place = before[place]
        counts[i - lo - 1] = found


@njit(nogil=True, cache=True)
def _find_matches(text, hashes, lo, last, old, after, lengths):  # type: ignore[no-untyped-def]
    """Of each place what followed the last place of the memory's text after the same symbols, and how many
    are the same (0: fewer than `MATCHED`)."""
    n, grown, bits = len(after), power(MATCHED), round(np.log2(len(last)))
    places = np.zeros(n, np.int64)
    for i in range(max(lo + 1, MATCHED), lo + 1 + n):
        places[i - lo - 1] = last[mixed(hashes[i - MATCHED], hashes[i], grown) >> np.uint64(64 - bits)]
    for i in range(max(lo + 1, MATCHED), lo + 1 + n):
        place, length = np.int64(places[i - lo - 1]) - 1, 0
        while (
            length < LONGEST
            and length < i
            and length < place
            and old[place - 1 - length] == text[i - 1 - length]
        ):
            length += 1
        if length >= MATCHED and old[place] != BEGIN:
            after[i - lo - 1], lengths[i - lo - 1] = old[place], length


@njit(nogil=True, cache=True, inline="always")
def _add(symbol, slot, symbols, n):  # type: ignore[no-untyped-def]
    """Make a symbol a candidate if it is none and there is room; returns how many there are."""
    if n < len(symbols) and slot[symbol] < 0 and symbol != BEGIN:
        slot[symbol] = n
        symbols[n] = symbol
        n += 1
    return n


@njit(nogil=True, cache=True)
def _choose(i, after, rows, followed, counts, slot, symbols):  # type: ignore[no-untyped-def]
    """The candidates of place i; returns how many. ``after``: the match's symbol, `BEGIN` for none."""
    kinds, P = rows.shape[1], counts.shape[1]
    n = _add(after, slot, symbols, 0)
    for p in range(P - 1, -1, -1):
        if counts[i, p] > 0:
            n = _add(followed[i, p, 0], slot, symbols, n)
    for o in range(kinds - 1, -1, -1):
        for k in range(2, 6, 2):
            if rows[i, o, k + 1] > 0:
                n = _add(rows[i, o, k], slot, symbols, n)
    for k in range(1, PLACES):
        for p in range(P - 1, -1, -1):
            if counts[i, p] > k:
                n = _add(followed[i, p, k], slot, symbols, n)
    for o in range(kinds - 1, -1, -1):
        k = 6
        while n < len(symbols) and k < rows.shape[2] and rows[i, o, k + 1] > 0:
            n = _add(rows[i, o, k], slot, symbols, n)
            k += 2
    return n


@njit(nogil=True, cache=True)
def _tell(i, rows, followed, counts, slot, totals, of_counts, of_places):  # type: ignore[no-untyped-def]
    """What counts and pointers say of place i's candidates."""
    kinds, P = rows.shape[1], counts.shape[1]
    for o in range(kinds):
        totals[i, o, 0], totals[i, o, 1] = rows[i, o, 0], rows[i, o, 1]
        k = 2
        while k < rows.shape[2] and rows[i, o, k + 1] > 0:
            c = slot[rows[i, o, k]]
            if c >= 0:
                of_counts[i, c, o] = rows[i, o, k + 1]
            k += 2
    for p in range(P):
        for k in range(counts[i, p]):
            c = slot[followed[i, p, k]]
            if c >= 0:
                of_places[i, c, p] |= 1 << k


@njit(nogil=True, cache=True)
def _assemble(text, lo, rows, followed, counts, far, after, lengths, parts):  # type: ignore[no-untyped-def]
    """Candidates of all places, and what is said of them."""
    there, symbols, totals, seen, of_counts, of_places = parts
    P, slot = counts.shape[1], np.full(END + 1, -1, np.int64)
    for i in range(len(there)):
        if text[lo + i] == END:
            continue
        n = there[i, 0] = _choose(i, after[i], rows, followed, counts, slot, symbols[i])
        _tell(i, rows, followed, counts, slot, totals, of_counts, of_places)
        for p in range(P):
            seen[i, p, 0], seen[i, p, 1] = counts[i, p], quantized(far[i, p])
        if lengths[i] > 0:
            seen[i, P, 0], seen[i, P, 1] = 1, quantized(lengths[i])
            of_places[i, slot[after[i]], P] = 1
        for c in range(n):
            slot[symbols[i, c]] = -1


def propose(text: np.ndarray, spans: Sequence[Span], tables: Tables, pointer_orders: Sequence[int]) -> None:
    """Fill proposals of places of one document: what may follow ``text[:i]``.

    ``text`` are the document's symbols up to the last place, from its beginning or from `BACK` before the
    first; ``spans`` rise.
    """
    hashes, P = prefix_hashes(text), len(pointer_orders)
    chains = [_chain(hashes, order) for order in pointer_orders]
    for before, parts in spans:
        n = len(parts[0])
        contexts = [contexts_of(text, hashes, kind, before + 1, before + 1 + n) for kind in tables.kinds]
        for a in range(0, n, _BLOCK):
            part = tuple(one[a : a + _BLOCK] for one in parts)
            lo, size = before + a, len(part[0])
            rows = np.zeros((size, len(tables.kinds), max(map(width, tables.kinds)) - 2), np.uint8)
            for o, (first, table) in enumerate(tables.of):
                _look_up(contexts[o][a : a + size], first, table, rows[:, o])
            followed = np.zeros((size, P, PLACES), np.uint8)
            counts, far = np.zeros((size, P), np.uint8), np.zeros((size, P), np.int32)
            for p, (order, chain) in enumerate(zip(pointer_orders, chains, strict=True)):
                _find_pointers(text, hashes, lo, order, chain, followed[:, p], counts[:, p], far[:, p])
            after, lengths = np.full(size, BEGIN, np.uint8), np.zeros(size, np.int32)
            _find_matches(text, hashes, lo, tables.last, tables.text, after, lengths)
            _assemble(text, lo, rows, followed, counts, far, after, lengths, part)
