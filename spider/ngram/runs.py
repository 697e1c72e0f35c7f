"""Runs: counts of the contexts of a text as sorted pairs of key and count, on disk and merged.

Counting is the map step of a map-reduce: which symbol follows which context, and how often, in a part of a
text. For each kind of context it writes *runs* of two files. ``*.keys.npy`` holds the keys, ``hash << 8 |
symbol`` (uint64, rising, each once), and ``*.counts.npy`` their counts. A part is counted in pieces of
`PIECE` symbols, with one run each, so the memory of a job is bounded for parts and documents of any size. 32
bits hold the counts of a piece; merged counts have 64 bits.

A run depends on the text alone, and runs can be added in any order. They are merged in groups of `FAN_IN`,
and the merged runs in groups again, until one group is left. The runs of a group are read side by side, each
from its beginning to its end, in slices of the keys' range. So the number of open files and the memory are
bounded, and each pair is read once in each level of groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from spider.config.ngram import name_of
from spider.files import replacing
from spider.ngram.contexts import contexts_of, prefix_hashes, reach
from spider.ngram.layout import BEGIN
from spider.pace import Pace
from spider.requests import FAN_IN, PIECE, SLICE

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
