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
candidates, W bytes of a proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spider.config.memory import LONGEST_ORDER
from spider.memory.compiled import compiled, inner
from spider.memory.contexts import contexts_of
from spider.memory.hashes import mixed, power, prefix_hashes
from spider.memory.layout import PLACES, Layout
from spider.memory.symbols import BEGIN, END
from spider.memory.table import MATCHED, Tables, width

#: How far back in its document a pointer looks, in symbols.
REACH = 1 << 16
#: How far back a document must be known for that: the context of the farthest place is needed as well.
BACK = REACH + LONGEST_ORDER
#: Places whose rows are read at a time.
_BLOCK = 1 << 9
#: How far a match is compared, in symbols.
LONGEST = 64


class Span(NamedTuple):
    """Places of a document whose proposals are asked for, one after the other."""

    before: int
    """Symbols before the first of them, less one: it is ``text[: before + 1]`` that is followed."""
    row: int
    """Where the proposals of the first go."""
    size: int


#: q of every distance that a pointer reaches, and of every length of a match.
_FAR = np.round(8 * np.log2(1.0 + np.arange(REACH + 1))).astype(np.uint8)


@compiled
def _places(spans, places, rows):  # type: ignore[no-untyped-def]
    """Of all places of spans (n, 3): how many symbols stand before, and the rows where their proposals go."""
    n = 0
    for s in range(len(spans)):
        for k in range(spans[s, 2]):
            places[n], rows[n] = spans[s, 0] + 1 + k, spans[s, 1] + k
            n += 1


@compiled
def _contexts(text, hashes, kinds, spans, contexts):  # type: ignore[no-untyped-def]
    """Of all places of spans the contexts of each kind: (O, N) uint64."""
    for o in range(len(kinds)):
        n = 0
        for s in range(len(spans)):
            lo, hi = spans[s, 0] + 1, spans[s, 0] + 1 + spans[s, 2]
            found = contexts_of(text, hashes, kinds[o], lo, hi)
            for k in range(len(found)):
                contexts[o, n + k] = found[k]
            n += len(found)


@compiled
def _look_up(contexts, shift, first, table, known, o, bounds):  # type: ignore[no-untyped-def]
    """Copy into ``known`` (n, O, >= width), for kind o, what a table has of each place's context, fingerprint
    apart; a bucket is what ``shift`` leaves of a context. In two passes, so that the processor waits for many
    reads at once."""
    n = len(known)
    for i in range(n):
        bounds[i, 0] = bounds[i, 1] = 0
        if contexts[i]:
            bucket = contexts[i] >> shift
            bounds[i, 0], bounds[i, 1] = first[bucket], first[bucket + np.uint64(1)]
    for i in range(n):
        context = contexts[i] >> np.uint64(8)
        high, low = np.uint8((context >> np.uint64(8)) & np.uint64(0xFF)), np.uint8(context & np.uint64(0xFF))
        for row in range(bounds[i, 0], bounds[i, 1]):
            if table[row, 0] == high and table[row, 1] == low:
                for k in range(2, table.shape[1]):
                    known[i, o, k - 2] = table[row, k]
                break


@compiled
def _chain(hashes, orders, shift, chains, heads):  # type: ignore[no-untyped-def]
    """For each order and place of a document the latest place before it whose symbols may be the same:
    (P, N + 1), 0 for none. ``heads``: zeros, for each order the latest place of each hash."""
    for p in range(len(orders)):
        order, grown = orders[p], power(orders[p])
        for i in range(order, len(hashes)):
            bucket = mixed(hashes[i - order], hashes[i], grown) >> shift
            chains[p, i] = heads[p, bucket]
            heads[p, bucket] = i


@compiled
def _match(text, hashes, places, shift, last, old, after, lengths):  # type: ignore[no-untyped-def]
    """Of each place what followed the last place of the memory's text after the same symbols, `BEGIN` for
    nothing, and how many are the same (0: fewer than `MATCHED`). In two passes, as `_look_up`."""
    n, grown = len(places), power(MATCHED)
    for j in range(n):
        i = places[j]
        after[j], lengths[j] = BEGIN, 0
        if i >= MATCHED:
            lengths[j] = last[mixed(hashes[i - MATCHED], hashes[i], grown) >> shift]
    for j in range(n):
        i, place, length = places[j], lengths[j] - 1, 0
        lengths[j] = 0
        while (
            length < LONGEST
            and length < i
            and length < place
            and old[place - 1 - length] == text[i - 1 - length]
        ):
            length += 1
        if length >= MATCHED and old[place] != BEGIN:
            after[j], lengths[j] = old[place], length


