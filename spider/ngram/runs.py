"""Arrays on disk, and runs: sorted pairs of key and count, of which any number is merged with few files open.

An array is an ``.npy`` file. It is written whole or not at all, and read in stretches.

A run is two files: ``*.keys.npy`` holds keys ``hash << 8 | symbol`` (uint64, rising, each once) and
``*.counts.npy`` how often each occurs. A run of counting covers at most `PIECE` symbols, so 32 bits hold its
counts. Merged counts have 64 bits.

Runs are merged in groups of `FAN_IN`, and the merged runs in groups again, until one group is left. Its runs
are read side by side, each from its beginning to its end, in slices of the keys' range. So the number of open
files and the n-gram index are bounded, and each pair is read once in each level of groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from spider.files import replacing
from spider.ngram.contexts import compiled
from spider.ngram.layout import BEGIN
from spider.requests import FAN_IN, SLICE

#: Pairs of a run that are read at a time.
_BLOCK = 1 << 14


def save(path: Path, array: np.ndarray) -> None:
    """Write an array. `np.save` does not raise an error where the disk is full at the last kilobytes."""
    array = np.ascontiguousarray(array)
    with replacing(path) as beside, beside.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


@contextlib.contextmanager
def growing(path: Path, dtype: Any, *columns: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Write an array row by row as its rows come; their number is known when the last has come."""
    dtype = np.dtype(dtype)
    with replacing(path) as beside, beside.open("wb") as file:
        n = 0

        def header() -> None:  # it has the same length for any n
            described = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": (n, *columns),
            }
            np.lib.format.write_array_header_1_0(file, described)

        def append(rows: np.ndarray) -> None:
            nonlocal n
            assert rows.shape[1:] == columns and rows.dtype == dtype
            file.write(np.ascontiguousarray(rows).data)
            n += len(rows)

        header()
        yield append
        file.seek(0)
        header()


class Reader:
    """An array of one dimension on disk, read without mapping it, so that what is held stays bounded.

    Raises:
        ValueError: the file is not such an array.
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
        """Return the elements ``start`` to ``stop``, or to the end; `ValueError` where the file is short."""
        stop = min(stop, self.length)
        self._file.seek(self._first + start * self.dtype.itemsize)
        values = np.fromfile(self._file, self.dtype, max(0, stop - start))
        if len(values) < stop - start:
            raise ValueError(
                f"{self.path}: ends after {start + len(values):,} of {self.length:,} elements; delete its "
                "folder and run the job that wrote it again"
            )
        return values


def length_of(path: Path) -> int:
    """Return the number of elements of an array on disk."""
    with Reader(path) as array:
        return array.length


class Stretch(NamedTuple):
    """Consecutive symbols of a text, with some symbols before them."""

    text: np.ndarray
    before: int
    """Number of these symbols that stand before the stretch."""
    at: int
    """Number of the first symbol of the stretch in the whole text."""


def stretches(text: Path, back: int, size: int) -> Iterator[Stretch]:
    """Divide a stored text, from the first beginning of a document on, into stretches of ``size`` symbols.

    Each stretch comes with up to ``back`` symbols before it. So long documents take no more memory.
    """
    with Reader(text) as stored:
        first = _first_begin(stored, size)
        for at in range(first, stored.length, size):
            start = max(first, at - back)
            yield Stretch(stored.read(start, at + size), at - start, at)


def _first_begin(stored: Reader, size: int) -> int:
    """Return where the first document of a text begins, or the text's length."""
    for at in range(0, stored.length, size):
        begins = np.flatnonzero(stored.read(at, at + size) == BEGIN)
        if len(begins):
            return at + int(begins[0])
    return stored.length


def save_run(folder: Path, name: str, keys: np.ndarray, counts: np.ndarray) -> None:
    """Write a run into ``folder``."""
    save(folder / f"{name}.keys.npy", keys)
    save(_counts_of(folder / f"{name}.keys.npy"), counts)


def pairs_in(runs: Sequence[Path]) -> int:
    """Return the number of pairs of these runs, which are named by their files of keys."""
    return sum(map(length_of, runs))


def _counts_of(keys: Path) -> Path:
    return keys.with_name(keys.name.removesuffix("keys.npy") + "counts.npy")


class _Run:
    """A run that is read from its beginning to its end."""

    def __init__(self, path: Path, files: contextlib.ExitStack) -> None:
        self._files = [files.enter_context(Reader(one)) for one in (path, _counts_of(path))]
        if self._files[0].length != self._files[1].length:
            raise ValueError(f"{path}: has not as many keys as {_counts_of(path).name} has counts")
        self._read = 0
        self._keys, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)

    def below(self, bound: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs whose keys are below ``bound`` (None: all) and that were not returned before."""
        keys, counts = [self._keys[:0]], [self._counts[:0]]
        while len(self._keys) or self._read < self._files[0].length:
            if not len(self._keys):
                self._keys, self._counts = (
                    file.read(self._read, self._read + _BLOCK) for file in self._files
                )
                self._read += len(self._keys)
            end = len(self._keys) if bound is None else int(np.searchsorted(self._keys, np.uint64(bound)))
            keys.append(self._keys[:end])
            counts.append(self._counts[:end].astype(np.int64))
            self._keys, self._counts = self._keys[end:], self._counts[end:]
            if len(self._keys):
                break
        return np.concatenate(keys), np.concatenate(counts, dtype=np.int64)


@compiled
def _merge(keys_a, counts_a, keys_b, counts_b):  # type: ignore[no-untyped-def]
    """Merge two runs, and add the counts of equal keys up."""
    size = len(keys_a) + len(keys_b)
    keys, counts = np.empty(size, np.uint64), np.empty(size, np.int64)
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
    """Merge any number of runs in memory, two at a time."""
    todo = list(runs)
    while len(todo) > 1:
        todo = [*todo[2:], _merge(*todo[0], *todo[1])]
    return todo[0] if todo else (np.empty(0, np.uint64), np.empty(0, np.int64))


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
    """Merge stored runs in groups until at most ``most`` are left; new ones are written into ``scratch``."""
    left, level = list(runs), 0
    while len(left) > most:
        groups = [left[i : i + most] for i in range(0, len(left), most)]
        left = []
        for n, group in enumerate(groups):
            keys = scratch / f"{level}.{n:06d}.keys.npy"
            with growing(keys, np.uint64) as add_keys, growing(_counts_of(keys), np.int64) as add_counts:
                for some_keys, some_counts in slices(group, slices_for(pairs_in(group), size)):
                    add_keys(some_keys)
                    add_counts(some_counts)
            for path in group:
                if path.parent == scratch:  # of the level before
                    path.unlink()
                    _counts_of(path).unlink()
            left.append(keys)
        level += 1
    return left
