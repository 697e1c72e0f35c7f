"""Define the figures: bits per byte by stage, the curves of a training, and the inside of a model.

Each is a value of `spider.report.charts`, the same for a page and a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np

from spider.evaluation import result
from spider.evaluation.records import Evaluation
from spider.evaluation.result import BITS, Curve, CutText, HeatMap, Histogram, Note, Results, baselines
from spider.report.charts import COLOURS, MARKERS, Axis, Band, Chart, Figure, Level, Series
from spider.report.formatting import bits, bytes_label, number, percent, plain
from spider.report.render import LETTER_WIDTH, picture
from spider.report.stages import Log, StageRecord, bits_per_byte, read_log, smoothed, validated
from spider.report.text_view import write_page
from spider.results import StageFolder

#: Files that `draw_stage` writes into a stage's folder.
FIGURES = ("loss.svg", "inside.svg", "boundaries.html")
#: Last bar of a histogram, which also counts larger sizes.
_LAST_BAR = 32
#: Most points of a line that have their values beside them.
_VALUED = 12
_BYTES = Axis("bytes trained", bytes_label)
#: Width in pixels of a stage in the picture of all stages.
_STAGE_WIDTH = 64.0
#: Names of the tasks that are answered during training, and of CORE for a bundle of them.
TASKS = "val/tasks/([^/]+|.+/CORE)"


def draw_stage(folder: StageFolder) -> list[Path]:
    """Draw `FIGURES` into a stage's folder, from its evaluation.json, train.json and metrics.jsonl.

    Raises:
        ValueError: One of the files is missing or damaged.
    """
    measured = Evaluation.read(folder.evaluation)
    where = f"{measured.run}, stage {measured.stage}"
    loss_path, inside_path, text_path = [folder.path / name for name in FIGURES]
    picture(loss_path, [(1, [loss([read_log(folder, 0, measured)], where)])])
    figures = figures_of(measured.results)
    columns = [(1.0, [panel]) for panel in inside(figures)]
    picture(inside_path, columns, max(800, 430 * len(columns)), title=f"{where}: inside the model")
    text = next((one for one in figures if isinstance(one, CutText)), None)
    unit = f" in {text.unit}" if text else ""
    write_page(text, text_path, f"{where}: held-out text{unit}")
    return [loss_path, inside_path, text_path]


def figures_of(results: Results) -> list[result.Figure]:
    """Return the figures of all results."""
    return [figure for one in results.values() for figure in one.figures]


def loss(logs: Sequence[Log], title: str, levels: Sequence[Level] = ()) -> Chart:
    """Draw training loss over bytes trained, raw and smoothed, and held-out bpb as marks at checkpoints.

    For a single run, stages are shaded and validation is a line. For several runs, the legend names each run
    once. If the beginning of training would take most of the axis, the axis ends below it.
    """
    runs = list(dict.fromkeys(log.run for log in logs))
    alone = len(runs) == 1
    series: list[Series] = []
    for index, run in enumerate(runs):
        own = [log for log in logs if log.run == run]
        colour = index % COLOURS
        x_S, y_S = _points(own, bits_per_byte)
        marks = [mark for log in own for mark in log.held_out]
        series += [
            Series("", x_S.tolist(), y_S.tolist(), colour, "faint"),
            Series("training" if alone else run, x_S.tolist(), smoothed(y_S).tolist(), colour),
            Series(
                name="held-out text" if alone else run,
                x=[x for x, _ in marks],
                y=[y for _, y in marks],
                colour=1 if alone else colour,
                style="dots",
                marker=MARKERS[index % len(MARKERS)],
            ),
        ]
        # A line joins the scores of a stage, which are of one text.
        series += [
            Series("", [x for x, _ in log.held_out], [y for _, y in log.held_out], 1 if alone else colour)
            for log in own
            if len(log.held_out) > 1
        ]
        if alone:
            x_V, y_V = _points(own, validated)
            series.append(Series("validation", x_V.tolist(), y_V.tolist(), 1, dashed=True))
    most, first = _end_of_axis(series)
    x_axis = _BYTES
    if most is not None:
        begins = "the curve begins at" if alone else "the curves begin at up to"
        x_axis = replace(_BYTES, label=f"{_BYTES.label}; {begins} {first:.2f}, above the top edge")
    return Chart(
        title,
        x_axis,
        Axis("bits per byte (log scale)", log=True, most=most),
        series,
        bands=[Band(log.stage, log.begin, log.end) for log in logs] if alone else (),
        levels=levels,
        readout="{:.3f} bits per byte".format,
        instead="no step was logged",
    )


def _points(logs: Sequence[Log], read: Callable[[dict[str, float]], float]) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes trained and a value of all rows of several stages."""
    points = [log.points(read) for log in logs]
    return np.concatenate([x_S for x_S, _ in points]), np.concatenate([y_S for _, y_S in points])


