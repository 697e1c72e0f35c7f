"""Candidates for the next symbol: the union of all sources, with the features that each source gives.

Three sources, each a pure function of the document so far and of a frozen text:

    counts     what followed each context of the place in the n-gram index's text, and how often
    matches   the four latest places of *this document* after the same o symbols, and what followed there:
               an induction head by hashing, exact to the byte, no further back than `REACH`
    match      the last place of the n-gram index's text after the same `MATCHED` symbols, compared backwards

A place has at most C candidates, chosen in this order: the match; the newest match of each order, the
longest first; the two most frequent successors of each context, the last kind first; older matches; rarer
successors. A place after a document's end has none.

Shapes: N places, O kinds of contexts that are counted, P orders of matches (and the match as one more), C
candidates, W bytes of a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spider.config.ngram import LONGEST_ORDER
from spider.ngram.contexts import appended, compiled, contexts_of, inner, mixed, power
from spider.ngram.layout import BEGIN, END, PLACES, Layout
from spider.ngram.table import MATCHED, Tables, width

#: How far back in its document a match looks, in symbols.
REACH = 1 << 16
#: How far back a document must be known for that: the context of the farthest place is needed as well.
BACK = REACH + LONGEST_ORDER
#: Symbols of a document that are held at most. Beyond, those further back than `BACK` are dropped.
HELD = 1 << 18
#: Places whose rows are read at a time.
_BLOCK = 1 << 9
#: How far a match is compared, in symbols.
LONGEST = 64


#: q of every distance that a match reaches, and of every length of a match.
_FAR = np.round(8 * np.log2(1.0 + np.arange(REACH + 1))).astype(np.uint8)


@compiled
def _contexts(text, hashes, kinds, first, contexts):  # type: ignore[no-untyped-def]
    """Fill ``contexts`` (O, N) uint64 with the contexts of each kind before N places, from ``first`` on."""
    for o in range(len(kinds)):
        contexts[o] = contexts_of(text, hashes, kinds[o], first, first + contexts.shape[1])


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
def _index(text, hashes, orders, shift, chains, heads, lo, hi):  # type: ignore[no-untyped-def]
    """Extend the index of a document from its first ``lo`` symbols to its first ``hi``.

    ``hashes`` (N + 1,) are the hashes of its prefixes. ``chains`` (P, N + 1) has, for each order and place,
    the latest earlier place in the same bucket, 0 for none. ``heads`` (P, buckets) has the latest place of
    each bucket, 0 for none.
    """
    for i in range(lo, hi):
        hashes[i + 1] = appended(hashes[i], text[i])
    for p in range(len(orders)):
        order, grown = orders[p], power(orders[p])
        for i in range(max(order, lo + 1), hi + 1):
            bucket = mixed(hashes[i - order], hashes[i], grown) >> shift
            chains[p, i] = heads[p, bucket]
            heads[p, bucket] = i


@compiled
def _match(text, hashes, first, shift, last, old, after, lengths):  # type: ignore[no-untyped-def]
    """Find for places, from ``first`` on, where their last `MATCHED` symbols last occurred in the text.

    ``after`` gets the symbol that followed there, `BEGIN` for none, and ``lengths`` how many symbols before
    both places are equal, 0 for fewer than `MATCHED`. There are two passes, for the reason that `_look_up`
    gives.
    """
    grown = power(MATCHED)
    for j in range(len(after)):
        i = first + j
        after[j], lengths[j] = BEGIN, 0
        if i >= MATCHED:
            lengths[j] = last[mixed(hashes[i - MATCHED], hashes[i], grown) >> shift]
    for j in range(len(after)):
        i, place, length = first + j, lengths[j] - 1, 0
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
    """What counts and matches say of a place and of its candidates, into a line of zeros, from these bytes
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
    text, hashes, chains, orders, first, known, after, lengths, out, at, scratch
):
    """Write the candidates of places, from ``first`` on, into the rows of ``out``.

    ``known`` is from `_look_up`, ``after`` and ``lengths`` are from `_match`, and ``at`` is the first byte of
    each of `Layout.parts`.
    """
    P, W = len(orders), out.shape[1]
    there, symbols_at, totals, seen, counts, pointed = at
    followed, found, far, slot, symbols, line, grown = scratch
    for p in range(P):
        grown[p] = power(orders[p])
    for j in range(len(out)):
        i = first + j
        if text[i - 1] == END:
            continue
        for w in range(len(line)):
            line[w] = 0
        _point(text, hashes, chains, orders, grown, i, followed, found, far)
        n = line[there] = _choose(after[j], known[j], followed, found, slot, symbols)
        _tell(known[j], followed, found, slot, line, totals, counts, pointed)
        for p in range(P):
            if found[p] > 0:
                line[seen + 2 * p], line[seen + 2 * p + 1] = found[p], _FAR[far[p]]
        if lengths[j] > 0:
            line[seen + 2 * P], line[seen + 2 * P + 1] = 1, _FAR[lengths[j]]
            line[pointed + slot[after[j]] * (P + 1) + P] = 1
        for c in range(n):
            line[symbols_at + c] = symbols[c]
            slot[symbols[c]] = len(symbols) - 1
        for w in range(W):
            out[j, w] = line[w]


