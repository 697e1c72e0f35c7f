"""Count the contexts of a text into sorted runs, and merge the runs into tables: a map-reduce on disk.

*Map*: which symbol follows which context, and how often, in a part of a text. For each kind of context
`write_runs` writes runs of two files. ``*.keys.npy`` holds the keys, ``hash << 8 | symbol`` (uint64, rising,
each once), and ``*.counts.npy`` their counts. A part is counted in pieces of `PIECE` symbols, with one run
each, so the memory of a job is bounded for parts and documents of any size. 32 bits hold the counts of a
piece; merged counts have 64 bits. A run depends on the text alone, and runs can be added in any order.

*Merge*: runs are merged in groups of `FAN_IN`, and the merged runs in groups again, until one group is left.
The runs of a group are read side by side, each from its beginning to its end, in slices of the keys' range.
So the number of open files and the memory are bounded, and each pair is read once in each level of groups.

*Reduce*: a table has a row for each context of one kind, in the order of the contexts' hashes. A row is found
with two reads of memory, through the first row of its bucket (the top bits of the hash; about eight contexts
share a bucket). Bytes of a row:

    0, 1    fingerprint: the 16 low bits of the hash
    2, 3    q(T), q(D): how often the context occurs, and how many different symbols follow it
    4, ...  K pairs (symbol, q(count)), the most frequent first, the smaller symbol first among equals; q = 0
            for unused pairs

q(c) = round(8 log2(1 + c)) is exact to 9 percent, and 255 for counts from about 2^32 on. A look-up of a
context that is not in the table finds another one with a probability of about 8 / 65,536. The head learns to
discount this noise. Rows are numbered in 32 bits, or in 64 bits in a table of more than 2^32 rows.

From some order on, nearly all contexts occur once. The tables leave those out, and the match model covers
them: for the hash of `MATCH_LENGTH` symbols, ``last`` holds the position after their last occurrence in the
text. The reader compares the text backwards from there, so a collision of hashes does no harm.

Each slice is merged, packed and written before the next is read. The size of a bucket depends on the number
of rows, which is only known at the end. So rows are counted in finer buckets, on disk, which are joined at
the end. A table is a function of the text, however the text was cut into parts.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from spider.common.files import replacing
from spider.common.formatting import Pace
from spider.config.model import name_of
from spider.config.requests import ENTRIES, FAN_IN, PIECE, SLICE
from spider.data.ngram.contexts import appended, compiled, contexts_of, mixed, power, prefix_hashes, reach
from spider.data.ngram.layout import BEGIN

#: Pairs of a run that are read at a time.
_BLOCK = 1 << 14

# ------------------------------------------------------------------------------------------- arrays on disk


def save(path: Path, array: np.ndarray) -> None:
    """Write an array. `np.save` raises no error if the disk is full at the last kilobytes."""
    with growing(path, array.dtype, *array.shape[1:]) as append:
        append(array)


@contextlib.contextmanager
def growing(path: Path, dtype: Any, *columns: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Write an array whose rows are appended; their number is written into the header at the end."""
    dtype = np.dtype(dtype)
    with replacing(path) as temporary, temporary.open("wb") as file:
        n = 0

        def write_header() -> None:  # numpy pads it to the same length for any n
            descr = np.lib.format.dtype_to_descr(dtype)
            header = {"descr": descr, "fortran_order": False, "shape": (n, *columns)}
            np.lib.format.write_array_header_1_0(file, header)

        def append(rows: np.ndarray) -> None:
            nonlocal n
            assert rows.shape[1:] == columns and rows.dtype == dtype
            file.write(np.ascontiguousarray(rows).data)
            n += len(rows)

        write_header()
        yield append
        file.seek(0)
        write_header()


class Reader:
    """An array of one dimension on disk. It is read without mapping it, so that memory stays bounded.

    Raises:
        ValueError: The file is not such an array.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("rb")
        try:
            np.lib.format.read_magic(self._file)
            (self.length,), _, self.dtype = np.lib.format.read_array_header_1_0(self._file)
        except ValueError as error:
            self._file.close()
            raise ValueError(f"{path}: not an array of one dimension ({error})") from None
        self._first = self._file.tell()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the elements ``start`` to ``stop``, or to the end; `ValueError` if the file is truncated."""
        stop = min(stop, self.length)
        self._file.seek(self._first + start * self.dtype.itemsize)
        values = np.fromfile(self._file, self.dtype, max(0, stop - start))
        if len(values) < stop - start:
            raise ValueError(
                f"{self.path}: ends after {start + len(values):,} of {self.length:,} elements; delete "
                f"{self.path.parents[1]} and run again"
            )
        return values


