"""Tables: the counts of a whole text, packed so that a context is found with two reads of memory.

A table has a row for each context of one kind, in the order of the contexts' hashes. A row is found through
the first row of its bucket (the top bits of the hash; about eight contexts share a bucket). Bytes of a row:

    0, 1    fingerprint: the 16 low bits of the hash
    2, 3    q(T), q(D): how often the context occurs, and how many different symbols follow it
    4, ...  K pairs (symbol, q(count)), the most frequent first, the smaller symbol first among equals; q = 0
            for unused pairs

q(c) = round(8 log2(1 + c)) is exact to 9 percent, and 255 for counts from about 2^32 on. A look-up of a
context that is not in the table finds another one with a probability of about 8 / 65,536. The head learns to
discount this noise.

Rows are numbered in 32 bits, or in 64 bits in a table of more than 2^32 rows.

From some order on, nearly all contexts occur once. The tables leave those out, and the match model covers
them: for the hash of `MATCH_LENGTH` symbols, ``last`` holds the position after their last occurrence in the
text. The reader compares the text backwards from there, so a collision of hashes does no harm.

Merging is the reduce step of a map-reduce. It cuts runs by the hash's top bits into slices of bounded size,
and merges, packs and writes each slice before it reads the next (`spider.ngram.runs`). The size of a bucket
depends on the number of rows, which is only known at the end. So rows are counted in finer buckets, on disk,
which are joined at the end. A table is a function of the text, however the text was cut into parts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spider.config.ngram import name_of
from spider.ngram.contexts import appended, compiled, mixed, power
from spider.ngram.layout import BEGIN
from spider.ngram.runs import Reader, combined, growing, pairs_in, slices, slices_for, stretches
from spider.requests import ENTRIES, FAN_IN, PIECE, SLICE

#: Symbols of a context that is found again in the index's text.
MATCH_LENGTH = 12
#: Symbols of a text whose positions are stored, in 32 bits.
_POSITIONS = (1 << 32) - 2
#: Buckets whose numbers of rows are read at a time.
_BUCKETS = 1 << 20


def successors(kind: int) -> int:
    """Return K of a kind of context. Short contexts are few, and many symbols follow them."""
    if kind < 0:
        return 6
    return 30 if kind <= 3 else 14 if kind == 4 else 6 if kind <= 8 else 4


def width(kind: int) -> int:
    """Return the bytes of a row."""
    return 4 + 2 * successors(kind)


@compiled
def quantized(count):  # type: ignore[no-untyped-def]
    """Return q of a count, which fits into a byte for any count."""
    return min(255, round(8 * np.log2(1.0 + count)))


@compiled
def _pack(keys, counts, per_row, least, contexts, rows):  # type: ignore[no-untyped-def]
    """Write a row for each context of a run that occurs at least ``least`` times.

    Returns the number of rows, and the number of contexts that were left out.
    """
    n = i = left_out = 0
    values = np.zeros(per_row, np.int64)
    symbols = np.zeros(per_row, np.uint8)
    while i < len(keys):
        context = keys[i] >> np.uint64(8)
        different = 0
        used = 0
        total = np.int64(0)
        while i < len(keys) and keys[i] >> np.uint64(8) == context:
            value = np.int64(counts[i])
            symbol = np.uint8(keys[i] & np.uint64(0xFF))
            total += value
            different += 1
            rank = used
            while rank > 0 and values[rank - 1] < value:  # symbols rise, so equals stay in their order
                rank -= 1
            if rank < per_row:
                used = min(used + 1, per_row)
                for k in range(used - 1, rank, -1):
                    values[k] = values[k - 1]
                    symbols[k] = symbols[k - 1]
                values[rank] = value
                symbols[rank] = symbol
            i += 1
        if total < least:
            left_out += 1
            continue
        contexts[n] = context
        rows[n, 0] = np.uint8((context >> np.uint64(8)) & np.uint64(0xFF))
        rows[n, 1] = np.uint8(context & np.uint64(0xFF))
        rows[n, 2] = quantized(total)
        rows[n, 3] = quantized(different)
        for k in range(per_row):
            rows[n, 4 + 2 * k] = symbols[k] if k < used else 0
            rows[n, 5 + 2 * k] = quantized(values[k]) if k < used else 0
        n += 1
    return n, left_out


def bucket_bits(contexts: int) -> int:
    """Return the number of top bits of a hash that name its bucket, with about eight contexts in each."""
    return max(1, min(32, int(np.ceil(np.log2(max(1, contexts) / 8)))))


def position_bits(symbols: float) -> int:
    """Return the number of top bits of a hash that name its entry in ``last``: 2 entries per 3 symbols."""
    return max(8, min(32, round(np.log2(symbols / 1.5))))


def build(
    runs: Sequence[Path], kind: int, least: int, folder: Path, size: int = SLICE, most: int = FAN_IN
) -> tuple[int, int]:
    """Write the table of one kind of context from its runs: ``{kind}.rows.npy`` and ``{kind}.first.npy``.

    Contexts that occur less than ``least`` times are left out. Returns the number of contexts in the table,
    and the number of those left out.
    """
    name = name_of(kind)
    scratch = folder / f".{name}.merging"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    total = left_out = 0
    try:
        merged = combined(runs, scratch, most, size)
        pairs = pairs_in(merged)
        finest = bucket_bits(pairs)
        number = min(slices_for(pairs, size), 1 << finest)
        each = (1 << finest) // number
        with (
            growing(folder / f"{name}.rows.npy", np.uint8, width(kind)) as add_rows,
            # Counts of 32 bits suffice: a bucket has 8 contexts on average and at most 2^(56 - finest).
            growing(scratch / "buckets.npy", np.uint32) as add_buckets,
        ):
            for s, (keys, counts) in enumerate(slices(merged, number)):
                contexts = np.empty(len(keys), np.uint64)
                rows = np.empty((len(keys), width(kind)), np.uint8)
                n, skipped = _pack(keys, counts, successors(kind), least, contexts, rows)
                buckets = (contexts[:n] >> np.uint64(56 - finest)).astype(np.int64) - s * each
                add_rows(rows[:n])
                add_buckets(np.bincount(buckets, minlength=each).astype(np.uint32))
                total += n
                left_out += skipped
        joined = 1 << (finest - bucket_bits(total))
        write_first(folder / f"{name}.first.npy", _joined(scratch / "buckets.npy", joined), total)
    finally:
        shutil.rmtree(scratch)
    return total, left_out


def _joined(buckets: Path, number: int) -> Iterator[np.ndarray]:
    """Yield the number of rows in each bucket, which joins ``number`` stored buckets."""
    with Reader(buckets) as stored:
        block = max(number, _BUCKETS)
        for start in range(0, stored.length, block):
            yield stored.read(start, start + block).reshape(-1, number).sum(1, np.int64)


def write_first(path: Path, blocks: Iterable[np.ndarray], rows: int) -> None:
    """Write the first row of each bucket, then ``rows``, from the numbers of rows in buckets, in blocks."""
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
def _last_positions(text, before, at, bits, low, last):  # type: ignore[no-untyped-def]
    """Set the entries of ``last``, which begins at entry ``low``, from the positions of a stretch.

    The first ``before`` symbols stand before the stretch, which begins at position ``at`` of the text.
    """
    factor = power(MATCH_LENGTH)
    start = 0
    now = np.uint64(0)
    for i in range(len(text)):
        if text[i] == BEGIN:
            start = i
        elif i >= before and i - start >= MATCH_LENGTH:
            entry = np.int64(mixed(np.uint64(0), now, factor) >> np.uint64(64 - bits)) - low
            if 0 <= entry < len(last):
                last[entry] = at + i - before + 1
        now = appended(now, text[i])
        if i >= MATCH_LENGTH:
            now -= appended(np.uint64(0), text[i - MATCH_LENGTH]) * factor


def last_positions(text: Path, bits: int, size: int = ENTRIES, piece: int = PIECE) -> Iterator[np.ndarray]:
    """Yield ``last`` of a stored text in blocks of ``size`` entries: (2^bits,) uint32 in all.

    An entry belongs to the top bits of the hash of `MATCH_LENGTH` symbols. It is one more than the last
    position after such symbols, among the first 2^32 - 2 of the text, or 0 if there is none. These symbols
    are read once per block, so at most 64 times with blocks of the usual size.
    """
    for low in range(0, 1 << bits, size):
        last = np.zeros(min(size, 1 << bits), np.uint32)
        for stretch in stretches(text, MATCH_LENGTH, piece, _POSITIONS):
            _last_positions(stretch.text, stretch.before, stretch.at, bits, low, last)
        yield last


@dataclass(frozen=True)
class Tables:
    """The arrays of an n-gram index."""

    kinds: Sequence[int]
    """Kinds of contexts."""
    of: Sequence[tuple[np.ndarray, np.ndarray]]
    """``first`` and rows of each kind."""
    last: np.ndarray
    text: np.ndarray