class Document:
    """One document that is read from front to back, and the candidates after each of its symbols.

    Reading begins at the document's first symbol, or at least `BACK` symbols before the first place whose
    candidates are needed. A symbol costs the same time at every place, and memory is bounded: at most `HELD`
    symbols are held, with an index of their contexts that grows with them. When there would be more, all but
    the last `BACK` are dropped and the index is built again.
    """

    def __init__(self, layout: Layout, tables: Tables, match_orders: Sequence[int], size: int = 0) -> None:
        """Allocate for ``size`` symbols, where it is known how many will be read."""
        self._tables = tables
        self._kinds, self._orders = np.array(tables.kinds), np.array(match_orders)
        self._at = tuple(first for first, _ in layout.parts.values())
        self._scratch = _scratch(layout, len(self._orders))
        self._hold(np.zeros(0, np.uint8), max(1, min(size, HELD)))

    def read(self, text: np.ndarray, out_NW: np.ndarray | None = None) -> None:
        """Read N more symbols, and write the candidates after each into ``out_NW`` (zeros), if given."""
        step = HELD - BACK
        for a in range(0, len(text), step):
            self._append(text[a : a + step])
            if out_NW is not None:
                self._write(out_NW[a : a + step])

    def _append(self, text: np.ndarray) -> None:
        size = self._size + len(text)
        if size > HELD:
            self._hold(self._text[self._size - BACK : self._size], HELD)
        elif size > len(self._text):
            self._hold(self._text[: self._size], min(HELD, 1 << size.bit_length()))
        self._text[self._size : self._size + len(text)] = text
        self._size += len(text)

    def _hold(self, text: np.ndarray, room: int) -> None:
        """Allocate for ``room`` symbols, keep ``text`` as the first of them, and forget the index."""
        held = np.empty(room, np.uint8)
        held[: len(text)] = text
        self._text, self._size, self._indexed = held, len(text), 0

    def _extend_index(self) -> None:
        """Index the symbols that are not yet indexed."""
        P, room = len(self._orders), len(self._text)
        bits = (2 * room - 1).bit_length()
        if self._indexed == 0:
            self._hashes = np.zeros(room + 1, np.uint64)
            self._chains = np.zeros((P, room + 1), np.int32)
            self._heads = np.zeros((P, 1 << bits), np.int32)
        arrays = self._chains, self._heads, self._indexed, self._size
        _index(self._text, self._hashes, self._orders, _shift(1 << bits), *arrays)
        self._indexed = self._size

    def _write(self, out_NW: np.ndarray) -> None:
        """Write the candidates after each of the last N symbols."""
        self._extend_index()
        text, hashes, tables = self._text[: self._size], self._hashes, self._tables
        start = self._size - len(out_NW) + 1
        contexts = np.empty((len(self._kinds), len(out_NW)), np.uint64)
        _contexts(text, hashes, self._kinds, start, contexts)
        columns = max(map(width, tables.kinds)) - 2
        for a in range(0, len(out_NW), _BLOCK):
            out = out_NW[a : a + _BLOCK]
            first = start + a
            known = np.zeros((len(out), len(self._kinds), columns), np.uint8)
            bounds = np.empty((len(out), 2), np.int64)
            for o, (buckets, table) in enumerate(tables.of):
                shift = _shift(len(buckets) - 1)
                _look_up(contexts[o, a : a + _BLOCK], shift, buckets, table, known, o, bounds)
            after, lengths = np.empty(len(out), np.uint8), np.empty(len(out), np.int64)
            _match(text, hashes, first, _shift(len(tables.last)), tables.last, tables.text, after, lengths)
            _fill(
                text, hashes, self._chains, self._orders, first, known, after, lengths, out,
                self._at, self._scratch,
            )  # fmt: skip


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
        np.zeros(layout.width + max(layout.match_orders, layout.contexts), np.uint8),
        np.zeros(P, np.uint64),
    )


def _shift(buckets: int) -> np.uint64:
    """What leaves of a hash the number of one of so many buckets, a power of two."""
    return np.uint64(64 - (buckets.bit_length() - 1))
