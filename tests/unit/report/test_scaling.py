"""Test scaling laws on points whose law is known, and on real runs."""

import math

import numpy as np
import pytest

from spider.config import load_config
from spider.files import read_json
from spider.report.scaling import (
    Point,
    draw_scaling,
    fit,
    fit_budget,
    fit_law,
    markdown,
    read_points,
    write_scaling,
)
from spider.results import Results
from tests.unit.report.finished import config_of, encode_text, train_stage

#: Constants of L = E + A / N^alpha + B / D^beta. Its best size at C = 6 N D is known in closed form.
E, A, ALPHA, B, BETA = 0.6, 40.0, 0.34, 60.0, 0.28
BUDGETS = (1e13, 3e13, 1e14, 3e14, 1e15)


def best_size(flops: float) -> float:
    scale = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    return scale * (flops / 6) ** (BETA / (ALPHA + BETA))


def point(flops: float, size: float, noise: float = 0.0, **changed) -> Point:
    data = flops / (6 * size)
    bpb = E + A / size**ALPHA + B / data**BETA + noise
    return Point(**{"run": "r", "budget": flops, "flops": flops, "parameters": size,
                    "all_parameters": round(2 * size), "bytes": data, "bpb": bpb} | changed)  # fmt: skip


def sweep(noise: float = 0.0, seed: int = 0) -> list[Point]:
    """Seven sizes around the best one of each budget."""
    random = np.random.default_rng(seed)
    return [
        point(flops, best_size(flops) * ratio, noise * random.standard_normal())
        for flops in BUDGETS
        for ratio in np.geomspace(0.6, 1.7, 7)
    ]


def test_known_exponents_are_recovered():
    found = fit(sweep())
    assert found.problem is None and all(curve.problem is None for curve in found.curves)
    assert found.laws["parameters"].exponent == pytest.approx(BETA / (ALPHA + BETA), abs=0.01)
    assert found.laws["bytes"].exponent == pytest.approx(ALPHA / (ALPHA + BETA), abs=0.01)
    for curve in found.curves:
        best = best_size(curve.budget)
        assert curve.best["parameters"] == pytest.approx(best, rel=0.03)
        assert curve.best["bytes"] == pytest.approx(curve.budget / (6 * best), rel=0.04)
        assert curve.best["bpb"] == pytest.approx(point(curve.budget, best).bpb, abs=1e-3)


def test_with_noise_the_error_of_an_exponent_is_realistic():
    off = []
    for seed in range(20):
        law = fit(sweep(0.002, seed)).laws["parameters"]
        assert law.error > 0
        off.append((law.exponent - BETA / (ALPHA + BETA)) / law.error)
    assert 0.3 < float(np.sqrt(np.mean(np.square(off)))) < 4


def test_a_parabola_that_opens_downwards_is_reported_and_not_used():
    points = [point(1e13, size, bpb=bpb) for size, bpb in ((1e5, 2.0), (2e5, 2.1), (4e5, 2.0))]
    curve = fit_budget(1e13, points)
    assert "opens downwards" in curve.problem and curve.best == {}
    others = [p for p in sweep() if p.budget != 1e13]
    found = fit(points + others)
    assert found.curves[0] == curve and found.laws == fit(others).laws


@pytest.mark.parametrize(
    ("ratios", "problem"), [((2, 3, 4), "below the smallest"), ((0.2, 0.3, 0.4), "above the largest")]
)
def test_a_minimum_outside_the_sizes_is_reported_and_not_used(ratios, problem):
    points = [point(1e14, best_size(1e14) * ratio) for ratio in ratios]
    curve = fit_budget(1e14, points)
    assert problem in curve.problem and curve.best == {}


def test_too_few_sizes_or_budgets_give_no_law(tmp_path):
    points = [p for p in sweep() if p.budget == 1e13] + [point(3e13, 1e5), point(3e13, 2e5)]
    found = fit(points)
    assert found.curves[1].problem == "2 sizes, a parabola needs 3"
    assert found.problem == "1 of 2 budgets have a minimum, a law needs 2" and found.laws == {}
    assert "No law: 1 of 2 budgets" in markdown(found, "demo")
    draw_scaling(found, tmp_path / "a.svg", "t")
    assert (tmp_path / "a.svg").read_text().count(">1 of 2 budgets have a minimum, a law needs 2</text>") == 3


def test_the_best_run_of_one_size_and_budget_counts():
    worse = [point(p.budget, p.parameters, run="worse", bpb=p.bpb + 0.3) for p in sweep()]
    assert fit(worse + sweep()) == fit(sweep())
    assert all(p.run == "r" for curve in fit(worse + sweep()).curves for p in curve.points)


def test_the_law_passes_through_exact_minima():
    law = fit_law([1e12, 1e13, 1e14], [2e5, 6e5, 18e5])
    assert law.exponent == pytest.approx(math.log10(3)) and law.at(1e13) == pytest.approx(6e5)
    assert law.error == pytest.approx(0, abs=1e-6)
    assert fit_law([1e12, 1e14], [1, 10]).error is None


def test_the_coefficients_are_of_the_logarithm_of_the_size():
    curve = fit_budget(1e14, [p for p in sweep() if p.budget == 1e14])
    at = np.polyval(curve.coefficients, math.log10(curve.best["parameters"]))
    assert at == pytest.approx(curve.best["bpb"], abs=1e-9) and curve.residual < 1e-3


def test_the_table_has_laws_minima_and_runs():
    text = markdown(fit(sweep()), "demo")
    assert "| Best parameters |" in text and text.count("| r |") == 35 and "bytes per parameter" in text
    assert len({line.count("|") for line in text.split("\n\n")[2].splitlines()}) == 1


def test_real_runs_become_points_and_files(tmp_path):
    plain = config_of(tmp_path)
    run = plain["runs"]["small"]
    sizes = {f"d{hidden}": run["model"] | {"hidden": hidden} for hidden in (16, 32, 64)}
    run |= {"stages": [{"name": "first"}], "grid": {"model": sizes, "target_flops": {"s": 6e7, "l": 2e8}}}
    run["evaluation"] |= {"loops_bytes": 0, "max_bytes": 500}
    config, results = load_config(plain | {"scaling": "small"}), Results(tmp_path)
    encode_text(results)
    with pytest.raises(ValueError, match=r"runs/small-d16-s/first/train\.json: no such file"):
        read_points(config, results, "small")
    for name in config.runs:
        train_stage(config, results, "first", run=name)
    points = read_points(config, results, "small")
    assert [point.run for point in points] == config.sweeps["small"] == list(config.runs)
    for point in points:
        # The trainer takes whole steps, and one more would exceed the budget.
        step = config.stage(point.run, "first").tokens_per_step
        receipt = read_json(results.stage(point.run, "first").receipt)
        assert point.flops <= point.budget < point.flops * (1 + step / receipt["tokens"])
        assert 0 < point.parameters < point.all_parameters - 1000 and point.bytes == receipt["bytes"]
    found = write_scaling(config, results, tmp_path / "scaling.json")
    assert read_json(tmp_path / "scaling.json")["curves"][1]["points"][2]["run"] == "small-d64-l"
    assert len(found.curves) == 2 and (tmp_path / "scaling.svg").exists()
    assert (tmp_path / "scaling.md").read_text() == markdown(found, "small")