def _end_of_axis(series: Sequence[Series]) -> tuple[float | None, float]:
    """Return the end of an axis of losses (None: above all values), and the largest loss.

    The axis ends at the largest mark or the largest value of a line after its first tenth. This holds only if
    the values above would take more than a third of a logarithmic axis.
    """
    values = [y for one in series for y in one.y]
    later = [y for one in series if one.style == "dots" for y in one.y]
    for one in series:
        if one.style == "line" and len(one.x):
            begins = one.x[0] + 0.1 * (one.x[-1] - one.x[0])
            later += [y for x, y in one.points if x >= begins]
    first = max(values, default=0.0)
    if not later or min(values) <= 0:
        return None, first
    low = min(values)
    most = max(later)
    return most if math.log(first / low) > 1.5 * math.log(most / low) else None, first


def training(stages: list[StageRecord]) -> list[Chart]:
    """Return charts of a run over bytes trained: bits per byte, learning rates, gradient norm, speed."""
    logs = [stage.log for stage in stages if stage.log.rows]
    if not logs:
        return []
    levels = []
    scored = [stage.evaluation for stage in stages if stage.evaluation and stage.receipt]
    if scored:
        best = baselines(scored[-1].results)[:1]
        levels = [Level(row.note or row.label, row.value) for row in best if row.value is not None]
    bands = [Band(log.stage, log.begin, log.end) for log in logs]

    def logged(name: str, key: str, colour: int) -> Series:
        x_S, y_S = _points(logs, lambda metrics: metrics.get(f"train/{key}", math.nan))
        return Series(name, x_S.tolist(), y_S.tolist(), colour)

    def chart(title: str, y: Axis, readout: str, *series: Series) -> Chart:
        return Chart(title, _BYTES, y, series, bands, readout=readout.format)

    return [
        loss([stage.log for stage in stages if stage.log.rows or stage.evaluation], "Bits per byte", levels),
        chart(
            "Learning rate",
            Axis("", number, zero=True),
            "{:.2e}",
            logged("AdamW", "lr", 0),
            logged("Muon", "muon_lr", 2),
        ),
        chart("Gradient norm", Axis(log=True), "{:.3g}", logged("norm", "grad_norm", 3)),
        chart(
            "Bytes per second",
            Axis("", bytes_label, zero=True),
            "{:,.0f} bytes/s",
            logged("speed", "bytes_per_second", 4),
        ),
        *_by_name("Held-out text by source", BITS, "val/bpb_(.+)", logs, bands),
        *_by_name("Questions answered correctly", "share", TASKS, logs, bands),
    ]


def _by_name(title: str, y: str, pattern: str, logs: Sequence[Log], bands: Sequence[Band]) -> list[Chart]:
    """Return a chart of the metrics whose names match a pattern, if there are any; its group names a line."""
    found = dict.fromkeys(name for log in logs for row in log.rows for name in row.metrics)
    names = {name: match[1] for name in found if (match := re.fullmatch(pattern, name))}

    def curve(name: str, colour: int) -> Series:
        x_S, y_S = _points(logs, lambda metrics: metrics.get(name, math.nan))
        dashed = colour // COLOURS % 2 == 1
        return Series(names[name], x_S.tolist(), y_S.tolist(), colour % COLOURS, dashed=dashed)

    series = [curve(name, i) for i, name in enumerate(names)]
    return [Chart(title, _BYTES, Axis(y), series, bands)] if series else []


def inside(
    figures: Sequence[result.Figure], stages: Mapping[str, Sequence[result.Figure]] | None = None
) -> list[Figure]:
    """Return the panels of a stage's figures. A curve is drawn for each of ``stages`` that has it."""
    colours = cycle((0, 2, 3, 4, 5, 6))
    panels: list[Figure] = []
    for one in figures:
        if isinstance(one, Histogram):
            panels.append(_bars(one, next(colours)))
        elif isinstance(one, Curve):
            panels.append(_curve(one, stages or {"": figures}))
        elif isinstance(one, HeatMap | Note):
            panels.append(one)
    return panels


def _curve(last: Curve, stages: Mapping[str, Sequence[result.Figure]]) -> Chart:
    """Return a chart of all curves with this title."""
    curves = {
        name: one
        for name, figures in stages.items()
        for one in figures
        if isinstance(one, Curve) and one.title == last.title
    }
    series: list[Series] = []
    for index, (name, curve) in enumerate(curves.items()):
        count = len(curve.values)
        values = bits if len(curves) == 1 and count <= _VALUED else None
        line = Series(name, range(1, count + 1), curve.values, index % COLOURS)
        series += [line, replace(line, style="dots", values=values)]
    return Chart(
        last.title,
        Axis(last.x, ticks=_some(len(last.values)), margin=0.05),
        Axis(last.y, "{:.4g}".format, least_span=0.02, margin=0.1),
        series,
        rulers=[] if last.mark is None else [(last.mark_label, last.mark)],
        readout=f"{{:.4f}} {last.y}".format,
    )


