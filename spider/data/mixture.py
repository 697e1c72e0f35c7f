"""Read windows of several datasets in given shares: an exact order that needs no memory.

Two sources of shares p <= 1/2 and 1 - p alternate evenly: of the first m windows, round(p m) are the smaller
one's. More sources form a tree of such pairs. A Huffman tree joins the two smallest shares first, so the
shares on a path grow at least like Fibonacci's numbers. An error of at most 1/2 a node then adds up to at
most 1/2 (1 + 1 + 1/2 + 1/3 + 1/5 + ...) < 1.7 windows. So in every prefix of n windows the count of a source
is within two of its share of n, and no source is lost, however small its weight.

The source of global sample n and its number there are a pure function of (weights, n). So a position stays
one number, and any number of processes sees the same order. Counts are exact up to 2^53 samples: a smaller
share is at most 1/2, so a rounded product never skips a number.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class _Pair(NamedTuple):
    """A node of the tree: two sources or nodes, and the smaller one's share of the node."""

    small: _Pair | int
    large: _Pair | int
    share: float

    def smalls(self, count: np.ndarray) -> np.ndarray:
        """Return how many of the node's first ``count`` windows are the smaller one's."""
        return np.floor(self.share * count + 0.5).astype(np.int64)


class Mixture:
    """The order of the windows of sources, which are numbered as in ``names``.

    Args:
        weights: weight of each source by name, above 0. Their order does not matter.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.names = sorted(weights)
        heap: list[tuple[float, int, _Pair | int]] = [(weights[n], i, i) for i, n in enumerate(self.names)]
        heapq.heapify(heap)
        while len(heap) > 1:
            small, first, small_node = heapq.heappop(heap)
            large, second, large_node = heapq.heappop(heap)
            pair = _Pair(small_node, large_node, small / (small + large))
            heapq.heappush(heap, (small + large, min(first, second), pair))
        self._root = heap[0][2]

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each global sample and its number there, (n,) int64 each."""
        sources = np.empty_like(samples)
        numbers = np.empty_like(samples)
        waiting = [(self._root, np.arange(len(samples)), samples)]
        while waiting:
            node, which, within = waiting.pop()
            if isinstance(node, int):
                sources[which] = node
                numbers[which] = within
                continue
            before = node.smalls(within)
            is_small = node.smalls(within + 1) > before
            branches = (node.small, is_small, before), (node.large, ~is_small, within - before)
            waiting += [(child, which[own], at[own]) for child, own, at in branches if own.any()]
        return sources, numbers

    def counts(self, samples: int) -> dict[str, int]:
        """Return how many of the first ``samples`` samples each source has."""
        counts = {}
        waiting = [(self._root, np.array([samples]))]
        while waiting:
            node, count = waiting.pop()
            if isinstance(node, int):
                counts[self.names[node]] = int(count[0])
                continue
            small = node.smalls(count)
            waiting += [(node.small, small), (node.large, count - small)]
        return {name: counts[name] for name in self.names}


def read_of_each(position: dict[str, Any]) -> dict[str, int]:
    """Return how many windows of each source a `spider.data.loader.MixedLoader` has read at a position."""
    counts = Mixture(position["weights"]).counts(position["sample"])
    return {name: count + position["before"][name] for name, count in counts.items()}


def positions_of(position: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a position, or that of each source of a mixture, by the digest of its split."""
    if "weights" not in position:
        return {position["data"]: position}
    read = read_of_each(position)
    return {digest: position | {"sample": read[name]} for name, digest in position["data"].items()}
