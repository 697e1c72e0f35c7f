"""Arrays on disk as ``.npy`` files, written whole or not at all, and read in stretches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spider.files import replacing


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
