"""Hashes of what stands before a place: polynomial over the symbols, so that the hash of any stretch of a
text costs one subtraction, then mixed."""

from __future__ import annotations

import numpy as np

from spider.memory.compiled import compiled

_BASE = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)


@compiled(inline="always")
def appended(hash_: np.uint64, value: np.uint64) -> np.uint64:
    """The polynomial hash of a sequence and one value more."""
    return hash_ * _BASE + np.uint64(value) + _ONE


@compiled
def prefix_hashes(text: np.ndarray) -> np.ndarray:
    """Polynomial hashes of all prefixes of N symbols: (N + 1,) uint64."""
    hashes = np.empty(len(text) + 1, np.uint64)
    hashes[0] = np.uint64(0)
    for i in range(len(text)):
        hashes[i + 1] = appended(hashes[i], text[i])
    return hashes


@compiled
def power(order: int) -> np.uint64:
    """What the hash of a prefix is multiplied with as it grows by so many symbols."""
    result = _ONE
    for _ in range(order):
        result *= _BASE
    return result


@compiled(inline="always")
def mixed(before: np.uint64, now: np.uint64, grown: np.uint64) -> np.uint64:
    """The hash of what stands between two prefixes, well mixed (the finalizer of splitmix64)."""
    x = now - before * grown
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
