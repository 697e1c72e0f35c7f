"""Fit ladders whose law is known, and those that must not give a forecast."""

import math
from dataclasses import replace

import numpy as np
import pytest
from spider_lab.fit import DRAWS, LEAST_STEPS, Point, fit, multiplier

#: The law that the points follow: L = E + A C^-b at the best size N* = k C^a, and a parabola around it.
E, A, B, K, EXPONENT, CURVATURE = 0.8, 40.0, 0.12, 0.2, 0.5, 0.15


def loss(flops, parameters, E=E):
    """Return the loss of a size. Laws with another E have the same loss at 1e12 FLOPs."""
    reduced = (A * 1e12**-B + 0.8 - E) * (flops / 1e12) ** -B
    return E + reduced + CURVATURE * math.log10(parameters / (K * flops**EXPONENT)) ** 2


def ladder(budgets, *, seeds=(1, 2, 3), noise=0.01, common=0.005, at=(0.4, 0.8, 1.6, 3.2), seed=0, E=E):
    """Return the runs of a ladder, with sizes around the best ones."""
    random = np.random.default_rng(seed)
    points = []
    for flops in budgets:
        of_seed = {k: random.normal(0, common) for k in seeds}
        for share in at:
            parameters = share * K * flops**EXPONENT
            points += [
                Point(
                    run=f"c{flops:.0e}-{share}-{k}",
                    budget=flops,
                    size=parameters / 100,
                    seed=k,
                    flops=flops,
                    parameters=parameters,
                    tokens=flops / 6 / parameters,
                    steps=500,
                    bpb=loss(flops, parameters, E) + of_seed[k] + random.normal(0, noise),
                )
                for k in seeds
            ]
    return points


BUDGETS = (1e11, 3e11, 1e12)


def test_without_noise_the_minima_and_the_best_sizes_are_exact():
    found = fit(ladder(BUDGETS, noise=1e-6, common=0))
    assert not found.problem and not found.left_out
    for curve in found.curves:
        N, L = curve.best
        assert pytest.approx(K * curve.budget**EXPONENT, rel=1e-3) == N
        assert pytest.approx(E + A * curve.budget**-B, abs=1e-4) == L
    assert found.size_law == pytest.approx((K, EXPONENT), rel=1e-2)
    assert found.best_size(1e13) == pytest.approx(K * 1e13**EXPONENT, rel=1e-2)
    assert found.loss(1e13) == pytest.approx(E + A * 1e13**-B, rel=0.02)


def test_the_interval_holds_a_run_as_often_as_it_says():
    """E is drawn from 0.6 to 1.4, which is 27 to 62% of the lowest loss."""
    inside = []
    for seed in range(60):
        random = np.random.default_rng(1000 + seed)
        E = random.uniform(0.6, 1.4)
        found = fit(ladder(BUDGETS, seed=seed, E=E))
        low, high = found.interval(1e13)
        run = loss(1e13, K * 1e13**EXPONENT, E) + random.normal(0, math.hypot(0.01, 0.005))
        inside.append(low <= run <= high)
        assert low < found.loss(1e13) < high
    assert np.mean(inside) >= 0.78  # three standard deviations below 0.9


def test_the_noise_of_a_seed_has_a_part_that_is_common_to_a_budget():
    found = [fit(ladder((1e11, 3e11, 1e12, 3e12), noise=0.01, common=0.02, seed=s)).noise for s in range(20)]
    assert np.mean([one.own for one in found]) == pytest.approx(0.01, rel=0.1)
    assert np.mean([one.common for one in found]) == pytest.approx(0.02, rel=0.25)
    assert fit(ladder(BUDGETS, common=0)).noise.common < 0.01


def test_what_gives_no_forecast_is_named():
    some = ladder(BUDGETS[:2]) + ladder(BUDGETS[2:], seeds=(1,))
    assert not fit(some).problem, "budgets with one seed have the noise of the others"
    assert "no size has two seeds at one budget" in fit(ladder(BUDGETS, seeds=(1,))).problem
    assert fit(ladder(BUDGETS[:1])).problem == "1 of 1 budgets have a minimum, a forecast needs 2"


def test_short_runs_are_left_out_by_name():
    points = ladder(BUDGETS)
    short = [replace(point, steps=LEAST_STEPS - 1) if "0.4" in point.run else point for point in points]
    found = fit(short)
    assert "c1e+11-0.4-1: 299 steps, a run needs 300" in found.left_out
    assert [len(curve.sizes) for curve in found.curves] == [3, 3, 3]
    alone = fit([replace(point, steps=1) for point in points])
    assert "0 of 3 budgets" in alone.problem or "no size has two seeds" in alone.problem


def test_a_family_that_needs_twice_the_compute_has_that_multiplier():
    points = ladder(BUDGETS, noise=1e-4, common=0)
    # The same losses at twice the FLOPs.
    slower = [replace(point, budget=2 * point.budget, flops=2 * point.flops) for point in points]
    factor, (low, high) = multiplier(fit(points), fit(slower), 3e11)
    assert factor == pytest.approx(2, rel=0.05) and low < 2 < high
    assert fit(points).draws_R4.shape == (DRAWS, 4)
