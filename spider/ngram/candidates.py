"""Candidates for the next symbol: the union of three sources, with the features that each source gives.

Each source is a function of the document so far and of a frozen text:

    counts             symbols that followed each context of the position in the index's text, and how often
    document matches   the four latest positions of *this document* after the same o symbols, and what
                       followed there: an exact induction head by hashing, at most `MAX_DISTANCE` back
    index match        the last position of the index's text after the same `MATCH_LENGTH` symbols, compared
                       backwards

A position has at most C candidates, chosen in this order:

    1. the index match
    2. the newest document match of each order, the longest order first
    3. the two most frequent successors of each context, the last kind first
    4. older document matches
    5. rarer successors

A position after a document's end has none.

Shapes: N positions, O kinds of contexts that are counted, P orders of document matches, C candidates, W bytes
of a position's candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spider.config.ngram import LONGEST_ORDER
from spider.ngram.contexts import appended, compiled, contexts_of, inner, mixed, power
from spider.ngram.layout import BEGIN, END, POSITIONS, Layout
from spider.ngram.table import MATCH_LENGTH, Tables, width

#: Largest distance of a document match, in symbols.
MAX_DISTANCE = 1 << 16
#: Symbols before a position that decide its candidates: the context of the farthest match is needed as well.
HISTORY = MAX_DISTANCE + LONGEST_ORDER
#: Symbols of a document that are held in memory. When it is full, all but the last `HISTORY` are dropped.
BUFFER = 1 << 18
#: Longest length of an index match that is measured, in symbols.
MAX_MATCH = 64
#: Positions whose rows are read at a time.
_BLOCK = 1 << 9

#: q of each distance of a document match, and of each length of an index match.
_QUANTIZED = np.round(8 * np.log2(1.0 + np.arange(MAX_DISTANCE + 1))).astype(np.uint8)


@compiled
def _read_rows(contexts, shift, first, table, rows, o, bounds):  # type: ignore[no-untyped-def]
    """Copy the table's row of each position's context into ``rows`` (n, O, >= width), without fingerprint.

    ``o`` is the number of the kind, and ``shift`` turns a context into its bucket. There are two passes, so
    that the processor waits for many reads at once.
    """
    n = len(rows)
    for i in range(n):
        bounds[i, 0] = bounds[i, 1] = 0
        if contexts[i]:
            bucket = contexts[i] >> shift
            bounds[i, 0], bounds[i, 1] = first[bucket], first[bucket + np.uint64(1)]
    for i in range(n):
        context = contexts[i] >> np.uint64(8)
        high = np.uint8((context >> np.uint64(8)) & np.uint64(0xFF))
        low = np.uint8(context & np.uint64(0xFF))
        for row in range(bounds[i, 0], bounds[i, 1]):
            if table[row, 0] == high and table[row, 1] == low:
                for k in range(2, table.shape[1]):
                    rows[i, o, k - 2] = table[row, k]
                break


@compiled
def _extend_chains(text, hashes, orders, shift, chains, heads, lo, hi):  # type: ignore[no-untyped-def]
    """Extend the chains of a document from its first ``lo`` symbols to its first ``hi``.

    ``hashes`` (N + 1,) are the hashes of its prefixes. ``chains`` (P, N + 1) has, for each order and
    position, the latest earlier position in the same bucket, 0 for none. ``heads`` (P, buckets) has the
    latest position of each bucket, 0 for none.
    """
    for i in range(lo, hi):
        hashes[i + 1] = appended(hashes[i], text[i])
    for p in range(len(orders)):
        order = orders[p]
        factor = power(order)
        for i in range(max(order, lo + 1), hi + 1):
            bucket = mixed(hashes[i - order], hashes[i], factor) >> shift
            chains[p, i] = heads[p, bucket]
            heads[p, bucket] = i


@compiled
def _index_matches(text, hashes, first, shift, last, indexed, after, lengths):  # type: ignore[no-untyped-def]
    """Find where the `MATCH_LENGTH` symbols before positions from ``first`` on last occurred in the index.

    ``after`` gets the symbol that followed there, `BEGIN` for none. ``lengths`` gets the number of equal
    symbols before both positions, 0 if there are fewer than `MATCH_LENGTH`. There are two passes, for the
    reason that `_read_rows` gives.
    """
    factor = power(MATCH_LENGTH)
    for j in range(len(after)):
        i = first + j
        after[j] = BEGIN
        lengths[j] = 0
        if i >= MATCH_LENGTH:
            lengths[j] = last[mixed(hashes[i - MATCH_LENGTH], hashes[i], factor) >> shift]
    for j in range(len(after)):
        i = first + j
        position = lengths[j] - 1
        length = 0
        lengths[j] = 0
        while (
            length < MAX_MATCH
            and length < i
            and length < position
            and indexed[position - 1 - length] == text[i - 1 - length]
        ):
            length += 1
        if length >= MATCH_LENGTH and indexed[position] != BEGIN:
            after[j] = indexed[position]
            lengths[j] = length


@inner
def _document_matches(  # type: ignore[no-untyped-def]
    text, hashes, chains, orders, factors, i, followed, found, distance
):
    """Find the latest positions of the document after the same symbols as before position i.

    ``followed`` (P, POSITIONS) gets the symbols that followed there, the newest first, ``found`` their
    number, and ``distance`` that of the newest.
    """
    for p in range(len(orders)):
        found[p] = 0
        if i < orders[p]:
            continue
        context = hashes[i] - hashes[i - orders[p]] * factors[p]
        position = np.int64(chains[p, i])
        n = 0
        while position > 0 and n < POSITIONS and i - position <= MAX_DISTANCE:
            if hashes[position] - hashes[position - orders[p]] * factors[p] == context:
                followed[p, n] = text[position]
                if n == 0:
                    distance[p] = i - position
                n += 1
            position = np.int64(chains[p, position])
        found[p] = n


@inner
def _add(symbol, wanted, slot, symbols, n):  # type: ignore[no-untyped-def]
    """Add a wanted symbol to the candidates if it is new and a slot is free; return their number.

    The code avoids a branch, because a wrong prediction of the processor costs more than all else here.
    """
    most = len(symbols) - 1
    new = wanted & (slot[symbol] == most) & (n < most) & (symbol != BEGIN)
    symbols[n] = symbol
    slot[symbol] = n if new else slot[symbol]
    return n + new


@inner
def _choose(after, rows, followed, found, slot, symbols):  # type: ignore[no-untyped-def]
    """Choose the candidates of a position from its rows (O, width - 2) and matches; return their number.

    ``symbols`` gets them, and one more that is not a candidate. ``after`` is the symbol of the index match,
    `BEGIN` for none. ``slot`` gets the number of each symbol's candidate, C for none.
    """
    kinds = len(rows)
    P = len(found)
    most = len(symbols) - 1
    n = 0
    n = _add(after, after != BEGIN, slot, symbols, n)
    for p in range(P - 1, -1, -1):
        n = _add(followed[p, 0], found[p] > 0, slot, symbols, n)
    for o in range(kinds - 1, -1, -1):
        for k in range(2, 6, 2):
            n = _add(rows[o, k], rows[o, k + 1] > 0, slot, symbols, n)
    for k in range(1, POSITIONS):
        for p in range(P - 1, -1, -1):
            n = _add(followed[p, k], found[p] > k, slot, symbols, n)
    for o in range(kinds - 1, -1, -1):
        k = 6
        while n < most and k < rows.shape[1] and rows[o, k + 1] > 0:
            n = _add(rows[o, k], rows[o, k + 1] > 0, slot, symbols, n)
            k += 2
    return n


@inner
def _write_features(rows, followed, found, slot, line, totals, counts, bits):  # type: ignore[no-untyped-def]
    """Scatter the features of counts and document matches into a zeroed line, from the given bytes on.

    Symbols that are not candidates go behind the last candidate's part, which saves a branch. This overwrites
    the beginning of the next part, which is cleared afterwards, and the end of the line.
    """
    kinds = len(rows)
    columns = len(found) + 1
    for o in range(kinds):
        line[totals + 2 * o] = rows[o, 0]
        line[totals + 2 * o + 1] = rows[o, 1]
        k = 2
        while k < rows.shape[1] and rows[o, k + 1] > 0:
            line[counts + slot[rows[o, k]] * kinds + o] = rows[o, k + 1]
            k += 2
    for o in range(kinds):
        line[bits + o] = 0
    for p in range(len(found)):
        for k in range(found[p]):
            line[bits + slot[followed[p, k]] * columns + p] |= 1 << k


@compiled
def _write_candidates(  # type: ignore[no-untyped-def]
    text, hashes, chains, orders, first, rows, after, lengths, out, at, scratch
):
    """Write the candidates of positions from ``first`` on into the lines of ``out``.

    ``rows`` is from `_read_rows`; ``after`` and ``lengths`` are from `_index_matches`. ``at`` is the first
    byte of each of `Layout.parts`.
    """
    P = len(orders)
    number_at, symbols_at, totals_at, matches_at, counts_at, bits_at = at
    followed, found, distance, slot, symbols, line, factors = scratch
    for p in range(P):
        factors[p] = power(orders[p])
    for j in range(len(out)):
        i = first + j
        if text[i - 1] == END:
            continue
        for w in range(len(line)):
            line[w] = 0
        _document_matches(text, hashes, chains, orders, factors, i, followed, found, distance)
        n = line[number_at] = _choose(after[j], rows[j], followed, found, slot, symbols)
        _write_features(rows[j], followed, found, slot, line, totals_at, counts_at, bits_at)
        for p in range(P):
            if found[p] > 0:
                line[matches_at + 2 * p] = found[p]
                line[matches_at + 2 * p + 1] = _QUANTIZED[distance[p]]
        if lengths[j] > 0:
            line[matches_at + 2 * P] = 1
            line[matches_at + 2 * P + 1] = _QUANTIZED[lengths[j]]
            line[bits_at + slot[after[j]] * (P + 1) + P] = 1
        for c in range(n):
            line[symbols_at + c] = symbols[c]
            slot[symbols[c]] = len(symbols) - 1
        for w in range(out.shape[1]):
            out[j, w] = line[w]


class Document:
    """One document that is read from front to back, and the candidates after each of its symbols.

    Reading begins at the document's first symbol, or at least `HISTORY` symbols before the first position
    whose candidates are needed. Each symbol takes the same time. At most `BUFFER` symbols are held, with
    chains of their contexts that grow with them. When the buffer is full, all but the last `HISTORY` symbols
    are dropped and the chains are built again.
    """

    def __init__(self, layout: Layout, tables: Tables, match_orders: Sequence[int], size: int = 0) -> None:
        """Allocate for ``size`` symbols, if their number is known."""
        self._tables = tables
        self._orders = np.array(match_orders)
        self._at = tuple(first for first, _ in layout.parts.values())
        self._scratch = _scratch(layout, len(self._orders))
        self._allocate(np.zeros(0, np.uint8), max(1, min(size, BUFFER)))

    def read(self, text: np.ndarray, out_NW: np.ndarray | None = None) -> None:
        """Read N more symbols, and write the candidates after each into ``out_NW`` (zeros), if given."""
        step = BUFFER - HISTORY
        for a in range(0, len(text), step):
            self._append(text[a : a + step])
            if out_NW is not None:
                self._write(out_NW[a : a + step])

    def _append(self, text: np.ndarray) -> None:
        size = self._size + len(text)
        if size > BUFFER:
            self._allocate(self._text[self._size - HISTORY : self._size], BUFFER)
        elif size > len(self._text):
            self._allocate(self._text[: self._size], min(BUFFER, 1 << size.bit_length()))
        self._text[self._size : self._size + len(text)] = text
        self._size += len(text)

    def _allocate(self, text: np.ndarray, size: int) -> None:
        """Allocate a buffer of ``size`` symbols that begins with ``text``, and drop the chains."""
        buffer = np.empty(size, np.uint8)
        buffer[: len(text)] = text
        self._text = buffer
        self._size = len(text)
        self._chained = 0

    def _extend(self) -> None:
        """Extend the chains to all symbols that were read."""
        P = len(self._orders)
        size = len(self._text)
        buckets = 1 << (2 * size - 1).bit_length()
        if self._chained == 0:
            self._hashes = np.zeros(size + 1, np.uint64)
            self._chains = np.zeros((P, size + 1), np.int32)
            self._heads = np.zeros((P, buckets), np.int32)
        _extend_chains(
            self._text, self._hashes, self._orders, _shift(buckets), self._chains, self._heads,
            self._chained, self._size,
        )  # fmt: skip
        self._chained = self._size

    def _write(self, out_NW: np.ndarray) -> None:
        """Write the candidates after each of the last N symbols."""
        self._extend()
        text = self._text[: self._size]
        tables = self._tables
        start = self._size - len(out_NW) + 1
        contexts = [contexts_of(text, self._hashes, kind, start, self._size + 1) for kind in tables.kinds]
        columns = max(map(width, tables.kinds)) - 2
        for a in range(0, len(out_NW), _BLOCK):
            out = out_NW[a : a + _BLOCK]
            first = start + a
            rows = np.zeros((len(out), len(contexts), columns), np.uint8)
            bounds = np.empty((len(out), 2), np.int64)
            for o, (buckets, table) in enumerate(tables.of):
                shift = _shift(len(buckets) - 1)
                _read_rows(contexts[o][a : a + _BLOCK], shift, buckets, table, rows, o, bounds)
            after = np.empty(len(out), np.uint8)
            lengths = np.empty(len(out), np.int64)
            shift = _shift(len(tables.last))
            _index_matches(text, self._hashes, first, shift, tables.last, tables.text, after, lengths)
            _write_candidates(
                text, self._hashes, self._chains, self._orders, first, rows, after, lengths, out,
                self._at, self._scratch,
            )  # fmt: skip


def _scratch(layout: Layout, P: int) -> tuple[np.ndarray, ...]:
    """Allocate the working memory of `_write_candidates`.

    It holds ``followed``, ``found`` and ``distance`` of `_document_matches`, ``slot`` and ``symbols`` of
    `_choose`, a line of output, and the factors of the orders. `_write_features` writes one candidate too
    many: a row of ``bits``, and the first ``contexts`` bytes of that part. So the line is longer than a line
    of output. Allocation stays outside compiled code, where it would double the time to compile.
    """
    return (
        np.zeros((P, POSITIONS), np.uint8),
        *np.zeros((2, P), np.int64),
        np.full(END + 1, layout.candidates),
        np.zeros(layout.candidates + 1, np.uint8),
        np.zeros(layout.width + max(layout.match_orders, layout.contexts), np.uint8),
        np.zeros(P, np.uint64),
    )


def _shift(buckets: int) -> np.uint64:
    """Return the right shift that turns a hash into one of so many buckets, a power of two."""
    return np.uint64(64 - (buckets.bit_length() - 1))
