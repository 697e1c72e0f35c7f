"""Fit a law to the runs of a ladder, and forecast the loss at a larger budget.

This is the second approach of Hoffmann et al. (arXiv:2203.15556). At each budget C a parabola in log N is
fitted to the loss, the mean over seeds. N is the FLOPs a token over 6, so that C = 6 N D. The minima give

    N* = k C^a    L = E + A C^-b

Two budgets do not identify E, and a few hardly do. So E is drawn from a range, by how well its law fits the
minima (two fit exactly, whatever E is), and what it changes is a part of the interval. The range is a quarter
to two thirds of the lowest loss. At 2 bits per byte that is about the entropy of English, 0.6 to 1.3 bits a
letter (Shannon, "Prediction and Entropy of Printed English", 1951).

The interval is that of `DRAWS` refits. Each moves the means by the noise of a seed, pooled over all budgets
that have several seeds. A part of that noise is common to all sizes of a budget, because they read the data
in the same order. The noise of the run that is forecast is added.

Shapes: S sizes of a budget, K seeds, B budgets, R draws.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic.dataclasses import dataclass as pydantic_dataclass

#: Fewest steps of a run; shorter ones have hardly left the warm-up.
LEAST_STEPS = 300
#: Fewest sizes of a parabola, and fewest minima of a law.
LEAST_SIZES, LEAST_BUDGETS = 3, 2
#: Range of E as shares of the lowest measured loss, and number of values that are tried.
RANGE_E, VALUES_E = (1 / 4, 2 / 3), 400
DRAWS = 2000
#: Share of the draws that an interval holds.
COVERAGE = 0.9
#: A parabola may miss the means of a budget by so many standard deviations of their noise.
MOST_MISSED = 2.5


@pydantic_dataclass(frozen=True)
class Point:
    """One trained run of a ladder."""

    run: str
    budget: float
    size: float
    """Value of the setting that the ladder names as its ``size``."""
    seed: int
    flops: float
    """FLOPs of the training, which takes whole steps."""
    parameters: float
    """N: FLOPs a token over 6."""
    tokens: float
    steps: int
    bpb: float


@dataclass(frozen=True)
class Curve:
    """The parabola of one budget."""

    budget: float
    flops: float
    """Geometric mean of the FLOPs of its runs."""
    sizes: list[float]
    parameters: list[float]
    means: list[float]
    """Mean over the seeds of each size."""
    seeds: list[int]
    """Number of seeds of each size."""
    coefficients: tuple[float, float, float] | None = None
    """Coefficients of the loss in log10 N, highest power first."""
    missed: float = 0.0
    """Root mean square of what the parabola misses, in bits per byte."""
    best: tuple[float, float] | None = None
    """N and loss of the minimum; None for a curve with a problem."""
    problem: str | None = None
    """Reason why the budget is left out."""


@dataclass(frozen=True)
class Noise:
    """Standard deviations of a seed, in bits per byte."""

    own: float
    """Noise of each run alone."""
    common: float
    """Noise that all sizes of a budget share."""

    @property
    def total(self) -> float:
        return math.hypot(self.own, self.common)


@dataclass(frozen=True)
class Fit:
    """Law of a ladder, as draws."""

    curves: list[Curve]
    left_out: list[str]
    """Runs that are left out, each with the reason."""
    noise: Noise | None = None
    draws_R4: np.ndarray = field(default_factory=lambda: np.empty((0, 4)))
    """E, A and b of each draw, and its noise of the run that is forecast."""
    size_law: tuple[float, float] | None = None
    """k and a of N* = k C^a."""
    problem: str | None = None
    """Reason why there is no law."""

    @property
    def largest(self) -> float:
        """The largest budget that the law is fitted to."""
        return max(curve.budget for curve in self.curves if curve.best)

    def losses(self, flops: float, *, noise: bool) -> np.ndarray:
        """Return the loss at some FLOPs in each draw, with or without the noise of a run: (R,)."""
        E_R, A_R, b_R, noise_R = self.draws_R4.T
        losses_R: np.ndarray = E_R + A_R * flops**-b_R + (noise_R if noise else 0.0)
        return losses_R

    def loss(self, flops: float) -> float:
        return float(np.median(self.losses(flops, noise=False)))

    def interval(self, flops: float, *, noise: bool = True) -> tuple[float, float]:
        return interval(self.losses(flops, noise=noise))

    def best_size(self, flops: float) -> float:
        """Return N* at some FLOPs."""
        assert self.size_law is not None, "the fit has a law"
        factor, exponent = self.size_law
        return factor * flops**exponent


def interval(values_R: np.ndarray) -> tuple[float, float]:
    """Return the interval that holds `COVERAGE` of some draws."""
    tail = 50 * (1 - COVERAGE)
    low, high = np.percentile(values_R, [tail, 100 - tail])
    return float(low), float(high)


def fit(points: Sequence[Point]) -> Fit:
    """Fit the law of a ladder."""
    left_out = [
        f"{point.run}: {point.steps} steps, a run needs {LEAST_STEPS}"
        for point in points
        if point.steps < LEAST_STEPS
    ]
    groups: dict[float, dict[float, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point.steps >= LEAST_STEPS:
            groups[point.budget][point.size].append(point)
    noise = _noise(list(groups.values()))
    for budget in {point.budget for point in points} - groups.keys():
        groups[budget] = {}
    curves = [_curve(budget, sizes, noise) for budget, sizes in sorted(groups.items())]
    left_out += [f"{curve.budget:.3g} FLOPs: {curve.problem}" for curve in curves if curve.problem]
    good = [curve for curve in curves if curve.best]
    if noise is None:
        return Fit(curves, left_out, problem="no size has two seeds at one budget, so the noise is unknown")
    if len(good) < LEAST_BUDGETS:
        problem = f"{len(good)} of {len(curves)} budgets have a minimum, a forecast needs {LEAST_BUDGETS}"
        return Fit(curves, left_out, noise, problem=problem)
    log_C = np.log10([curve.flops for curve in good])
    exponent, height = np.polyfit(log_C, np.log10([curve.best[0] for curve in good if curve.best]), 1)
    size_law = float(10**height), float(exponent)
    return Fit(curves, left_out, noise, _draws(good, noise), size_law)


def _noise(budgets: list[dict[float, list[Point]]]) -> Noise | None:
    """Return the noise of a seed, pooled over all budgets where a size has several; None if none has."""
    own, own_freedom, common, common_freedom = 0.0, 0, 0.0, 0
    for sizes in budgets:
        several = [
            {point.seed: point.bpb for point in points} for points in sizes.values() if len(points) > 1
        ]
        shared = sorted(set.intersection(*map(set, several))) if several else []
        if not several:
            continue
        if len(several) < 2 or len(shared) < 2:  # too few runs to separate the two parts
            for one in several:
                own += float(np.var([*one.values()]) * len(one))
                own_freedom += len(one) - 1
            continue
        bpb_SK = np.array([[one[seed] for seed in shared] for one in several])
        rest_SK = bpb_SK - bpb_SK.mean(1, keepdims=True)
        seed_K = rest_SK.mean(0)
        S, K = rest_SK.shape
        own += float(((rest_SK - seed_K) ** 2).sum())
        own_freedom += (S - 1) * (K - 1)
        common += float((seed_K**2).sum())
        common_freedom += K - 1
    if not own_freedom:
        return None
    variance = own / own_freedom
    # The mean over sizes of the noise of each run alone is a part of what looks common.
    sizes_of = np.mean([len(sizes) for sizes in budgets if sizes])
    of_seeds = common / common_freedom - variance / sizes_of if common_freedom else 0.0
    return Noise(math.sqrt(variance), math.sqrt(max(0.0, of_seeds)))


def _curve(budget: float, sizes: dict[float, list[Point]], noise: Noise | None) -> Curve:
    """Fit the parabola of one budget."""
    groups = sorted(sizes.items())
    everyone = [point for _, points in groups for point in points]
    curve = Curve(
        budget,
        flops=math.exp(np.mean([math.log(point.flops) for point in everyone])) if everyone else budget,
        sizes=[size for size, _ in groups],
        parameters=[points[0].parameters for _, points in groups],
        means=[float(np.mean([point.bpb for point in points])) for _, points in groups],
        seeds=[len(points) for _, points in groups],
    )
    if len(groups) < LEAST_SIZES:
        problem = f"{len(groups)} sizes with runs of {LEAST_STEPS} steps, a parabola needs {LEAST_SIZES}"
        return _with(curve, problem=problem)
    log_S, mean_S = np.log10(curve.parameters), np.array(curve.means)
    a, b, c = map(float, np.polyfit(log_S, mean_S, 2))
    missed_S = mean_S - np.polyval((a, b, c), log_S)
    curve = _with(curve, coefficients=(a, b, c), missed=float(np.sqrt((missed_S**2).mean())))
    if a <= 0:
        return _with(curve, problem="the parabola opens downwards: the sizes are too close, or noise decided")
    at = -b / (2 * a)
    if at < log_S[0]:
        return _with(curve, problem="not bracketed: the best size is below the smallest; add smaller ones")
    if at > log_S[-1]:
        return _with(curve, problem="not bracketed: the best size is above the largest; add larger ones")
    if noise is not None and (free := len(groups) - 3) > 0:
        of_means_S = noise.own / np.sqrt(curve.seeds)
        if ((missed_S / of_means_S) ** 2).sum() / free > MOST_MISSED**2:
            what = f"the parabola misses the means by {curve.missed:.4f}, more than seeds do"
            worst = curve.sizes[int(np.abs(missed_S).argmax())]
            return _with(curve, problem=f"{what}: leave out size {worst:g}")
    return _with(curve, best=(float(10**at), c - b**2 / (4 * a)))


def _with(curve: Curve, **changes: object) -> Curve:
    return Curve(**{**vars(curve), **changes})  # type: ignore[arg-type]


def _draws(curves: list[Curve], noise: Noise) -> np.ndarray:
    """Return E, A, b and the noise of a run in each draw: (R, 4)."""
    random = np.random.default_rng(0)
    lowest = min(min(curve.means) for curve in curves)
    log_C = np.log([curve.flops for curve in curves])
    minima_RB = np.stack([_minima(curve, noise, random) for curve in curves], axis=1)
    E_R = _drawn_E(log_C, minima_RB.mean(0), minima_RB.std(0), lowest, random)
    left_RB = np.log(np.maximum(minima_RB - E_R[:, None], 1e-3))
    slope_R, height_R = np.polyfit(log_C, left_RB.T, 1)
    return np.stack([E_R, np.exp(height_R), -slope_R, random.normal(0, noise.total, DRAWS)], axis=1)


def _drawn_E(
    log_C: np.ndarray, minima_B: np.ndarray, sigma_B: np.ndarray, lowest: float, random: np.random.Generator
) -> np.ndarray:
    """Draw E from its range, by the likelihood of the minima under the law that fits them best."""
    tried_E = lowest * np.linspace(*RANGE_E, VALUES_E)
    left_EB = minima_B - tried_E[:, None]
    slope_E, height_E = np.polyfit(log_C, np.log(left_EB).T, 1)
    rest_EB = left_EB - np.exp(height_E[:, None] + slope_E[:, None] * log_C)
    likelihood_E = np.exp(-0.5 * ((rest_EB / np.maximum(sigma_B, 1e-6)) ** 2).sum(1))
    drawn: np.ndarray = random.choice(tried_E, DRAWS, p=likelihood_E / likelihood_E.sum())
    return drawn


def _minima(curve: Curve, noise: Noise, random: np.random.Generator) -> np.ndarray:
    """Return the minimum of a budget's parabola in each draw, within the range of its sizes: (R,)."""
    log_S, seeds_S = np.log10(curve.parameters), np.array(curve.seeds)
    own_RS = random.normal(0, noise.own / np.sqrt(seeds_S), (DRAWS, len(log_S)))
    common_R1 = random.normal(0, noise.common / math.sqrt(seeds_S.max()), (DRAWS, 1))
    middle = log_S.mean()
    a_R, b_R, c_R = np.polyfit(log_S - middle, (np.array(curve.means) + own_RS + common_R1).T, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        at_R = np.where(a_R > 0, -b_R / (2 * a_R), np.where(b_R < 0, np.inf, -np.inf))
    at_R = np.clip(at_R, log_S[0] - middle, log_S[-1] - middle)
    minima_R: np.ndarray = a_R * at_R**2 + b_R * at_R + c_R
    return minima_R


def multiplier(one: Fit, other: Fit, flops: float) -> tuple[float, tuple[float, float]]:
    """Return how much more compute ``other`` needs for the loss of ``one`` at some FLOPs, with its interval.

    A draw in which ``other`` cannot reach that loss counts as infinite.
    """
    wanted_R = one.losses(flops, noise=False)
    E_R, A_R, b_R, _ = other.draws_R4[np.random.default_rng(1).permutation(DRAWS)].T
    with np.errstate(divide="ignore", invalid="ignore"):
        needed_R = np.where(wanted_R > E_R, (A_R / (wanted_R - E_R)) ** (1 / b_R), np.inf) / flops
    return float(np.median(needed_R)), interval(np.minimum(needed_R, 1e30))  # finite, to interpolate
