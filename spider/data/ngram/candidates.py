"""Candidates for the next symbol: the union of three sources, with the features that each source gives.

Each source is a function of the document so far and of a frozen text:

    counts             symbols that followed each context of the position in the index's text, and how often
    document matches   the four latest positions of *this document* after the same context, and what followed
                       there: an exact induction head by hashing, at most ``distance`` symbols back
    index match        the last position of the index's text after the same `MATCH_LENGTH` symbols, compared
                       backwards

A position has at most C candidates, chosen in this order:

    1. the index match
    2. the newest document match of each kind of context, the last kind first
    3. the two most frequent successors of each counted context, the last kind first
    4. older document matches
    5. rarer successors

Each candidate also has the number of times it followed the position's contexts of some orders within the last
``distance`` symbols of the document: *document counts*. A position after a document's end has no candidates.

Matches and document counts may look back on earlier documents of a stream (carry-over).

Shapes: N positions, O kinds of contexts that are counted in the index, K orders of document counts, P kinds
of document matches, C candidates, W bytes of a position's candidates.
"""

from __future__ import annotations

import numpy as np
import psutil

from spider.config.model import NgramConfig
from spider.data.ngram.contexts import compiled, contexts_of, extend_hashes, inner, mixed, power, reach
from spider.data.ngram.layout import BEGIN, END, POSITIONS, Layout
from spider.data.ngram.table import MATCH_LENGTH, Tables, width

#: Largest distance within a document, in symbols.
MAX_DISTANCE = 1 << 16
#: Symbols held in memory, as a multiple of the largest distance.
_HELD = 4
#: Longest length of an index match that is measured, in symbols.
MAX_MATCH = 64
#: Positions whose rows are read at a time.
_BLOCK = 1 << 9

#: Binary logarithm of the entries of pairs of a context and a symbol, for each entry of contexts alone.
_FEWER = np.uint64(2)
#: Bits of a position in a link of a chain, and their mask.
_POSITION_BITS = np.uint64(32)
_POSITION = np.uint64(0xFFFFFFFF)
#: Odd factor of the hash of a context and a symbol.
_SPREAD = np.uint64(0xD6E8FEB86659FD93)
#: q of small numbers.
_QUANTIZED = np.round(8 * np.log2(1.0 + np.arange(1 << 16))).astype(np.uint8)


def distance_of(carry_over: int) -> int:
    """Return the largest distance of matches and document counts, in symbols."""
    return carry_over or MAX_DISTANCE


def history_of(config: NgramConfig, carry_over: int = 0) -> int:
    """Return the number of symbols before a position that decide its candidates.

    The context of the farthest match is needed as well.
    """
    kinds = [*config.context_kinds, *config.match_kinds, *config.counts]
    return distance_of(carry_over) + max(map(reach, kinds))


@inner
def _quantized(number):  # type: ignore[no-untyped-def]
    """Return q of a number below 2^32; from 2^16 on it is within one of q."""
    if number < 1 << 16:
        return _QUANTIZED[number]
    return _QUANTIZED[number >> 16] + 128 if number >= 1 << 24 else _QUANTIZED[number >> 8] + 64


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
def _extend_chain(contexts, first, shift, links, heads):  # type: ignore[no-untyped-def]
    """Extend the chain of one kind of context by the contexts of positions from ``first`` on.

    The link of a position has the low 32 bits of its context, 0 for none, and the latest earlier position in
    the same bucket, 0 for none. ``heads`` has the latest position of each bucket.
    """
    for j in range(len(contexts)):
        context = contexts[j]
        if context:
            bucket = context >> shift
            links[first + j] = (context << _POSITION_BITS) | heads[bucket]
            heads[bucket] = first + j


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
    text, links, most, i, followed, found, distance
):
    """Find the latest positions, at most ``most`` symbols back, after the same contexts as position i.

    ``followed`` (P, POSITIONS) gets the symbols that followed there, the newest first, ``found`` their
    number, and ``distance`` that of the newest.
    """
    for p in range(len(found)):
        found[p] = 0
        link = links[p, i]
        tag = link >> _POSITION_BITS
        if tag == 0:
            continue
        position = np.int64(link & _POSITION)
        n = 0
        while position > 0 and n < POSITIONS and i - position <= most:
            link = links[p, position]
            if link >> _POSITION_BITS == tag:
                followed[p, n] = text[position]
                if n == 0:
                    distance[p] = i - position
                n += 1
            position = np.int64(link & _POSITION)
        found[p] = n