def _some(count: int) -> range:
    """Return the ticks from 1 to ``count``, or some of them."""
    return range(1, count + 1, -(-count // _VALUED))


def _bars(one: Histogram, colour: int) -> Figure:
    """Return bars of the shares of sizes 1, 2, ...; sizes above `_LAST_BAR` are in the last bar."""
    counts = one.counts
    total = sum(counts)
    if not total:
        return Note(title=one.title, text=f"there were no {one.things}")
    if counts.count(0) == len(counts) - 1:
        size = len(counts) - 1
        unit = one.unit.removesuffix("s") if size == 1 else one.unit
        return Note(title=one.title, text=f"all {total:,} {one.things}: {size} {unit}")
    mean = sum(n * count for n, count in enumerate(counts)) / total
    shares = [100 * count / total for count in counts[1:]]
    label = one.unit
    last = ""
    if len(shares) > _LAST_BAR:
        shares = [*shares[: _LAST_BAR - 1], sum(shares[_LAST_BAR - 1 :])]
        label = f"{one.unit} (last bar: {_LAST_BAR} and more)"
        last = "+"
    count = len(shares)
    return Chart(
        f"{one.title} (mean {mean:.2f})",
        Axis(label, lambda x: f"{int(x)}{last if x == count else ''}", ticks=_some(count)),
        Axis(f"share of {total:,} {one.things}", percent, zero=True),
        [Series("", range(1, count + 1), shares, colour, "bars")],
    )


def bits_by_stage(
    runs: Mapping[str, Sequence[tuple[str, float]]],
    compressors: Mapping[str, Mapping[str, float]],
    which: str,
) -> Chart:
    """Return a chart of bpb after each stage, run next to run, with the compressors' rates as dashed lines.

    A rate that all runs share is one line with its name at the right end. Any other rate has a line for each
    run, with its value. Its name is shown at the last run that has it, or at every run if no rate is shared.
    One weak run does not decide the scale: its marks are drawn at the upper edge, with their values.

    Args:
        runs: Names and bits of each run's stages.
        compressors: Rates of the baselines on each run's text.
        which: End of the title, such as the number of runs.
    """
    shared = set.intersection(*(set(rates.items()) for rates in compressors.values()))
    own = {run: [one for one in compressors[run].items() if one not in shared] for run in runs}
    last = {name: run for run, rates in own.items() for name, _ in rates}
    series: list[Series] = []
    levels: list[Level] = []
    names: dict[float, str] = {}
    at = 0.0
    for index, (run, stages) in enumerate(runs.items()):
        positions = {at + i: stage for i, (stage, _) in enumerate(stages)}
        line = Series(run, [*positions], [value for _, value in stages], index % COLOURS)
        series += [line, replace(line, style="dots", marker=MARKERS[index % len(MARKERS)], values=bits)]
        names |= positions
        end = at + len(stages) - 1 + 0.6
        labels = [
            (f"{name} {rate:.3f}" if last[name] == run or not shared else f"{rate:.3f}", rate)
            for name, rate in own[run]
        ]
        levels += [Level(label, rate, at - 0.4, end) for label, rate in labels]
        letters = max((len(label) for label, _ in labels), default=0)
        at = end + 1 + (letters * LETTER_WIDTH + 10) / _STAGE_WIDTH
    levels += [Level(f"{name} {rate:.3f}", rate, -0.4, end) for name, rate in sorted(shared)]
    return Chart(
        f"Held-out text, each document alone: bits per byte by stage, against compressors{which}",
        Axis("after stage", names.__getitem__, ticks=[*names], margin=0.02),
        Axis("bits per byte (lower is better)", plain, margin=0.1, most=_without_outliers(series, levels)),
        series,
        levels=levels,
        far_levels=True,
    )


def width_of(chart: Chart) -> float:
    """Return the width in pixels of a picture of `bits_by_stage`, so that labels do not overlap."""
    names = max((len(level.name) for level in chart.levels), default=0)
    ends = [level.end for level in chart.levels if level.end is not None]
    last = max([*ends, *(x for one in chart.series for x in one.x)])
    wide = max(_STAGE_WIDTH, LETTER_WIDTH * max(len(chart.x.format(x)) for x in chart.x.ticks or ()) + 10)
    return max(760, 130 + LETTER_WIDTH * names + wide * (last + 1) * 1.04)


def _without_outliers(series: Sequence[Series], levels: Sequence[Level]) -> float | None:
    """Return the end of an axis that leaves out a few values far above the others; None: above all.

    Far means above the upper quartile by more than one and a half times the distance of the quartiles.
    """
    values = [y for one in series if one.style == "dots" for y in one.y]
    lower, upper = np.quantile(values, (0.25, 0.75))
    rates = [level.value for level in levels]
    low = min([*values, *rates])
    most = max([*rates, *(y for y in values if y <= upper + 1.5 * (upper - lower))])
    return most if max(values) - low > 2 * (most - low) else None