def length_of(path: Path) -> int:
    """Return the number of elements of an array on disk."""
    with Reader(path) as array:
        return array.length


# ------------------------------------------------------------------------------------------------ counting


class Stretch(NamedTuple):
    """Consecutive symbols of a text, with some symbols before them."""

    text: np.ndarray
    before: int
    """Number of these symbols that stand before the stretch."""
    at: int
    """Position of the first symbol of the stretch in the whole text."""


def stretches(text: Path, back: int, size: int, most: int | None = None) -> Iterator[Stretch]:
    """Divide a stored text, or its first ``most`` symbols, into stretches of ``size`` symbols.

    Each has up to ``back`` symbols before it. Text before the first beginning of a document is left out.
    """
    with Reader(text) as stored:
        first = _first_begin(stored, size)
        end = stored.length if most is None else min(most, stored.length)
        for at in range(first, end, size):
            start = max(first, at - back)
            yield Stretch(stored.read(start, min(at + size, end)), at - start, at)


def _first_begin(stored: Reader, size: int) -> int:
    """Return where the first document of a text begins, or the text's length."""
    for at in range(0, stored.length, size):
        begins = np.flatnonzero(stored.read(at, at + size) == BEGIN)
        if len(begins):
            return at + int(begins[0])
    return stored.length


