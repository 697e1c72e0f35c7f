"""Tables: the counts of a whole text, packed so that a context is found with two reads of memory.

Of one kind, all contexts in the order of their hashes, a row each, found through the first row of their
bucket (the top bits of the hash; some eight contexts share one). A row is, in bytes:

    0, 1    fingerprint: the 16 low bits of the hash
    2, 3    q(T), q(D): how often the context occurs, and how many different symbols follow it
    4, ...  K pairs (symbol, q(count)), the most frequent first, the smaller symbol first among equals; q = 0
            where there are fewer

q(c) = round(8 log2(1 + c)): a byte holds counts up to four thousand million, to 9 percent. A context that is
not in the table is taken for another with a chance of some 8 / 65,536 a look-up: noise that the network
prices, not a leak.

Contexts seen less than twice are left out from some order on: there almost all are, and what followed them
stands in the text itself. ``last`` holds for the hash of `MATCHED` symbols the last place that they stood
before; who follows it compares the text backwards, so a hash that two contexts share does no harm.

Merging is the reduce of a map-reduce: runs are cut by the hash's top bits into slices of bounded size, and
each slice is merged, packed and written before the next is read. The buckets come last, by the number of
rows, so that a table is a function of the text, however it was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spider.memory.compiled import compiled
from spider.memory.hashes import appended, mixed, power
from spider.memory.symbols import BEGIN

#: Symbols of the contexts that are found again in the text.
MATCHED = 12
#: Pairs of key and count that are merged at a time: 12 bytes each, four times while they are.
SLICE = 1 << 22

#: Keys and counts of one piece of a text; mapped, where they are on disk, only while they are read.
Run = Callable[[], tuple[np.ndarray, np.ndarray]]


def successors(kind: int) -> int:
    """K of a kind of contexts: short ones are few, and much may follow them."""
    if kind < 0:
        return 6
    return 30 if kind <= 3 else 14 if kind == 4 else 6 if kind <= 8 else 4


def width(kind: int) -> int:
    """Bytes of a row."""
    return 4 + 2 * successors(kind)


@compiled
def _merge(keys_a, counts_a, keys_b, counts_b):  # type: ignore[no-untyped-def]
    """Two runs as one."""
    size = len(keys_a) + len(keys_b)
    keys, counts = np.empty(size, np.uint64), np.empty(size, np.uint32)
    i = j = n = 0
    while i < len(keys_a) or j < len(keys_b):
        if j == len(keys_b) or (i < len(keys_a) and keys_a[i] <= keys_b[j]):
            keys[n], counts[n] = keys_a[i], counts_a[i]
            if j < len(keys_b) and keys_b[j] == keys_a[i]:
                counts[n] += counts_b[j]
                j += 1
            i += 1
        else:
            keys[n], counts[n] = keys_b[j], counts_b[j]
            j += 1
        n += 1
    return keys[:n], counts[:n]


def merge(runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Any number of runs as one, two at a time."""
    todo = list(runs)
    while len(todo) > 1:
        todo = [*todo[2:], _merge(*todo[0], *todo[1])]
    return todo[0] if todo else (np.empty(0, np.uint64), np.empty(0, np.uint32))


@compiled
def quantized(count):  # type: ignore[no-untyped-def]
    return round(8 * np.log2(1.0 + count))


@compiled
def _pack(keys, counts, per, least, contexts, rows):  # type: ignore[no-untyped-def]
    """Write a row for each context of a run that occurs ``least`` times; returns how many rows there are, and
    how many contexts were left out."""
    n = i = left = 0
    room = np.zeros(per, np.int64)
    symbols = np.zeros(per, np.uint8)
    while i < len(keys):
        context, different, kept = keys[i] >> np.uint64(8), 0, 0
        total = np.int64(0)
        while i < len(keys) and keys[i] >> np.uint64(8) == context:
            value, symbol = np.int64(counts[i]), np.uint8(keys[i] & np.uint64(0xFF))
            total += value
            different += 1
            place = kept
            while place > 0 and room[place - 1] < value:  # symbols come rising: equals stay in their order
                place -= 1
            if place < per:
                kept = min(kept + 1, per)
                for k in range(kept - 1, place, -1):
                    room[k], symbols[k] = room[k - 1], symbols[k - 1]
                room[place], symbols[place] = value, symbol
            i += 1
        if total < least:
            left += 1
            continue
        contexts[n] = context
        rows[n, 0], rows[n, 1] = (
            np.uint8((context >> np.uint64(8)) & np.uint64(0xFF)),
            np.uint8(context & np.uint64(0xFF)),
        )
        rows[n, 2], rows[n, 3] = quantized(total), quantized(different)
        for k in range(per):
            there = k < kept
            rows[n, 4 + 2 * k] = symbols[k] if there else 0
            rows[n, 5 + 2 * k] = quantized(room[k]) if there else 0
        n += 1
    return n, left