@inner
def _entry(context, symbol, shift):  # type: ignore[no-untyped-def]
    """Return the entry of a context and the next symbol among the document counts."""
    return ((context ^ np.uint64(symbol)) * _SPREAD) >> shift


@inner
def _count(text, contexts, j, change, shift, followers, seen):  # type: ignore[no-untyped-def]
    """Add ``change`` to the document counts of the symbol at position j after its contexts (K,)."""
    for k in range(len(contexts)):
        context = contexts[k, j]
        if context:
            followers[k, _entry(context, text[j], shift)] += change
            seen[k, context >> (shift + _FEWER)] += change


@compiled
def _clear(text, contexts, first, end, shift, followers, seen):  # type: ignore[no-untyped-def]
    """Take the symbols from ``first`` to ``end`` out of the document counts."""
    for j in range(first, end):
        _count(text, contexts, j, -1, shift, followers, seen)


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
def _write_features(rows, columns, followed, found, slot, most, line, totals, counts, bits):  # type: ignore[no-untyped-def]
    """Scatter the features of counts and document matches into a zeroed line, from the given bytes on.

    A candidate's part of the counts has ``columns`` bytes. Symbols whose slot is ``most`` are no candidates.
    """
    matches = len(found) + 1
    for o in range(len(rows)):
        line[totals + 2 * o] = rows[o, 0]
        line[totals + 2 * o + 1] = rows[o, 1]
        k = 2
        while k < rows.shape[1] and rows[o, k + 1] > 0:
            candidate = slot[rows[o, k]]
            if candidate < most:
                line[counts + candidate * columns + o] = rows[o, k + 1]
            k += 2
    for p in range(len(found)):
        for k in range(found[p]):
            candidate = slot[followed[p, k]]
            if candidate < most:
                line[bits + candidate * matches + p] |= 1 << k


@inner
def _write_document_counts(  # type: ignore[no-untyped-def]
    contexts, i, shift, followers, seen, symbols, n, kinds, line, totals, counts
):
    """Write the document counts of position i and of its n candidates behind those of ``kinds`` contexts."""
    columns = kinds + len(contexts)
    for k in range(len(contexts)):
        context = contexts[k, i]
        if context == 0:
            continue
        total = seen[k, context >> (shift + _FEWER)]
        different = 0
        if total:
            for c in range(n):
                number = followers[k, _entry(context, symbols[c], shift)]
                line[counts + c * columns + kinds + k] = _quantized(number)
                different += number > 0
        line[totals + 2 * (kinds + k)] = _quantized(total)
        line[totals + 2 * (kinds + k) + 1] = _quantized(different)


