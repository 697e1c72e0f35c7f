"""Counting: which symbol follows which context, and how often, in a part of a text (the map of a map-reduce).

Of each kind of contexts a *run*: keys ``hash << 8 | symbol`` (uint64, rising, each once) and how often each
occurs (uint32). A run is a function of the part's text alone, and runs can be added up in any
order (`spider.ngram.runs`). A part is counted in pieces of `PIECE` symbols, a run each. So a job's memory is
bounded, however large its part and its documents are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spider.ngram.contexts import compiled, contexts_of, name_of, prefix_hashes, reach
from spider.ngram.layout import BEGIN
from spider.ngram.runs import save_run, stretches
from spider.requests import PIECE


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


def count(text: np.ndarray, kind: int, before: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the run of one kind of contexts over N symbols: keys (M,) uint64, counts (M,) uint32.

    The first ``before`` symbols are not counted: they only stand before those that are.
    """
    keys = _keys(text[before:], contexts_of(text, prefix_hashes(text), kind, before, len(text)))
    keys.sort()
    return _run_lengths(keys)


def write_runs(folder: Path, kinds: Sequence[int], piece: int = PIECE) -> None:
    """Count the symbols of ``folder/text.npy``, and write the runs beside them."""
    back = max(kind if kind > 0 else reach(~kind) for kind in kinds)
    for number, stretch in enumerate(stretches(folder / "text.npy", back, piece)):
        for kind in kinds:
            save_run(folder, f"{name_of(kind)}.{number:03d}", *count(stretch.text, kind, stretch.before))


def runs_of(folder: Path, kind: int) -> list[Path]:
    """Return the runs of one kind of contexts that lie in a folder, as their files of keys."""
    return sorted(folder.glob(f"{name_of(kind)}.*.keys.npy"))