@compiled
def _tally(contexts, shift, buckets):  # type: ignore[no-untyped-def]
    """Count each context in its bucket."""
    for context in contexts:
        buckets[context >> np.uint64(shift)] += 1


def bucket_bits(contexts: int) -> int:
    """Top bits of a hash that name its bucket, some eight contexts in each."""
    return max(1, min(32, int(np.ceil(np.log2(max(1, contexts) / 8)))))


def place_bits(symbols: float) -> int:
    """Top bits of a hash that name its entry in ``last``: two entries for three symbols of the text."""
    return max(8, min(32, round(np.log2(symbols / 1.5))))


def slices(runs: Sequence[Run], size: int) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Runs cut at the same keys, contexts whole, so that few slices hold more than so many pairs."""
    total = sum(len(run()[0]) for run in runs)
    count = 1 << max(0, int(np.ceil(np.log2(max(1, total) / size))))
    bounds = np.array([np.uint64((i << 64) // count) for i in range(1, count)], np.uint64)
    cuts = [[0, *np.searchsorted(keys, bounds).tolist(), len(keys)] for keys, _ in (run() for run in runs)]
    for s in range(count):
        part = []
        for run, cut in zip(runs, cuts, strict=True):
            (keys, counts), inside = run(), slice(cut[s], cut[s + 1])
            part.append((np.array(keys[inside]), np.array(counts[inside])))
        yield part


def build(
    runs: Sequence[Run], kind: int, least: int, keep: Callable[[np.ndarray], object], size: int = SLICE
) -> tuple[np.ndarray, int]:
    """The table of one kind of contexts: its rows (n, width) uint8 go to ``keep`` as they are ready; returned
    are ``first`` (buckets + 1,) uint32, and how many contexts were left out."""
    # How many contexts there are is known last, however the text was cut: buckets are joined then.
    finest = bucket_bits(sum(len(run()[0]) for run in runs))
    buckets, left_out = np.zeros(1 << finest, np.uint32), 0
    for part in slices(runs, size):
        keys, counts = merge(part)
        contexts, rows = np.empty(len(keys), np.uint64), np.empty((len(keys), width(kind)), np.uint8)
        n, left = _pack(keys, counts, successors(kind), least, contexts, rows)
        _tally(contexts[:n], 56 - finest, buckets)
        keep(rows[:n])
        left_out += left
    bits = bucket_bits(int(buckets.sum()))
    first = np.zeros((1 << bits) + 1, np.uint32)
    np.cumsum(buckets.reshape(1 << bits, -1).sum(1), out=first[1:])
    return first, left_out


@compiled
def last_places(text: np.ndarray, bits: int) -> np.ndarray:
    """By the top bits of the hash of `MATCHED` symbols, one more than the last place that stands after them;
    0 where none does: (2^bits,) uint32."""
    last, grown, start, now = np.zeros(1 << bits, np.uint32), power(MATCHED), -MATCHED, np.uint64(0)
    for i in range(min(len(text), 0xFFFFFFFE)):
        if text[i] == BEGIN:
            start = i
        elif i - start >= MATCHED and start >= 0:
            last[mixed(np.uint64(0), now, grown) >> np.uint64(64 - bits)] = i + 1
        now = appended(now, text[i])
        if i >= MATCHED:
            now -= appended(np.uint64(0), text[i - MATCHED]) * grown
    return last


@dataclass(frozen=True)
class Tables:
    """All that is looked up in."""

    kinds: Sequence[int]
    """Of contexts."""
    of: Sequence[tuple[np.ndarray, np.ndarray]]
    """``first`` and rows of each."""
    last: np.ndarray
    text: np.ndarray
