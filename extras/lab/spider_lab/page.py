"""The page of all ladders: parabolas, laws with their intervals, forecasts against results, multipliers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spider import files
from spider.config import Config
from spider.report.charts import COLOURS, MARKERS, Axis, Chart, Series
from spider.report.formatting import count_label, flops_label, quantity
from spider.report.render import html, picture
from spider.results import Results
from spider_lab.fit import COVERAGE, Curve, Fit, multiplier
from spider_lab.forecast import Forecast, Prediction, Rung, copy_of, finished, path_of
from spider_lab.ladders import FARTHEST, ladders_of, waiting_of

Rows = list[list[str]]


class Table(NamedTuple):
    """A table of the page."""

    title: str
    header: list[str]
    rows: Rows


@dataclass(frozen=True)
class View:
    """A ladder on the page."""

    forecast: Forecast
    fit: Fit
    targets: list[Rung]
    stale: list[str]
    """Runs that began with another forecast than the one of today."""

    @property
    def name(self) -> str:
        return self.forecast.ladder


def write_ladders(config: Config, results: Results, output: Path) -> list[View]:
    """Write the page of all ladders, and ``.svg`` and ``.json`` beside it.

    Raises:
        ValueError: the forecast of a ladder is missing or damaged.
    """
    views = [_view(config, results, name) for name in ladders_of(config)]
    figures = [[_parabolas(view) for view in views], [_losses(views), _sizes(views)]]
    multipliers = _multipliers(views)
    page = html(
        "ladders.html.j2",
        script="page.js",
        views=views,
        charts={view.name: [chart] for view, chart in zip(views, figures[0], strict=True)},
        together=figures[1],
        tables={view.name: _tables(view) for view in views},
        multipliers=Table(
            "Compute multipliers",
            ["ladder", "has the loss of", "at", f"with so many times the compute ({COVERAGE:.0%} interval)"],
            [[*row[:2], flops_label(float(row[2])), row[3]] for row in multipliers],
        ),
    )
    files.write_text(output, page)
    picture(output.with_suffix(".svg"), [(1.4, figures[0]), (1, figures[1])], 1200, 400 * max(2, len(views)))
    plain = {view.name: _plain(view) for view in views}
    files.write_json(output.with_suffix(".json"), plain | {"multipliers": multipliers})
    return views


def _view(config: Config, results: Results, name: str) -> View:
    forecast = Forecast.read(path_of(results, name))
    waiting = waiting_of(config, name)
    began = [run for run in waiting if copy_of(results, run).is_file()]
    stale = [
        f"{run}: stale, a run of the ladder has changed since this one began"
        for run in began
        if Forecast.read(copy_of(results, run)).digest != forecast.digest
    ]
    return View(forecast, forecast.fit, finished(config, results, name, waiting), stale)


def _plain(view: View) -> dict[str, object]:
    """Return what the page shows of a ladder, for programs."""
    return {
        "forecast": view.forecast.plain(),
        "minima": [[c.budget, *c.best] for c in view.fit.curves if c.best],
        "size_law": view.fit.size_law,
        "results": [asdict(one) for one in view.targets],
        "stale": view.stale,
    }


# ------------------------------------------------------------------------------------------------- tables


def _tables(view: View) -> list[Table]:
    sizes = [
        [
            flops_label(curve.budget),
            ", ".join(f"{size:g}" for size in curve.sizes),
            ", ".join(map(str, curve.seeds)),
            quantity(curve.best[0], "") if curve.best else "",
            quantity(curve.flops / 6 / curve.best[0], "") if curve.best else "",
            f"{curve.best[1]:.4f}" if curve.best else "",
            f"{curve.missed:.4f}",
            curve.problem or "",
        ]
        for curve in view.fit.curves
    ]
    of_curves = "FLOPs|sizes|seeds|best N|tokens|bits per byte|parabola misses|left out"
    runs = [
        [
            rung.run,
            flops_label(rung.budget),
            quantity(rung.parameters, ""),
            quantity(rung.tokens, ""),
            f"{rung.steps:,}",
            f"{rung.bpb:.4f}",
        ]
        for rung in [*view.forecast.rungs, *view.targets]
    ]
    return [
        Table("Forecasts", _FORECASTS, [_forecast_row(view, one) for one in view.forecast.predictions]),
        Table("Best size of each budget", of_curves.split("|"), sizes),
        Table("Runs", ["run", "FLOPs", "N", "tokens", "steps", "bits per byte"], runs),
    ]


_FORECASTS = ["FLOPs", "forecast", "90% interval", "best N", "tokens", "settings", "result", "error"]


def _forecast_row(view: View, one: Prediction) -> list[str]:
    done = [rung.bpb for rung in view.targets if rung.budget == one.flops]
    settings = ", ".join(f"{key} {value:.4g}" for key, value in one.settings.items() if key != "target_flops")
    row = [flops_label(one.flops), f"{one.bpb:.4f}", f"{one.low:.4f} to {one.high:.4f}"]
    row += [quantity(one.parameters, ""), quantity(one.tokens, ""), settings]
    if not done:
        return [*row, "", ""]
    inside = "inside" if one.low <= min(done) <= one.high else "outside"
    return [*row, f"{min(done):.4f}", f"{one.bpb / min(done) - 1:+.1%}, {inside}"]


def _multipliers(views: list[View]) -> Rows:
    """Return how much compute a ladder needs for the loss of another that has other runs on the same text."""
    rows = []
    for one, other in permutations([view for view in views if not view.fit.problem], 2):
        shared = {rung.run for rung in one.forecast.rungs} & {rung.run for rung in other.forecast.rungs}
        if one.forecast.held_out == other.forecast.held_out and not shared:
            flops = one.fit.largest
            factor, (low, high) = multiplier(one.fit, other.fit, flops)
            text = f"{_times(factor)} ({_times(low)} to {_times(high)})"
            rows.append([other.name, one.name, str(flops), text])
    return rows


def _times(factor: float) -> str:
    """Return how many times the compute is needed. Forecasts reach no further than this either."""
    if factor > FARTHEST or np.isnan(factor):
        return f"over {FARTHEST:.0f}"
    return f"{factor:.2g}" if factor > 1 / FARTHEST else f"under 1/{FARTHEST:.0f}"


# ------------------------------------------------------------------------------------------------ figures


def _parabolas(view: View) -> Chart:
    series = [one for number, curve in enumerate(view.fit.curves) for one in _parabola(curve, number)]
    for rung in view.targets:
        name = f"{flops_label(rung.budget)}, after its forecast"
        series.append(Series(name, [rung.parameters], [rung.bpb], 0, "dots", "*"))
    return Chart(
        f"{view.name}: mean over seeds, a curve for each budget",
        Axis("N: FLOPs a token over 6", count_label, log=True, margin=0.03),
        Axis("bits per byte on held-out text"),
        series,
    )


def _parabola(curve: Curve, number: int) -> list[Series]:
    colour = number % COLOURS
    name = flops_label(curve.budget) + (" (left out)" if curve.problem else "")
    marker = MARKERS[number % len(MARKERS)]
    series = [Series(name, curve.parameters, curve.means, colour, "dots", marker)]
    if curve.coefficients is not None:
        dense = np.geomspace(curve.parameters[0] * 0.92, curve.parameters[-1] * 1.08, 200)
        drawn = np.polyval(curve.coefficients, np.log10(dense)).tolist()
        series.append(Series("", dense.tolist(), drawn, colour, dashed=curve.problem is not None))
    return series


def _dots(name: str, points: list[tuple[float, float]], colour: int, marker: str = "o") -> Series:
    return Series(name, [x for x, _ in points], [y for _, y in points], colour, "dots", marker)


def _losses(views: list[View]) -> Chart:
    """Draw the law of each ladder with its interval, its minima, and the results that came later."""
    series = []
    for colour, view in enumerate(views):
        fitted = view.fit
        minima = [(curve.flops, curve.best[1]) for curve in fitted.curves if curve.best]
        if minima:
            series.append(_dots(view.name, minima, colour))
        if view.targets:
            done = [(rung.flops, rung.bpb) for rung in view.targets]
            name = f"{view.name}, after its forecast"
            series.append(_dots(name, done, colour, "*"))
        if fitted.problem:
            continue
        last = max([fitted.largest, *(one.flops for one in view.forecast.predictions)])
        dense = np.geomspace(min(flops for flops, _ in minima), last * 1.2, 60).tolist()
        series.append(Series("", dense, [fitted.loss(one) for one in dense], colour))
        for side in (0, 1):
            bound = [fitted.interval(one)[side] for one in dense]
            series.append(Series("", dense, bound, colour, dashed=True))
    return Chart(
        f"Loss of the best size, with the {COVERAGE:.0%} interval of a run",
        Axis("FLOPs of training", flops_label, log=True, margin=0.03),
        Axis("bits per byte on held-out text"),
        series,
        instead="no ladder has a law",
    )


def _sizes(views: list[View]) -> Chart:
    series = []
    for colour, view in enumerate(views):
        minima = [(curve.flops, curve.best[0]) for curve in view.fit.curves if curve.best]
        if minima:
            series.append(_dots(view.name, minima, colour))
        if view.fit.size_law:
            ends = [minima[0][0], max([minima[-1][0], *(one.flops for one in view.forecast.predictions)])]
            exponent = view.fit.size_law[1]
            name = f"{view.name}: N* ~ C^{exponent:.2f}"
            series.append(Series(name, ends, [view.fit.best_size(end) for end in ends], colour))
    return Chart(
        "Best size",
        Axis("FLOPs of training", flops_label, log=True, margin=0.03),
        Axis("N*", count_label, log=True, margin=0.12),
        series,
        instead="no ladder has a law",
    )
