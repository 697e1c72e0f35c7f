"""Read windows of several datasets in given shares: an exact order that needs no memory.

Two sources of shares p <= 1/2 and 1 - p alternate evenly: of the first m windows, round(p m) are the smaller
one's. More sources form a tree of such pairs. A Huffman tree joins the two smallest shares first, so the
shares on a path grow at least like Fibonacci's numbers. An error of at most 1/2 a node then adds up to at
most 1/2 (1 + 1 + 1/2 + 1/3 + 1/5 + ...) < 1.7 windows. So in every prefix of n windows the count of a source
is within two of its share of n, and no source is lost, however small its weight.

The weights may change at a sample: there a new tree begins, and each source goes on at its own number. A cap
of a source is a switch too, at the sample where the source has given all that it may.

The source of global sample n and its number there are a pure function of (weights, switches, n). So a
position stays one number, and any number of processes sees the same order. Counts are exact up to 2^53
samples: a smaller share is at most 1/2, so a rounded product never skips a number.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

#: Weight of each source by name, and the sample where they begin to hold.
Mix = tuple[int, Mapping[str, float]]


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
        switches: other weights, each from a sample on, in the order of their samples.
    """

    def __init__(self, weights: Mapping[str, float], switches: Sequence[Mix] = ()) -> None:
        mixes = [(0, weights), *switches]
        self.names = sorted({name for _, mix in mixes for name in mix})
        self._begins = np.array([begin for begin, _ in mixes])
        self._trees = [_tree(mix, self.names) for _, mix in mixes]
        self._before_MS = np.zeros((len(mixes), len(self.names)), np.int64)
        for i, begin in enumerate(self._begins[1:].tolist()):
            self._before_MS[i + 1] = self._counts(i, begin)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each global sample and its number there, (n,) int64 each."""
        sources = np.empty_like(samples)
        numbers = np.empty_like(samples)
        mixes = np.searchsorted(self._begins, samples, side="right") - 1
        waiting = []
        for mix in np.unique(mixes).tolist():
            which = np.flatnonzero(mixes == mix)
            waiting.append((mix, self._trees[mix], which, samples[which] - self._begins[mix]))
        while waiting:
            mix, node, which, within = waiting.pop()
            if isinstance(node, int):
                sources[which] = node
                numbers[which] = within + self._before_MS[mix, node]
                continue
            before = node.smalls(within)
            is_small = node.smalls(within + 1) > before
            branches = (node.small, is_small, before), (node.large, ~is_small, within - before)
            waiting += [(mix, child, which[own], at[own]) for child, own, at in branches if own.any()]
        return sources, numbers

    def counts(self, samples: int) -> dict[str, int]:
        """Return how many of the first ``samples`` samples each source has."""
        counts_S = self._counts(int(np.searchsorted(self._begins, samples, side="right")) - 1, samples)
        return dict(zip(self.names, counts_S.tolist(), strict=True))

    def _counts(self, mix: int, samples: int) -> np.ndarray:
        """Return how many of the first samples each source has, if this mix holds for the last of them."""
        counts_S = self._before_MS[mix].copy()
        waiting = [(self._trees[mix], samples - self._begins[mix])]
        while waiting:
            node, count = waiting.pop()
            if isinstance(node, int):
                counts_S[node] += count
                continue
            small = node.smalls(count)
            waiting += [(node.small, small), (node.large, count - small)]
        return counts_S


def _tree(weights: Mapping[str, float], names: Sequence[str]) -> _Pair | int:
    """Return the Huffman tree of weights; a source has its place in ``names`` as its number."""
    known = [(i, weights[name]) for i, name in enumerate(names) if name in weights]
    heap: list[tuple[float, int, _Pair | int]] = [(weight, i, i) for i, weight in known]
    heapq.heapify(heap)
    while len(heap) > 1:
        small, first, small_node = heapq.heappop(heap)
        large, second, large_node = heapq.heappop(heap)
        pair = _Pair(small_node, large_node, small / (small + large))
        heapq.heappush(heap, (small + large, min(first, second), pair))
    return heap[0][2]


def read_of_each(position: Mapping[str, Any], order: Mixture | None = None) -> dict[str, int]:
    """Return how many windows of each source a `spider.data.loader.MixedLoader` has read at a position.

    ``order`` is that of the position, if it is there already.
    """
    order = order or Mixture(position["weights"], position.get("switches", ()))
    counts = order.counts(position["sample"])
    return {name: count + counts.get(name, 0) for name, count in position["before"].items()}


def anew(position: dict[str, Any]) -> dict[str, Any]:
    """Return the position where the next stage begins: each source goes on at its own number."""
    return position | {"sample": 0, "before": read_of_each(position)}


def positions_of(position: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a position, or that of each source of a mixture, by the digest of its split."""
    if "weights" not in position:
        return {position["data"]: position}
    read = read_of_each(position)
    return {digest: position | {"sample": read[name]} for name, digest in position["data"].items()}
