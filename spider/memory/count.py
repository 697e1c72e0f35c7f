"""Counting: which symbol follows which context, and how often, in a part of a text (the map of a map-reduce).

Of each kind of contexts a *run*: keys ``hash << 8 | symbol`` (uint64, rising, each once) and how often each
occurs (uint32). A run is a function of the part's text alone, and `spider.memory.table` adds runs up in
whatever order they come. A part is counted in pieces of some millions of symbols, a run each, so a job's
memory is bounded whatever the size of its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from spider.memory.arrays import save
from spider.memory.compiled import compiled
from spider.memory.contexts import contexts_of, name_of
from spider.memory.hashes import prefix_hashes
from spider.memory.symbols import BEGIN
from spider.memory.table import Run

#: Symbols counted at a time: 0.4 GB of keys, twice while they are made.
PIECE = 1 << 25


@compiled
def _keys(text: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """``hash << 8 | symbol`` at every place with a context."""
    keys, count = np.empty(len(text), np.uint64), 0
    low = np.uint64(0xFF)
    for i in range(len(text)):
        if contexts[i] and text[i] != BEGIN:
            keys[count] = (contexts[i] & ~low) | np.uint64(text[i])
            count += 1
    return keys[:count]


@compiled
def _run_lengths(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each of the rising keys once, in place, and how often it stands there."""
    counts, n = np.empty(len(keys), np.uint32), -1
    for i in range(len(keys)):
        if i == 0 or keys[i] != keys[n]:
            n += 1
            keys[n] = keys[i]
            counts[n] = 0
        counts[n] += 1
    return keys[: n + 1], counts[: n + 1]


def count(text: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """The run of one kind of contexts over N symbols: keys (M,) uint64, counts (M,) uint32. What stands
    before the first document's beginning is not counted."""
    begins = np.flatnonzero(text == BEGIN)
    text = text[begins[0] if len(begins) else len(text) :]
    keys = _keys(text, contexts_of(text, prefix_hashes(text), kind, 0, len(text)))
    keys.sort()
    return _run_lengths(keys)


def pieces(text: np.ndarray, size: int = PIECE) -> Iterator[np.ndarray]:
    """A text cut at beginnings of documents into pieces of at least so many symbols, the last apart."""
    begins, start = np.flatnonzero(text == BEGIN), 0
    while start < len(text):
        after = np.searchsorted(begins, start + size)
        end = int(begins[after]) if after < len(begins) else len(text)
        yield text[start:end]
        start = end


def write_runs(
    text: np.ndarray, kinds: Sequence[int], folder: Path, threads: int = 1, piece: int = PIECE
) -> None:
    """Count a part's symbols into ``folder``, and keep the symbols beside their counts."""

    def one(job: tuple[int, np.ndarray, int]) -> None:
        number, part, kind = job
        for name, array in zip(("keys", "counts"), count(part, kind), strict=True):
            save(folder / f"{name_of(kind)}.{number:03d}.{name}.npy", array)

    save(folder / "text.npy", text)
    with ThreadPoolExecutor(threads) as pool:
        jobs = ((n, part, kind) for n, part in enumerate(pieces(text, piece)) for kind in kinds)
        for _ in pool.map(one, jobs):
            pass


def runs_of(folder: Path, kind: int) -> list[Run]:
    """What was written of one kind of contexts."""

    def opened(keys: Path) -> tuple[np.ndarray, np.ndarray]:
        counts = keys.with_name(keys.name.replace("keys", "counts"))
        return np.load(keys, mmap_mode="r"), np.load(counts, mmap_mode="r")

    return [partial(opened, keys) for keys in sorted(folder.glob(f"{name_of(kind)}.*.keys.npy"))]
