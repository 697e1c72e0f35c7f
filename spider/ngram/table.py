"""Tables: the counts of a whole text, packed so that a context is found with two reads of memory.

Of one kind, all contexts in the order of their hashes, a row each, found through the first row of their
bucket (the top bits of the hash; some eight contexts share one). A row is, in bytes:

    0, 1    fingerprint: the 16 low bits of the hash
    2, 3    q(T), q(D): how often the context occurs, and how many different symbols follow it
    4, ...  K pairs (symbol, q(count)), the most frequent first, the smaller symbol first among equals; q = 0
            where there are fewer

q(c) = round(8 log2(1 + c)), to 9 percent, and 255 for all counts above four thousand million. A context that
is not in the table is taken for another with a chance of some 8 / 65,536 a look-up: noise that the network
prices, not a leak.

Rows are numbered in 32 bits, and in 64 bits in a table that has more than four thousand million rows.

Contexts seen less than twice are left out from some order on: there almost all are, and what followed them
stands in the text itself. ``last`` holds for the hash of `MATCHED` symbols the last place that they stood
before; who follows it compares the text backwards, so a hash that two contexts share does no harm.

Merging is the reduce step of a map-reduce. It cuts runs by the hash's top bits into slices of bounded size,
and merges, packs and writes each slice before it reads the next (`spider.ngram.runs`). The size of a bucket
follows from the number of rows, which is known last. So rows are counted in finer buckets, on disk, which are
joined at the end. A table is a function of the text, however that was cut, and memory is bounded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spider.ngram.contexts import appended, compiled, mixed, name_of, power
from spider.ngram.layout import BEGIN
from spider.ngram.runs import Reader, combined, growing, pairs_in, slices, slices_for, stretches
from spider.requests import ENTRIES, FAN_IN, PIECE, SLICE

#: Symbols of the contexts that are found again in the text.
MATCHED = 12
#: Buckets whose numbers of rows are read at a time.
_BUCKETS = 1 << 20


def successors(kind: int) -> int:
    """K of a kind of contexts: short ones are few, and much may follow them."""
    if kind < 0:
        return 6
    return 30 if kind <= 3 else 14 if kind == 4 else 6 if kind <= 8 else 4


def width(kind: int) -> int:
    """Bytes of a row."""
    return 4 + 2 * successors(kind)


@compiled
def quantized(count):  # type: ignore[no-untyped-def]
    """Return q of a count; it fits into a byte for any count."""
    return min(255, round(8 * np.log2(1.0 + count)))


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
def _tally(contexts, shift, first, buckets):  # type: ignore[no-untyped-def]
    """Count the contexts in each bucket; ``first`` is the number of the first of these buckets."""
    for context in contexts:
        buckets[(context >> np.uint64(shift)) - np.uint64(first)] += 1


def bucket_bits(contexts: int) -> int:
    """Top bits of a hash that name its bucket, some eight contexts in each."""
    return max(1, min(32, int(np.ceil(np.log2(max(1, contexts) / 8)))))


def place_bits(symbols: float) -> int:
    """Top bits of a hash that name its entry in ``last``: two entries for three symbols of the text."""
    return max(8, min(32, round(np.log2(symbols / 1.5))))


def build(
    runs: Sequence[Path], kind: int, least: int, folder: Path, size: int = SLICE, most: int = FAN_IN
) -> tuple[int, int]:
    """Write the table of one kind of contexts from its runs: ``{kind}.rows.npy`` and ``{kind}.first.npy``.

    Returns how many contexts the table holds, and how many were left out.
    """
    name = name_of(kind)
    scratch = folder / f".{name}.merging"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    held = left_out = 0
    try:
        few = combined(runs, scratch, most, size)
        pairs = pairs_in(few)
        finest = bucket_bits(pairs)
        number = min(slices_for(pairs, size), 1 << finest)
        each = (1 << finest) // number
        with (
            growing(folder / f"{name}.rows.npy", np.uint8, width(kind)) as keep,
            # Counts of 32 bits suffice: a bucket has 8 contexts on average and at most 2^(56 - finest).
            growing(scratch / "buckets.npy", np.uint32) as keep_buckets,
        ):
            for s, (keys, counts) in enumerate(slices(few, number)):
                contexts = np.empty(len(keys), np.uint64)
                rows = np.empty((len(keys), width(kind)), np.uint8)
                n, left = _pack(keys, counts, successors(kind), least, contexts, rows)
                buckets = np.zeros(each, np.uint32)
                _tally(contexts[:n], 56 - finest, s * each, buckets)
                keep(rows[:n])
                keep_buckets(buckets)
                held += n
                left_out += left
        joined = 1 << (finest - bucket_bits(held))
        write_first(folder / f"{name}.first.npy", _joined(scratch / "buckets.npy", joined), held)
    finally:
        shutil.rmtree(scratch)
    return held, left_out


def _joined(buckets: Path, number: int) -> Iterator[np.ndarray]:
    """Yield the numbers of rows in buckets, each made of ``number`` stored buckets."""
    with Reader(buckets) as stored:
        at_once = max(number, _BUCKETS)
        for start in range(0, stored.length, at_once):
            yield stored.read(start, min(stored.length, start + at_once)).reshape(-1, number).sum(1, np.int64)


def write_first(path: Path, blocks: Iterable[np.ndarray], rows: int) -> None:
    """Write the first row of each bucket, then ``rows``, from blocks of the numbers of rows in buckets."""
    dtype = np.uint32 if rows <= np.iinfo(np.uint32).max else np.int64
    total = 0
    with growing(path, dtype) as append:
        append(np.zeros(1, dtype))
        for block in blocks:
            ends = total + np.cumsum(block, dtype=np.int64)
            append(ends.astype(dtype))
            total = int(ends[-1])
    assert total == rows


@compiled
def _last_places(text, before, at, bits, low, last):  # type: ignore[no-untyped-def]
    """Note the places of a stretch whose hash's top bits, less ``low``, are an index of ``last``.

    The first ``before`` symbols stand before the stretch. The symbol behind them is the text's symbol ``at``.
    """
    grown, start, now = power(MATCHED), 0, np.uint64(0)
    for i in range(len(text)):
        place = at + i - before
        if place >= 0xFFFFFFFE:
            break
        if text[i] == BEGIN:
            start = i
        elif i >= before and i - start >= MATCHED:
            entry = np.int64(mixed(np.uint64(0), now, grown) >> np.uint64(64 - bits)) - low
            if 0 <= entry < len(last):
                last[entry] = place + 1
        now = appended(now, text[i])
        if i >= MATCHED:
            now -= appended(np.uint64(0), text[i - MATCHED]) * grown


def last_places(text: Path, bits: int, size: int = ENTRIES, piece: int = PIECE) -> Iterator[np.ndarray]:
    """Yield ``last`` of a stored text in blocks of ``size`` entries: (2^bits,) uint32 in all.

    An entry stands for the top bits of the hash of `MATCHED` symbols. It is one more than the last place that
    stands after such symbols, among the first 2^32 - 2 of the text, and 0 where none does. The text is read
    once a block.
    """
    for low in range(0, 1 << bits, size):
        last = np.zeros(min(size, 1 << bits), np.uint32)
        for stretch in stretches(text, MATCHED, piece):
            _last_places(stretch.text, stretch.before, stretch.at, bits, low, last)
        yield last


@dataclass(frozen=True)
class Tables:
    """All that is looked up in."""

    kinds: Sequence[int]
    """Of contexts."""
    of: Sequence[tuple[np.ndarray, np.ndarray]]
    """``first`` and rows of each."""
    last: np.ndarray
    text: np.ndarray