@inner
def _point(text, hashes, chains, orders, grown, i, followed, found, far):  # type: ignore[no-untyped-def]
    """What followed the latest places of the document after the same symbols as before place i (P, PLACES),
    the newest first, how many they are, and how far away the newest is."""
    for p in range(len(orders)):
        found[p] = 0
        if i < orders[p]:
            continue
        mine, place, n = hashes[i] - hashes[i - orders[p]] * grown[p], np.int64(chains[p, i]), 0
        while place > 0 and n < PLACES and i - place <= REACH:
            if hashes[place] - hashes[place - orders[p]] * grown[p] == mine:
                followed[p, n] = text[place]
                if n == 0:
                    far[p] = i - place
                n += 1
            place = np.int64(chains[p, place])
        found[p] = n


@inner
def _add(symbol, wanted, slot, symbols, n):  # type: ignore[no-untyped-def]
    """Make a wanted symbol a candidate if it is none and there is room; returns how many there are. Without
    a branch: no processor could foretell it, and a wrong guess costs more than all else here."""
    room = len(symbols) - 1
    new = wanted & (slot[symbol] == room) & (n < room) & (symbol != BEGIN)
    symbols[n] = symbol
    slot[symbol] = n if new else slot[symbol]
    return n + new


@inner
def _choose(after, known, followed, found, slot, symbols):  # type: ignore[no-untyped-def]
    """The candidates of a place of which the tables know (O, width - 2), and one symbol more that is none;
    returns how many. ``after``: the match's symbol, `BEGIN` for none; ``slot``: of each symbol the number of
    its candidate, C for none."""
    kinds, P, room = len(known), len(found), len(symbols) - 1
    n = 0
    n = _add(after, after != BEGIN, slot, symbols, n)
    for p in range(P - 1, -1, -1):
        n = _add(followed[p, 0], found[p] > 0, slot, symbols, n)
    for o in range(kinds - 1, -1, -1):
        for k in range(2, 6, 2):
            n = _add(known[o, k], known[o, k + 1] > 0, slot, symbols, n)
    for k in range(1, PLACES):
        for p in range(P - 1, -1, -1):
            n = _add(followed[p, k], found[p] > k, slot, symbols, n)
    for o in range(kinds - 1, -1, -1):
        k = 6
        while n < room and k < known.shape[1] and known[o, k + 1] > 0:
            n = _add(known[o, k], known[o, k + 1] > 0, slot, symbols, n)
            k += 2
    return n


@inner
def _tell(known, followed, found, slot, line, totals, counts, pointed):  # type: ignore[no-untyped-def]
    """What counts and pointers say of a place and of its candidates, into a line of zeros, from these bytes
    on. What they say of other symbols goes behind the last candidate's part: to the beginning of the next
    one, which is cleared, and to the end of the line."""
    kinds, columns = len(known), len(found) + 1
    for o in range(kinds):
        line[totals + 2 * o], line[totals + 2 * o + 1] = known[o, 0], known[o, 1]
        k = 2
        while k < known.shape[1] and known[o, k + 1] > 0:
            line[counts + slot[known[o, k]] * kinds + o] = known[o, k + 1]
            k += 2
    for o in range(kinds):
        line[pointed + o] = 0
    for p in range(len(found)):
        for k in range(found[p]):
            line[pointed + slot[followed[p, k]] * columns + p] |= 1 << k