def _keys(text: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """Return the keys of all positions that have a context."""
    counted = (contexts != 0) & (text != BEGIN)
    return (contexts[counted] & ~np.uint64(0xFF)) | text[counted]


def _first_of_equals(keys: np.ndarray) -> np.ndarray:
    """Return a mask of the sorted keys that differ from the key before."""
    return np.append(True, keys[1:] != keys[:-1])[: len(keys)]


def count(text: np.ndarray, kind: int, before: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the run of one kind of context over N symbols: keys (M,) uint64, counts (M,) uint32.

    The first ``before`` symbols are not counted; they are only contexts of the others.
    """
    keys = _keys(text[before:], contexts_of(text, prefix_hashes(text), kind, before, len(text)))
    keys.sort()
    first = _first_of_equals(keys)
    counts = np.diff(np.flatnonzero(first), append=len(keys)).astype(np.uint32)
    return keys[first], counts


def write_runs(folder: Path, kinds: Sequence[int], piece: int = PIECE) -> None:
    """Count the symbols of ``folder/text.npy``, and write the runs into the folder."""
    back = max(map(reach, kinds))
    pace = Pace("counted {done} of {total} bytes", length_of(folder / "text.npy"))
    for number, stretch in enumerate(stretches(folder / "text.npy", back, piece)):
        own = len(stretch.text) - stretch.before
        for done, kind in enumerate(kinds, start=1):
            keys, counts = count(stretch.text, kind, stretch.before)
            path = folder / f"{name_of(kind)}.{number:03d}.keys.npy"
            save(path, keys)
            save(_counts_of(path), counts)
            pace(stretch.at + own * done // len(kinds))


def runs_of(folder: Path, kind: int) -> list[Path]:
    """Return the runs of one kind of context in a folder, as the paths of their keys."""
    return sorted(folder.glob(f"{name_of(kind)}.*.keys.npy"))


def pairs_in(runs: Sequence[Path]) -> int:
    """Return the number of pairs of runs."""
    return sum(map(length_of, runs))


def _counts_of(keys: Path) -> Path:
    return keys.with_name(keys.name.removesuffix("keys.npy") + "counts.npy")


# ------------------------------------------------------------------------------------------------- merging


class _Run:
    """A run that is read from its beginning to its end."""

    def __init__(self, path: Path, files: contextlib.ExitStack) -> None:
        self._key_file = files.enter_context(Reader(path))
        self._count_file = files.enter_context(Reader(_counts_of(path)))
        if self._key_file.length != self._count_file.length:
            raise ValueError(
                f"{path}: {self._key_file.length:,} keys, but {_counts_of(path).name} has "
                f"{self._count_file.length:,} counts; delete {path.parents[1]} and run again"
            )
        self._read = 0
        self._keys = np.empty(0, np.uint64)
        self._counts = np.empty(0, np.int64)

    def below(self, bound: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the next pairs whose keys are below ``bound`` (None: all the rest)."""
        keys = [self._keys[:0]]
        counts = [self._counts[:0]]
        while len(self._keys) or self._read < self._key_file.length:
            if not len(self._keys):
                self._keys = self._key_file.read(self._read, self._read + _BLOCK)
                self._counts = self._count_file.read(self._read, self._read + _BLOCK)
                self._read += len(self._keys)
            end = len(self._keys) if bound is None else int(np.searchsorted(self._keys, np.uint64(bound)))
            keys.append(self._keys[:end])
            counts.append(self._counts[:end].astype(np.int64))
            self._keys = self._keys[end:]
            self._counts = self._counts[end:]
            if len(self._keys):
                break
        return np.concatenate(keys), np.concatenate(counts, dtype=np.int64)


def merge(runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Merge any number of runs in memory, and add the counts of equal keys."""
    keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in runs)])
    counts = np.concatenate([np.empty(0, np.int64), *(counts for _, counts in runs)])
    order = np.argsort(keys, kind="stable")  # merges the runs, because each of them is sorted
    keys = keys[order]
    first = _first_of_equals(keys)
    return keys[first], np.add.reduceat(counts[order], np.flatnonzero(first))


def slices(runs: Sequence[Path], number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the merged pairs of stored runs, cut into ``number`` equal ranges of the hash.

    ``number`` is a power of two, so no context is in two slices.
    """
    with contextlib.ExitStack() as files:
        opened = [_Run(path, files) for path in runs]
        for s in range(1, number + 1):
            bound = None if s == number else (s << 64) // number
            yield merge([run.below(bound) for run in opened])


def slices_for(pairs: int, size: int = SLICE) -> int:
    """Return the number of slices, a power of two, that hold about ``size`` pairs or fewer each."""
    return 1 << max(0, int(np.ceil(np.log2(max(1, pairs) / size))))


def combined(runs: Sequence[Path], scratch: Path, most: int = FAN_IN, size: int = SLICE) -> list[Path]:
    """Merge stored runs in groups until at most ``most`` are left, and write merged ones into ``scratch``."""
    left = list(runs)
    level = 0
    while len(left) > most:
        groups = [left[i : i + most] for i in range(0, len(left), most)]
        left = []
        for n, group in enumerate(groups):
            keys = scratch / f"{level}.{n:06d}.keys.npy"
            with growing(keys, np.uint64) as add_keys, growing(_counts_of(keys), np.int64) as add_counts:
                for slice_keys, slice_counts in slices(group, slices_for(pairs_in(group), size)):
                    add_keys(slice_keys)
                    add_counts(slice_counts)
            for path in group:
                if path.parent == scratch:  # written by the previous level
                    path.unlink()
                    _counts_of(path).unlink()
            left.append(keys)
        level += 1
    return left


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
def _positions(text, before, at, bits, found):  # type: ignore[no-untyped-def]
    """Write the entry and the position after each `MATCH_LENGTH` symbols of a stretch; return their number.

    The first ``before`` symbols stand before the stretch, which begins at position ``at`` of the text.
    """
    factor = power(MATCH_LENGTH)
    start = n = 0
    now = np.uint64(0)
    for i in range(len(text)):
        if text[i] == BEGIN:
            start = i
        elif i >= before and i - start >= MATCH_LENGTH:
            found[n, 0] = mixed(np.uint64(0), now, factor) >> np.uint64(64 - bits)
            found[n, 1] = at + i - before + 1
            n += 1
        now = appended(now, text[i])
        if i >= MATCH_LENGTH:
            now -= appended(np.uint64(0), text[i - MATCH_LENGTH]) * factor
    return n


def last_positions(text: Path, bits: int, size: int = ENTRIES, piece: int = SLICE) -> Iterator[np.ndarray]:
    """Yield ``last`` of a stored text in blocks of ``size`` entries: (2^bits,) uint32 in all.

    An entry belongs to the top bits of the hash of `MATCH_LENGTH` symbols. It is one more than the last
    position after such symbols, among the first 2^32 - 2 of the text, or 0 if there is none. The text is read
    once. A temporary file for each block, at most 64 of the usual size, holds its entries and their positions
    in the order of the text, 8 bytes a symbol.
    """
    size = min(size, 1 << bits)
    with contextlib.ExitStack() as opened:
        blocks = range((1 << bits) // size)
        files = [opened.enter_context(tempfile.TemporaryFile(dir=text.parent)) for _ in blocks]
        for stretch in stretches(text, MATCH_LENGTH, piece, _POSITIONS):
            found = np.empty((len(stretch.text), 2), np.uint32)
            found = found[: _positions(stretch.text, stretch.before, stretch.at, bits, found)]
            block = (found[:, 0] // size).astype(np.uint8)
            found = found[np.argsort(block, kind="stable")]
            ends = np.cumsum(np.bincount(block, minlength=len(files)))
            for file, own in zip(files, np.split(found, ends[:-1]), strict=True):
                own.tofile(file)
        for file in files:
            last = np.zeros(size, np.uint32)
            file.seek(0)
            while len(read := np.fromfile(file, np.uint32, 2 * piece)):
                last[read[::2] % size] = read[1::2]  # of equal entries the last one stays
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
