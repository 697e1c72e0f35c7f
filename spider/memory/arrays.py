"""Arrays on disk as ``.npy``, whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from spider.files import replacing


def save(path: Path, array: np.ndarray) -> None:
    """Write an array; `np.save` would not notice that its last kilobytes find no room."""
    array = np.ascontiguousarray(array)
    with replacing(path) as beside, beside.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


@contextlib.contextmanager
def growing(path: Path, width: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Write rows (n, width) uint8 as they come, n unknown until the last."""
    with replacing(path) as beside, beside.open("wb") as file:
        n = 0

        def header() -> None:  # numpy leaves room in it for any n
            np.lib.format.write_array_header_1_0(
                file, {"descr": "|u1", "fortran_order": False, "shape": (n, width)}
            )

        def append(rows: np.ndarray) -> None:
            nonlocal n
            assert rows.shape[1:] == (width,) and rows.dtype == np.uint8
            file.write(np.ascontiguousarray(rows).data)
            n += len(rows)

        header()
        yield append
        file.seek(0)
        header()
