"""The page of all ladders: parabolas, laws with their intervals, forecasts against results, multipliers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Literal

import numpy as np

from spider.common import files
from spider.common.formatting import bits
from spider.common.results import Results
from spider.config import Config
from spider.evaluation.result import COUNT, Number, Plot, Result, Row, Series, Table
from spider.report import figures
from spider.report.page import results_page
from spider_lab.fit import COVERAGE, Curve, Fit, multiplier
from spider_lab.forecast import Forecast, Prediction, Rung, copy_of, finished, path_of
from spider_lab.ladders import FARTHEST, ladders_of, waiting_of

_ABOUT = (
    "N is the FLOPs of a token over 6, so that C = 6 N D. At each budget a parabola in log N is fitted to "
    "the means over seeds; the law E + A C^-b goes through the minima. A few budgets hardly identify E, so "
    "it is drawn from a quarter to two thirds of the lowest loss, and the interval covers what fits of that, "
    "the noise of seeds in the fit, and that of the run that is forecast."
)


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
    found = {view.name: _result(view) for view in views}
    multipliers = _multipliers(views)
    rows = [
        Row(
            name=f"{one} as {other}",
            label=one,
            value=None,
            text=other,
            columns={
                "at": Number(value=None, text=_flops(float(flops))),
                f"with so many times the compute ({COVERAGE:.0%} interval)": Number(value=None, text=times),
            },
        )
        for one, other, flops, times in multipliers
    ]
    table = Table(title="Compute multipliers", head="ladder", value="has the loss of", rows=rows)
    together = Result(
        title="All ladders",
        figures=[_losses(views), _sizes(views), *([table] if rows else [])],
        notes=[_ABOUT],
    )
    files.write_text(output, results_page("Ladders", [*found.values(), together]))
    drawn = [one for view in views for one in found[view.name].figures if isinstance(one, Plot)]
    figures.save([*drawn, *together.figures[:2]], output.with_suffix(".svg"))
    plain = {view.name: _plain(view) for view in views}
    shown = {f"ladder {name}": one.model_dump(mode="json") for name, one in found.items()}
    files.write_json(output.with_suffix(".json"), plain | {"multipliers": multipliers, "results": shown})
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


def _result(view: View) -> Result:
    """Return what a ladder found."""
    forecast = view.forecast
    notes = [
        f"{view.name} at {_flops(one.flops)}: forecast {bits(one.bpb)} bits per byte, {bits(one.low)} to "
        f"{bits(one.high)}."
        for one in forecast.predictions
    ]
    if forecast.problem:
        notes.append(f"{view.name}: no forecast, {forecast.problem}.")
    notes += view.stale
    if noise := view.fit.noise:
        notes.append(
            f"Another seed moves a run by {noise.total:.4f} bits per byte (standard deviation); "
            f"{noise.common:.4f} of it is common to all sizes of a budget."
        )
    if forecast.left_out:
        notes.append(f"Left out: {'; '.join(forecast.left_out)}.")
    tables = [one for one in _tables(view) if one.rows]
    return Result(title=f"Ladder {view.name}", figures=[_parabolas(view), *tables], notes=notes)


# ------------------------------------------------------------------------------------------------- tables


def _flops(value: float) -> str:
    """Return ``1.8e12``."""
    return f"{value:.3g}".replace("e+", "e")


def _text(text: str) -> Number:
    return Number(value=None, text=text)


def _count(value: float | None) -> Number:
    return Number(value=value, unit=COUNT)


def _tables(view: View) -> list[Table]:
    sizes = [
        Row(
            name=_flops(curve.budget),
            label=_flops(curve.budget),
            value=None,
            text=", ".join(f"{size:g}" for size in curve.sizes),
            columns={
                "seeds": _text(", ".join(map(str, curve.seeds))),
                "best N": _count(curve.best[0] if curve.best else None),
                "tokens": _count(curve.flops / 6 / curve.best[0] if curve.best else None),
                "bits per byte": Number(value=curve.best[1] if curve.best else None),
                "parabola misses": Number(value=curve.missed),
                "left out": _text(curve.problem or ""),
            },
        )
        for curve in view.fit.curves
    ]
    runs = [
        Row(
            name=rung.run,
            label=rung.run,
            value=None,
            text=_flops(rung.budget),
            columns={
                "N": _count(rung.parameters),
                "tokens": _count(rung.tokens),
                "steps": Number(value=rung.steps),
                "bits per byte": Number(value=rung.bpb),
            },
        )
        for rung in [*view.forecast.rungs, *view.targets]
    ]
    forecasts = [_forecast_row(view, one) for one in view.forecast.predictions]
    return [
        Table(title=f"{view.name}: forecasts", head="FLOPs", value="forecast", rows=forecasts),
        Table(title=f"{view.name}: best size of each budget", head="FLOPs", value="sizes", rows=sizes),
        Table(title=f"{view.name}: runs", head="run", value="FLOPs", rows=runs),
    ]


def _forecast_row(view: View, one: Prediction) -> Row:
    done = [rung.bpb for rung in view.targets if rung.budget == one.flops]
    settings = ", ".join(f"{key} {value:.4g}" for key, value in one.settings.items() if key != "target_flops")
    error = ""
    if done:
        inside = "inside" if one.low <= min(done) <= one.high else "outside"
        error = f"{one.bpb / min(done) - 1:+.1%}, {inside}"
    return Row(
        name=_flops(one.flops),
        label=_flops(one.flops),
        value=one.bpb,
        columns={
            "90% interval": _text(f"{one.low:.4f} to {one.high:.4f}"),
            "best N": _count(one.parameters),
            "tokens": _count(one.tokens),
            "settings": _text(settings),
            "result": Number(value=min(done, default=None)),
            "error": _text(error),
        },
    )


def _multipliers(views: list[View]) -> list[list[str]]:
    """Return how much compute a ladder needs for the loss of another that has other runs on the same text."""
    rows: list[list[str]] = []
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


def _parabolas(view: View) -> Plot:
    series = [one for number, curve in enumerate(view.fit.curves) for one in _parabola(curve, number)]
    for rung in view.targets:
        name = f"{_flops(rung.budget)}, after its forecast"
        series.append(Series(name=name, x=[rung.parameters], y=[rung.bpb], style="stars"))
    return Plot(
        title=f"{view.name}: mean over seeds, a curve for each budget",
        x="N: FLOPs a token over 6",
        y="bits per byte on held-out text",
        series=series,
        log_x=True,
    )


def _parabola(curve: Curve, number: int) -> list[Series]:
    colour = number % 7
    name = _flops(curve.budget) + (" (left out)" if curve.problem else "")
    series = [_dots(name, zip(curve.parameters, curve.means, strict=True), colour)]
    if curve.coefficients is not None:
        dense = np.geomspace(curve.parameters[0] * 0.92, curve.parameters[-1] * 1.08, 200)
        drawn = np.polyval(curve.coefficients, np.log10(dense)).tolist()
        style: Literal["dashed", "line"] = "dashed" if curve.problem else "line"
        series.append(Series(x=dense.tolist(), y=drawn, colour=colour, style=style))
    return series


def _dots(
    name: str, points: Iterable[tuple[float, float]], colour: int, style: Literal["dots", "stars"] = "dots"
) -> Series:
    points = [*points]
    return Series(name=name, x=[x for x, _ in points], y=[y for _, y in points], colour=colour, style=style)


def _losses(views: list[View]) -> Plot:
    """Draw the law of each ladder with its interval, its minima, and the results that came later."""
    series = []
    for colour, view in enumerate(views):
        fitted = view.fit
        minima = [(curve.flops, curve.best[1]) for curve in fitted.curves if curve.best]
        if minima:
            series.append(_dots(view.name, minima, colour))
        if view.targets:
            done = [(rung.flops, rung.bpb) for rung in view.targets]
            series.append(_dots(f"{view.name}, after its forecast", done, colour, "stars"))
        if fitted.problem:
            continue
        last = max([fitted.largest, *(one.flops for one in view.forecast.predictions)])
        dense = np.geomspace(min(flops for flops, _ in minima), last * 1.2, 60).tolist()
        series.append(Series(x=dense, y=[fitted.loss(one) for one in dense], colour=colour))
        for side in (0, 1):
            bound = [fitted.interval(one)[side] for one in dense]
            series.append(Series(x=dense, y=bound, colour=colour, style="dashed"))
    return Plot(
        title=f"Loss of the best size, with the {COVERAGE:.0%} interval of a run",
        x="FLOPs of training",
        y="bits per byte on held-out text",
        series=series,
        log_x=True,
        instead="no ladder has a law",
    )


def _sizes(views: list[View]) -> Plot:
    series = []
    for colour, view in enumerate(views):
        minima = [(curve.flops, curve.best[0]) for curve in view.fit.curves if curve.best]
        if minima:
            series.append(_dots(view.name, minima, colour))
        if view.fit.size_law:
            ends = [minima[0][0], max([minima[-1][0], *(one.flops for one in view.forecast.predictions)])]
            name = f"{view.name}: N* ~ C^{view.fit.size_law[1]:.2f}"
            best = [view.fit.best_size(end) for end in ends]
            series.append(Series(name=name, x=ends, y=best, colour=colour))
    return Plot(
        title="Best size",
        x="FLOPs of training",
        y="N*",
        series=series,
        log_x=True,
        log_y=True,
        instead="no ladder has a law",
    )
