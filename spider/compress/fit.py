"""The clip at which a file fills its cap: its bytes fall as the clip rises, by log2 of it a weight."""

from __future__ import annotations

import math
from collections.abc import Callable

#: A file may be this share smaller than its cap; the search aims at the middle.
SLACK = 0.003
#: The least clip that is tried cuts a row's largest weights only; beyond the most, a row is nearly zeros.
LEAST, MOST = 4.0, 96.0
_TRIES = 4


def first_clip(cap: int, estimate: Callable[[float], float]) -> float:
    """The clip at which so many bytes are estimated, or `LEAST`; `ValueError`: not even the coarsest fits."""
    target = cap * (1 - SLACK / 2)
    if (coarsest := estimate(MOST)) > cap:
        raise ValueError(
            f"compress: {coarsest:,.0f} bytes even at clip {MOST:g}; cap is {cap:,}: fewer parameters, "
            "fewer bits, or a larger cap"
        )
    low, high = math.log(LEAST), math.log(MOST)
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if estimate(math.exp(middle)) > target else (low, middle)
    return math.exp(high) if high > math.log(LEAST) + 2e-4 else LEAST


def fill(
    cap: int, weights: int, estimate: Callable[[float], float], made: Callable[[float], int]
) -> tuple[float, int]:
    """The clip whose file has between ``(1 - SLACK) cap`` and ``cap`` bytes, and how many it has; `LEAST` and
    fewer where the finest step needs no more.

    Args:
        weights: how many are coded by it.
        estimate: total bytes at a clip, by the entropy of rounded weights.
        made: makes the file at a clip and returns its total bytes; the last one made is the one returned.

    Raises:
        ValueError: not even the coarsest fits.
    """
    target, fitting = cap * (1 - SLACK / 2), list[tuple[float, int]]()
    clip = first_clip(cap, estimate)
    for _ in range(_TRIES):
        total = made(clip)
        if total <= cap:
            fitting.append((clip, total))
            if total >= cap * (1 - SLACK) or clip == LEAST:
                return clip, total
        # Its bytes fall by weights/8 log2 of the clip.
        clip = max(LEAST, clip * 2 ** ((total - target) * 8 / weights))
    if not fitting:
        raise ValueError(f"compress: no clip near {clip:.3g} gives a file of {cap:,} bytes; raise cap")
    best = max(fitting, key=lambda one: one[1])
    return best[0], made(best[0])