@compiled
def _fill(  # type: ignore[no-untyped-def]
    text, hashes, chains, orders, places, rows, known, after, lengths, out, at, scratch
):
    """Candidates of places, and what is said of them, into ``rows`` of ``out``; ``after`` and ``lengths`` are
    `_match`'s, ``at`` is the first byte of each of `Layout.parts`."""
    P, W = len(orders), out.shape[1]
    there, first, totals, seen, counts, pointed = at
    followed, found, far, slot, symbols, line, grown = scratch
    for p in range(P):
        grown[p] = power(orders[p])
    for j in range(len(places)):
        if text[places[j] - 1] == END:
            continue
        for w in range(len(line)):
            line[w] = 0
        _point(text, hashes, chains, orders, grown, places[j], followed, found, far)
        n = line[there] = _choose(after[j], known[j], followed, found, slot, symbols)
        _tell(known[j], followed, found, slot, line, totals, counts, pointed)
        for p in range(P):
            if found[p] > 0:
                line[seen + 2 * p], line[seen + 2 * p + 1] = found[p], _FAR[far[p]]
        if lengths[j] > 0:
            line[seen + 2 * P], line[seen + 2 * P + 1] = 1, _FAR[lengths[j]]
            line[pointed + slot[after[j]] * (P + 1) + P] = 1
        for c in range(n):
            line[first + c] = symbols[c]
            slot[symbols[c]] = len(symbols) - 1
        for w in range(W):
            out[rows[j], w] = line[w]


def propose(
    text: np.ndarray, spans: Sequence[Span], out_NW: np.ndarray, layout: Layout, tables: Tables,
    pointer_orders: Sequence[int],
) -> None:  # fmt: skip
    """Fill proposals of places of one document, zeros so far: what may follow ``text[:i]``.

    ``text`` are the document's symbols up to the last place, from its beginning or from `BACK` before the
    first; ``spans`` rise.
    """
    hashes, orders, asked = prefix_hashes(text), np.array(pointer_orders), np.array(spans)
    kinds, P, size = np.array(tables.kinds), len(orders), sum(span.size for span in spans)
    chains, bits = np.zeros((P, len(hashes)), np.int32), (2 * len(text)).bit_length()
    _chain(hashes, orders, _shift(1 << bits), chains, np.zeros((P, 1 << bits), np.int32))
    places, rows, contexts = *np.empty((2, size), np.int64), np.empty((len(kinds), size), np.uint64)
    _places(asked, places, rows)
    _contexts(text, hashes, kinds, asked, contexts)
    at, columns = tuple(first for first, _ in layout.parts.values()), max(map(width, tables.kinds)) - 2
    scratch = _scratch(layout, P)
    bounds, after = np.empty((_BLOCK, 2), np.int64), np.empty(_BLOCK, np.uint8)
    lengths = np.empty(_BLOCK, np.int64)
    for a in range(0, len(places), _BLOCK):
        here, to = places[a : a + _BLOCK], rows[a : a + _BLOCK]
        known = np.zeros((len(here), len(kinds), columns), np.uint8)
        for o, (first, table) in enumerate(tables.of):
            shift = _shift(len(first) - 1)
            _look_up(contexts[o, a : a + _BLOCK], shift, first, table, known, o, bounds)
        _match(text, hashes, here, _shift(len(tables.last)), tables.last, tables.text, after, lengths)
        _fill(text, hashes, chains, orders, here, to, known, after, lengths, out_NW, at, scratch)


def _scratch(layout: Layout, P: int) -> tuple[np.ndarray, ...]:
    """Allocate the working memory of `_fill`.

    It holds ``followed``, ``found`` and ``far`` of `_point`, ``slot`` and ``symbols`` of `_choose`, a line of
    output, and the powers of the orders. The line is longer than a line of output, because `_tell` writes one
    candidate too many: a row of ``places``, and the first ``contexts`` bytes of that part. Allocation stays
    outside compiled code, where it would double the time to compile.
    """
    return (
        np.zeros((P, PLACES), np.uint8),
        *np.zeros((2, P), np.int64),
        np.full(END + 1, layout.candidates),
        np.zeros(layout.candidates + 1, np.uint8),
        np.zeros(layout.width + max(layout.pointers, layout.contexts), np.uint8),
        np.zeros(P, np.uint64),
    )


def _shift(buckets: int) -> np.uint64:
    """What leaves of a hash the number of one of so many buckets, a power of two."""
    return np.uint64(64 - (buckets.bit_length() - 1))
