"""Tables: the counts of a whole text, packed so that a context is found with two reads of memory.

Of an order, all contexts in the order of their hashes, a row each, found through the first row of their
bucket (the top bits of the hash; some eight contexts share one). A row is, in bytes:

    0, 1    fingerprint: the 16 bits of the hash below the bucket's
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
each slice is merged and packed before the next is read. The buckets come last, by the number of rows, so that
a table is a function of the text, however it was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numba import njit

from spider.memory.contexts import mixed, power, prefix_hashes
from spider.memory.symbols import BEGIN

#: Symbols of the contexts that are found again in the text.
MATCHED = 12
#: Pairs of key and count that are merged at a time.
SLICE = 1 << 24


def successors(order: int) -> int:
    """K of an order: short contexts are few, and much may follow them."""
    return 30 if order <= 3 else 14 if order == 4 else 6 if order <= 8 else 4


def width(order: int) -> int:
    """Bytes of a row."""
    return 4 + 2 * successors(order)


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def quantized(count):  # type: ignore[no-untyped-def]
    return round(8 * np.log2(1.0 + count))


@njit(nogil=True, cache=True)
def _pack(keys, counts, per, least, contexts, rows):  # type: ignore[no-untyped-def]
    """Write a row for each context of a run that occurs ``least`` times, but for its fingerprint; returns how
    many rows there are, and how many contexts were left out."""
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
        rows[n, 2], rows[n, 3] = quantized(total), quantized(different)
        for k in range(per):
            there = k < kept
            rows[n, 4 + 2 * k] = symbols[k] if there else 0
            rows[n, 5 + 2 * k] = quantized(room[k]) if there else 0
        n += 1
    return n, left


@njit(nogil=True, cache=True)
def _index(contexts, shift, first, rows):  # type: ignore[no-untyped-def]
    """Write the fingerprint of each row, and count it in its bucket's entry of ``first``."""
    for n in range(len(contexts)):
        fingerprint = (contexts[n] >> np.uint64(shift - 16)) & np.uint64(0xFFFF)
        rows[n, 0], rows[n, 1] = fingerprint >> np.uint64(8), fingerprint & np.uint64(0xFF)
        first[contexts[n] >> np.uint64(shift)] += 1


def bucket_bits(contexts: int) -> int:
    """Top bits of a hash that name its bucket, some eight contexts in each."""
    return max(1, min(32, int(np.ceil(np.log2(max(1, contexts) / 8)))))


def slices(runs: Sequence[tuple[np.ndarray, np.ndarray]], size: int = SLICE) -> Iterator[Sequence[Any]]:
    """Runs cut at the same keys, contexts whole, so that few slices hold more than so many pairs."""
    total = sum(len(keys) for keys, _ in runs)
    count = 1 << max(0, int(np.ceil(np.log2(max(1, total) / size))))
    bounds = [np.uint64((i << 64) // count) for i in range(1, count)]
    cuts = [[0, *np.searchsorted(keys, np.array(bounds, np.uint64)).tolist(), len(keys)] for keys, _ in runs]
    for s in range(count):
        yield [(keys[c[s] : c[s + 1]], counts[c[s] : c[s + 1]])
               for (keys, counts), c in zip(runs, cuts, strict=True)]  # fmt: skip


def build(
    runs: Sequence[tuple[np.ndarray, np.ndarray]], order: int, least: int, size: int = SLICE
) -> tuple[np.ndarray, np.ndarray, int]:
    """One order's table: ``first`` (buckets + 1,) uint32, rows (contexts, width) uint8, and how many contexts
    were left out."""
    parts, known, left = [], [], 0
    for part in slices(runs, size):
        keys, counts = merge(part)
        contexts, rows = np.empty(len(keys), np.uint64), np.empty((len(keys), width(order)), np.uint8)
        n, out = _pack(keys, counts, successors(order), least, contexts, rows)
        parts.append(rows[:n].copy())
        known.append(contexts[:n].copy())
        left += out
    # Only now is it known how many there are, however the text was cut.
    rows = np.concatenate(parts)
    bits = bucket_bits(len(rows))
    first, at = np.zeros((1 << bits) + 1, np.uint32), 0
    for contexts in known:
        _index(contexts, 56 - bits, first[1:], rows[at : at + len(contexts)])
        at += len(contexts)
    np.cumsum(first, out=first)
    return first, rows, left


@njit(nogil=True, cache=True)
def last_places(text: np.ndarray, bits: int) -> np.ndarray:
    """By the top bits of the hash of `MATCHED` symbols, one more than the last place that stands after them;
    0 where none does: (2^bits,) uint32."""
    hashes, grown = prefix_hashes(text), power(MATCHED)
    last, start = np.zeros(1 << bits, np.uint32), -MATCHED
    for i in range(min(len(text), 0xFFFFFFFE)):
        if text[i] == BEGIN:
            start = i
        elif i - start >= MATCHED and start >= 0:
            last[mixed(hashes[i - MATCHED], hashes[i], grown) >> np.uint64(64 - bits)] = i + 1
    return last


@dataclass(frozen=True)
class Tables:
    """All that is looked up in."""

    orders: Sequence[int]
    of: Sequence[tuple[np.ndarray, np.ndarray]]
    """``first`` and rows of each order."""
    last: np.ndarray
    text: np.ndarray

    @cached_property
    def shifts(self) -> list[int]:
        return [56 - (len(first) - 1).bit_length() + 1 for first, _ in self.of]
