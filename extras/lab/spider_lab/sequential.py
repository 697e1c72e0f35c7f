"""Test pairs of runs one after the other, with a bound on false verdicts.

Pair k gives the difference d_k of the bits per byte of two runs with the same seed. Earlier runs have shown
the variance s^2 of such a difference, with n degrees of freedom. After k pairs

    S^2 = (n s^2 + sum_i (d_i - m)^2) / (n + k - 1)      m = mean(d)      t = m / (S / sqrt(k))

and the verdict falls at the first k with abs(t) > c_k. The c_k are such that, without any difference, a
verdict falls at one of K pairs with the probability `ALPHA`. The level of pair k is proportional to k, so an
early verdict needs more evidence. This is a group sequential test, and ``m +- c_k S / sqrt(k)`` is its
repeated confidence interval, which holds whenever the test stops (Jennison and Turnbull, "Group Sequential
Methods", 1999, chapters 2 and 9).

The test also stops where the pairs that are left would hardly decide it.

Shapes: R draws, K pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.stats import norm

from spider.evaluation.noise import Noise

#: Probability of a verdict where there is no difference.
ALPHA = 0.05
#: Stop where the pairs that are left decide the test with a smaller probability.
HOPELESS = 0.1
#: If the pairs vary by so many times more than earlier runs, those do not tell how much these vary.
_MORE = 3.0
_DRAWS = 40_000


@dataclass(frozen=True)
class Shown:
    """The mean difference of some pairs, with its interval."""

    difference: float
    """Mean difference in bits per byte; less than 0 if the second run of each pair is better."""
    low: float
    high: float
    """Bounds of the interval, infinite where the noise is unknown."""
    chance: float
    """Probability that the pairs that are left decide the test, if the difference is the mean so far."""

    @property
    def outcome(self) -> str:
        """``better``, ``worse`` or ``not shown``."""
        return "better" if self.high < 0 else "worse" if self.low > 0 else "not shown"

    @property
    def stops(self) -> bool:
        """Whether a verdict has fallen, or hardly would."""
        return self.outcome != "not shown" or self.chance < HOPELESS


def after(differences: Sequence[float], noise: Noise | None, most: int) -> Shown:
    """Return what the differences of some pairs show.

    Args:
        noise: the noise of a seed in earlier runs.
        most: K, the largest number of pairs.
    """
    k = len(differences)
    mean = math.fsum(differences) / k
    squares = math.fsum((one - mean) ** 2 for one in differences)
    freedom, variance = (noise.freedom, 2 * noise.deviation**2) if noise else (0, 0.0)
    if k > 1 and squares / (k - 1) > _MORE**2 * variance:
        freedom = 0
    if freedom + k < 2:
        return Shown(mean, -math.inf, math.inf, 1.0)
    S = math.sqrt((freedom * variance + squares) / (freedom + k - 1))
    bounds_K = bounds(freedom, most)
    half = bounds_K[k - 1] * S / math.sqrt(k)
    return Shown(mean, mean - half, mean + half, _chance(mean, S, k, most, bounds_K[-1]))


def _chance(mean: float, S: float, k: int, most: int, bound: float) -> float:
    """Return the probability that the mean of all pairs lies beyond the bound of the last one."""
    if k == most:
        return 0.0
    needed, spread = bound * S / math.sqrt(most), S * math.sqrt(1 / k - 1 / most)
    if not spread:
        return 1.0
    chance: float = norm.cdf((mean - needed) / spread) + norm.cdf((-mean - needed) / spread)
    return chance


@cache
def bounds(freedom: int, most: int) -> tuple[float, ...]:
    """Return c_k for each pair, from random draws without a difference. They are the same in each call.

    The bound of the first pair is infinite if there are no degrees of freedom: one pair then decides nothing.
    """
    random = np.random.default_rng(0)
    pairs_K = np.arange(1, most + 1)
    d_RK = random.standard_normal((_DRAWS, most))
    mean_RK = np.cumsum(d_RK, 1) / pairs_K
    squares_RK = np.cumsum(d_RK**2, 1) - pairs_K * mean_RK**2
    earlier_R1 = random.chisquare(freedom, (_DRAWS, 1)) if freedom else np.zeros((_DRAWS, 1))
    S_RK = np.sqrt(np.maximum(earlier_R1 + squares_RK, 0) / np.maximum(freedom + pairs_K - 1, 1))
    first = 0 if freedom else 1
    t_RK = np.abs(mean_RK[:, first:]) / S_RK[:, first:] * np.sqrt(pairs_K[first:])
    levels_K = pairs_K[first:] / most
    low, high = 0.0, ALPHA
    for _ in range(30):
        level = (low + high) / 2
        found_K = np.array(
            [np.quantile(t_R, 1 - level * share) for t_R, share in zip(t_RK.T, levels_K, strict=True)]
        )
        too_often = (t_RK > found_K).any(1).mean() > ALPHA
        low, high = (low, level) if too_often else (level, high)
    return (*[math.inf] * first, *found_K.tolist())