@compiled
def _write_candidates(  # type: ignore[no-untyped-def]
    text,
    links,
    most,
    contexts,
    shift,
    followers,
    seen,
    counted,
    first,
    rows,
    after,
    lengths,
    out,
    at,
    scratch,
):
    """Write the candidates of positions from ``first`` on into the lines of ``out``.

    ``rows`` is from `_read_rows`; ``after`` and ``lengths`` are from `_index_matches`. ``at`` is the first
    byte of each of `Layout.parts`. ``followers`` and ``seen`` are the document counts of the ``counted``
    symbols before, and are brought up to date; the number that is counted now is returned.
    """
    P = len(links)
    kinds = rows.shape[1]
    number_at, symbols_at, totals_at, matches_at, counts_at, bits_at = at
    followed, found, distance, slot, symbols, line = scratch
    for j in range(len(out)):
        i = first + j
        while counted < i:
            _count(text, contexts, counted, 1, shift, followers, seen)
            if counted >= most:
                _count(text, contexts, counted - most, -1, shift, followers, seen)
            counted += 1
        if text[i - 1] == END:
            continue
        for w in range(len(line)):
            line[w] = 0
        _document_matches(text, links, most, i, followed, found, distance)
        n = line[number_at] = _choose(after[j], rows[j], followed, found, slot, symbols)
        columns = kinds + len(contexts)
        most_candidates = len(symbols) - 1
        _write_features(
            rows[j], columns, followed, found, slot, most_candidates, line, totals_at, counts_at, bits_at
        )
        _write_document_counts(
            contexts, i, shift, followers, seen, symbols, n, kinds, line, totals_at, counts_at
        )
        for p in range(P):
            if found[p] > 0:
                line[matches_at + 2 * p] = found[p]
                line[matches_at + 2 * p + 1] = _quantized(distance[p])
        if lengths[j] > 0:
            line[matches_at + 2 * P] = 1
            line[matches_at + 2 * P + 1] = _quantized(lengths[j])
            line[bits_at + slot[after[j]] * (P + 1) + P] = 1
        for c in range(n):
            line[symbols_at + c] = symbols[c]
            slot[symbols[c]] = len(symbols) - 1
        for w in range(len(line)):
            out[j, w] = line[w]
    return counted


def _entries(carry_over: int) -> int:
    """Return the number of entries of contexts alone.

    It does not depend on the size of a document, because it decides which contexts share an entry.
    """
    return 1 << (distance_of(carry_over) - 1).bit_length()


