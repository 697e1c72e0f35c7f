"""Share out the tensors of a checkpoint: a file for each part, and a process that writes it.

Each process computes all of this from the shapes and the number of processes, without an exchange. The slices
of a sharded tensor are written by the processes that hold them. A tensor that all processes hold is written
by the one that has fewest bytes so far. The first process writes all scalars, because a process without rows
of a parameter does not count its steps. With one process, all tensors are whole.

A file holds a whole tensor under its name, and rows 128 to 255 of one as ``{name}[128:256]``. Each process
has files of its own for each kind of tensors, so that weights can be read without the optimizer's state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from spider.processes.parallel import is_dtensor

_FILE_BYTES = 2 << 30
_SLICE = re.compile(r"(.+)\[(\d+):(\d+)\]")


@dataclass(frozen=True)
class Piece:
    """A tensor, or the ``rows`` from the first to before the second of one, and the rank that writes it."""

    name: str
    rank: int
    bytes: int
    rows: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        """Return its name in its file."""
        return f"{self.name}[{self.rows[0]}:{self.rows[1]}]" if self.rows else self.name


def parts_of(tensors: Mapping[str, Tensor], processes: int) -> dict[str, list[Piece]]:
    """Return the pieces in each file of a checkpoint of these tensors, for this number of processes."""
    cut = {name: _slices(name, tensor, processes) for name, tensor in tensors.items()}
    filled = [0] * processes
    for pieces in cut.values():
        for piece in pieces:
            filled[piece.rank] += piece.bytes
    whole = (name for name, pieces in cut.items() if not pieces)
    for name in sorted(whole, key=lambda one: -tensors[one].nbytes):
        owner = filled.index(min(filled)) if tensors[name].ndim else 0
        cut[name] = [Piece(name, owner, tensors[name].nbytes)]
        filled[owner] += tensors[name].nbytes
    parts = []
    for rank in range(processes):
        parts += _split(piece for pieces in cut.values() for piece in pieces if piece.rank == rank)
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _slices(name: str, tensor: Tensor, processes: int) -> list[Piece]:
    """Return the slices of a sharded tensor, as torch cuts it; none of one that all processes hold."""
    if not is_dtensor(tensor) or not tensor.numel():
        return []
    rows = len(tensor)
    starts = range(0, rows, -(-rows // processes))  # of few rows, the last processes have none
    bounds = [(start, min(start + starts.step, rows)) for start in starts]
    return [
        Piece(name, rank, tensor.nbytes // rows * (end - start), (start, end) if end - start < rows else None)
        for rank, (start, end) in enumerate(bounds)
    ]


def _split(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Return the pieces of one process, file by file: each kind of tensors has files of its own."""
    parts: list[list[Piece]] = []
    filled = 0
    previous = ""
    for piece in pieces:
        kind = piece.name.partition(".")[0]
        if kind != previous or filled + piece.bytes > _FILE_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(piece)
        filled += piece.bytes
        previous = kind
    return parts


def rows_of(key: str) -> tuple[str, tuple[int, int] | None]:
    """Return the tensor of a key in a file, and the rows of a slice."""
    found = _SLICE.fullmatch(key)
    return (found[1], (int(found[2]), int(found[3]))) if found else (key, None)


def keys_of(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of each tensor: its name, or its slices by rising row."""
    named: dict[str, list[str]] = {}
    for key in keys:
        named.setdefault(rows_of(key)[0], []).append(key)
    return {name: sorted(slices, key=lambda one: rows_of(one)[1] or (0, 0)) for name, slices in named.items()}