def empty_counts(config: NgramConfig, carry_over: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return document counts without a symbol, uint16: of contexts and symbols, and of contexts alone.

    A count of 2^16 becomes 0.
    """
    K = len(config.counts)
    entries = _entries(carry_over)
    return np.zeros((K, entries << int(_FEWER)), np.uint16), np.zeros((K, entries), np.uint16)


class Document:
    """One document that is read from front to back, and the candidates after each of its symbols.

    With a carry-over it is a stream of documents. Reading begins at the document's first symbol, or at least
    `history_of` symbols before the first position whose candidates are needed. Each symbol takes the same
    time. A bounded number of symbols is held, with chains of their contexts that grow with them. When the
    buffer is full, all but the history is dropped, and the chains and the document counts are built again.
    """

    def __init__(
        self,
        layout: Layout,
        tables: Tables,
        config: NgramConfig,
        size: int = 0,
        carry_over: int = 0,
        counts: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Allocate for ``size`` symbols, if their number is known; ``counts`` are from `empty_counts`."""
        self._tables = tables
        self._kinds = config.match_kinds
        self._orders = config.counts
        self._most = distance_of(carry_over)
        self._history = history_of(config, carry_over)
        self._buffer = _HELD * max(self._most, self._history - self._most)
        if carry_over:
            self._check_memory(carry_over)
        self._counts = counts or empty_counts(config, carry_over)
        self._counted = 0
        self._at = tuple(first for first, _ in layout.parts.values())
        self._scratch = _scratch(layout, len(self._kinds))
        self._allocate(np.zeros(0, np.uint8), max(1, min(size, self._buffer)))

    def _check_memory(self, carry_over: int) -> None:
        """Raise `ValueError` if a full buffer needs more memory than the machine has."""
        of_symbol = 1 + 8 + (8 + 2 * 4) * len(self._kinds) + 8 * len(self._orders)
        needed = self._buffer * of_symbol + 5 * 2 * len(self._orders) * _entries(carry_over)
        total = psutil.virtual_memory().total
        if needed > total:
            raise ValueError(
                f"carry_over: looking back on {carry_over:,} bytes needs {needed / 1e9:.1f} GB of memory, "
                f"and this machine has {total / 1e9:.1f} GB; lower it"
            )

    def read(self, text: np.ndarray, out_NW: np.ndarray | None = None) -> None:
        """Read N more symbols, and write the candidates after each into ``out_NW`` (zeros), if given."""
        step = self._buffer - self._history
        for a in range(0, len(text), step):
            self._append(text[a : a + step])
            if out_NW is not None:
                self._write(out_NW[a : a + step])

    def clear_counts(self) -> None:
        """Clear the document counts, so that another document can use their memory."""
        if self._counted:
            first = max(0, self._counted - self._most)
            shift = _shift(self._counts[0].shape[1])
            _clear(self._text, self._contexts, first, self._counted, shift, *self._counts)
        self._counted = 0

    def _append(self, text: np.ndarray) -> None:
        size = self._size + len(text)
        if size > self._buffer:
            self._allocate(self._text[self._size - self._history : self._size], self._buffer)
        elif size > len(self._text):
            self._allocate(self._text[: self._size], min(self._buffer, 1 << size.bit_length()))
        self._text[self._size : self._size + len(text)] = text
        self._size += len(text)

    def _allocate(self, text: np.ndarray, size: int) -> None:
        """Allocate a buffer of ``size`` symbols that begins with ``text``, and drop what was derived."""
        self.clear_counts()
        buffer = np.empty(size, np.uint8)
        buffer[: len(text)] = text
        self._text = buffer
        self._size = len(text)
        self._chained = 0

    def _extend(self) -> None:
        """Extend the chains and the contexts of document counts to all symbols that were read."""
        P, K = len(self._kinds), len(self._orders)
        size = len(self._text)
        buckets = 1 << size.bit_length()
        if self._chained == 0:
            self._hashes = np.zeros(size + 1, np.uint64)
            self._links = np.zeros((P, size + 1), np.uint64)
            self._heads = np.zeros((P, buckets), np.uint32)
            self._contexts = np.zeros((K, size + 1), np.uint64)
        text = self._text[: self._size]
        lo, hi = self._chained + 1, self._size + 1
        extend_hashes(text, self._hashes, lo - 1, hi - 1)
        shift = _shift(buckets)
        for p, kind in enumerate(self._kinds):
            contexts = contexts_of(text, self._hashes, kind, lo, hi)
            _extend_chain(contexts, lo, shift, self._links[p], self._heads[p])
        for k, order in enumerate(self._orders):
            self._contexts[k, lo:hi] = contexts_of(text, self._hashes, order, lo, hi)
        self._chained = self._size

    def _write(self, out_NW: np.ndarray) -> None:
        """Write the candidates after each of the last N symbols."""
        self._extend()
        text = self._text[: self._size]
        tables = self._tables
        start = self._size - len(out_NW) + 1
        contexts = [contexts_of(text, self._hashes, kind, start, self._size + 1) for kind in tables.kinds]
        columns = max(map(width, tables.kinds)) - 2
        entry_shift = _shift(self._counts[0].shape[1])
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
            self._counted = _write_candidates(
                text, self._links, self._most, self._contexts, entry_shift, *self._counts, self._counted,
                first, rows, after, lengths, out, self._at, self._scratch,
            )  # fmt: skip


def _scratch(layout: Layout, P: int) -> tuple[np.ndarray, ...]:
    """Allocate the working memory of `_write_candidates`.

    It holds ``followed``, ``found`` and ``distance`` of `_document_matches`, ``slot`` and ``symbols`` of
    `_choose`, and a line of output. Allocation stays outside compiled code, where it would double the time to
    compile.
    """
    return (
        np.zeros((P, POSITIONS), np.uint8),
        *np.zeros((2, P), np.int64),
        np.full(END + 1, layout.candidates),
        np.zeros(layout.candidates + 1, np.uint8),
        np.zeros(layout.width, np.uint8),
    )


def _shift(buckets: int) -> np.uint64:
    """Return the right shift that turns a hash into one of so many buckets, a power of two."""
    return np.uint64(64 - (buckets.bit_length() - 1))
