"""Which figures there are: bits per byte by stage, what a training logged, what is inside a model.

Each is a value of `spider.report.charts`, the same for a page and for a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np

from spider.evaluation import result
from spider.evaluation.records import Evaluation
from spider.evaluation.result import Curve, CutText, HeatMap, Histogram, Note, Results, baselines
from spider.report.charts import COLOURS, MARKERS, Axis, Band, Chart, Figure, Level, Series
from spider.report.formatting import bits, bytes_label, number, percent, plain
from spider.report.render import picture
from spider.report.stages import Log, StageRecord, read_log, smoothed, validated
from spider.report.text_view import write_page
from spider.results import StageFolder

#: What is drawn into a stage's folder.
FIGURES = ("loss.svg", "inside.svg", "boundaries.html")
#: Last bar of a histogram; what is longer is in it as well.
_LONGEST = 32
#: Points of a line at most that have their values beside them.
_VALUED = 12
_BYTES = Axis("bytes trained", bytes_label)
#: Pixels of a stage, and of a letter, in the picture of all stages.
_STAGE_WIDTH, _LETTER_WIDTH = 64.0, 7.5


def draw_stage(folder: StageFolder) -> list[Path]:
    """Draw `FIGURES` into a stage's folder, from its evaluation.json, train.json and metrics.jsonl.

    Raises:
        ValueError: one of the files is missing or damaged.
    """
    measured = Evaluation.read(folder.evaluation)
    where = f"{measured.run}, stage {measured.stage}"
    paths = [folder.path / name for name in FIGURES]
    picture(paths[0], [(1, [loss([read_log(folder, 0, measured.bpb)], where)])])
    columns = [(1.0, [panel]) for panel in inside(figures_of(measured.results))]
    picture(paths[1], columns, max(800, 430 * len(columns)), title=f"{where}: inside the model")
    text = next((one for one in figures_of(measured.results) if isinstance(one, CutText)), None)
    unit = f" in {text.unit}" if text else ""
    write_page(text, paths[2], f"{where}: held-out text{unit}")
    return paths


def figures_of(results: Results) -> list[result.Figure]:
    """Return the figures of all results."""
    return [figure for one in results.values() for figure in one.figures]


def loss(logs: Sequence[Log], title: str, levels: Sequence[Level] = ()) -> Chart:
    """Draw training loss over bytes trained, raw and smoothed, and held-out bpb as marks at stage ends.

    Where there is one run its stages are shaded, and what it validated on the way is a line. With several,
    the legend names each run once. Where the beginning would take most of the axis, the axis ends below it.
    """
    runs = list(dict.fromkeys(log.run for log in logs))
    alone = len(runs) == 1
    series: list[Series] = []
    for index, run in enumerate(runs):
        own = [log for log in logs if log.run == run]
        colour, marker = index % COLOURS, MARKERS[index % len(MARKERS)]
        x_S, y_S = (np.concatenate(parts) for parts in zip(*(log.points() for log in own), strict=True))
        scored = [(log.end, log.held_out) for log in own if log.held_out is not None]
        names = ("training", "held-out text") if alone else (run, run)
        ends, bpb = [end for end, _ in scored], [value for _, value in scored]
        series += [
            Series("", x_S.tolist(), y_S.tolist(), colour, "faint"),
            Series(names[0], x_S.tolist(), smoothed(y_S).tolist(), colour),
            Series(names[1], ends, bpb, 1 if alone else colour, "dots", marker),
        ]
        if alone:
            parts = zip(*(log.points(validated) for log in own), strict=True)
            x_V, y_V = (np.concatenate(part).tolist() for part in parts)
            series.append(Series("validation", x_V, y_V, 1, dashed=True))
    most, first = _end_of_axis(series)
    under = _BYTES
    if most is not None:
        begins = "the curve begins at" if alone else "the curves begin at up to"
        under = replace(_BYTES, label=f"{_BYTES.label}; {begins} {first:.2f}, above the top edge")
    return Chart(
        title,
        under,
        Axis("bits per byte (log scale)", log=True, most=most),
        series,
        bands=[Band(log.stage, log.begin, log.end) for log in logs] if alone else (),
        levels=levels,
        say="{:.3f} bits per byte".format,
        instead="no step was logged",
    )


def _end_of_axis(series: Sequence[Series]) -> tuple[float | None, float]:
    """Return where an axis of losses ends, None for above all of them, and the largest loss.

    It ends at the largest value of the marks, and of the lines behind their first tenth, but only if the
    values above would take more than a third of a logarithmic axis.
    """
    values = [y for one in series for y in one.y]
    kept = [y for one in series if one.style == "dots" for y in one.y]
    for one in series:
        if one.style == "line" and len(one.x):
            begins = one.x[0] + 0.1 * (one.x[-1] - one.x[0])
            kept += [y for x, y in one.points if x >= begins]
    if not kept or min(values) <= 0:
        return None, max(values, default=0.0)
    low, most, first = min(values), max(kept), max(values)
    return most if math.log(first / low) > 1.5 * math.log(most / low) else None, first


def training(stages: list[StageRecord]) -> list[Chart]:
    """Charts of a run over bytes trained: bits per byte, learning rates, norm of the gradient, speed."""
    logs = [stage.log for stage in stages if stage.log.rows]
    if not logs:
        return []
    levels = []
    if scored := [stage.evaluation for stage in stages if stage.evaluation and stage.receipt]:
        levels = [Level(row.note or row.label, row.value or 0.0) for row in baselines(scored[-1].results)[:1]]
    bands = [Band(log.stage, log.begin, log.end) for log in logs]

    def logged(name: str, key: str, colour: int) -> Series:
        pairs = [log.points(lambda metrics: metrics.get(f"train/{key}", math.nan)) for log in logs]
        x_S, y_S = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        return Series(name, x_S.tolist(), y_S.tolist(), colour)

    def chart(title: str, y: Axis, said: str, *series: Series) -> Chart:
        return Chart(title, _BYTES, y, series, bands, say=said.format)

    rates = logged("AdamW", "lr", 0), logged("Muon", "muon_lr", 2)
    speed = logged("speed", "bytes_per_second", 4)
    return [
        loss([stage.log for stage in stages if stage.log.rows or stage.evaluation], "Bits per byte", levels),
        chart("Learning rate", Axis("", number, zero=True), "{:.2e}", *rates),
        chart("Norm of the gradient", Axis(log=True), "{:.3g}", logged("norm", "grad_norm", 3)),
        chart("Bytes a second", Axis("", bytes_label, zero=True), "{:,.0f} bytes/s", speed),
    ]


def inside(
    figures: Sequence[result.Figure], stages: Mapping[str, Sequence[result.Figure]] | None = None
) -> list[Figure]:
    """Return the panels of a stage's figures; a curve is drawn for each of ``stages`` that has it."""
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
    """Return the curves of this title after one stage or several."""
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
        say=f"{{:.4f}} {last.y}".format,
    )


def _some(count: int) -> range:
    """Whole numbers to ``count``, or some of them, to stand along an axis."""
    return range(1, count + 1, -(-count // _VALUED))


def _bars(one: Histogram, colour: int) -> Figure:
    """Bars of the shares of things with 1, 2, ... units; what is past `_LONGEST` is in one last bar."""
    counts, total = one.counts, sum(one.counts)
    if not total:
        return Note(title=one.title, text=f"there were no {one.things}")
    if counts.count(0) == len(counts) - 1:
        size = len(counts) - 1
        unit = one.unit.removesuffix("s") if size == 1 else one.unit
        return Note(title=one.title, text=f"all {total:,} {one.things}: {size} {unit}")
    mean = sum(n * count for n, count in enumerate(counts)) / total
    shares, under, last = [100 * count / total for count in counts[1:]], one.unit, ""
    if len(shares) > _LONGEST:
        shares = [*shares[: _LONGEST - 1], sum(shares[_LONGEST - 1 :])]
        under, last = f"{one.unit} (last bar: {_LONGEST} and more)", "+"
    count = len(shares)
    return Chart(
        f"{one.title} (mean {mean:.2f})",
        Axis(under, lambda x: f"{int(x)}{last if x == count else ''}", ticks=_some(count)),
        Axis(f"share of {total:,} {one.things}", percent, zero=True),
        [Series("", range(1, count + 1), shares, colour, "bars")],
    )


def bits_by_stage(
    runs: Mapping[str, Sequence[tuple[str, float]]],
    compressors: Mapping[str, Mapping[str, float]],
    which: str,
) -> Chart:
    """Return bpb after each stage of each run, run beside run, with the compressors' rates as dashed lines.

    A rate that all runs share is one line across all of them, named at its right end. Any other has a line
    for each run, with its value; it is named where the last run has it, and at every run if no rate is
    shared. One weak run does not set the scale: its marks stand at the upper edge, with their values.

    Args:
        runs: names and bits of each run's stages.
        compressors: rates of the baselines on each run's text.
        which: added to the title, where these are not all runs.
    """
    shared = set.intersection(*(set(rates.items()) for rates in compressors.values()))
    own = {run: [one for one in compressors[run].items() if one not in shared] for run in runs}
    last = {name: run for run, rates in own.items() for name, _ in rates}
    series: list[Series] = []
    levels: list[Level] = []
    names: dict[float, str] = {}
    at = 0.0
    for index, (run, stages) in enumerate(runs.items()):
        places = {at + i: stage for i, (stage, _) in enumerate(stages)}
        line = Series(run, [*places], [value for _, value in stages], index % COLOURS)
        series += [line, replace(line, style="dots", marker=MARKERS[index % len(MARKERS)], values=bits)]
        names |= places
        begin, end = at - 0.4, at + len(stages) - 1 + 0.6
        labels = [
            (f"{name} {rate:.3f}" if last[name] == run or not shared else f"{rate:.3f}", rate)
            for name, rate in own[run]
        ]
        levels += [Level(label, rate, begin, end) for label, rate in labels]
        room = max((len(label) for label, _ in labels), default=0)
        at = end + 1 + (room * _LETTER_WIDTH + 10) / _STAGE_WIDTH
    levels += [Level(f"{name} {rate:.3f}", rate, -0.4, end) for name, rate in sorted(shared)]
    return Chart(
        f"Held-out text: bits per byte by stage, against compressors{which}",
        Axis("after stage", names.__getitem__, ticks=[*names], margin=0.02),
        Axis("bits per byte (lower is better)", plain, margin=0.1, most=_without_outliers(series, levels)),
        series,
        levels=levels,
        far_levels=True,
    )


def width_of(chart: Chart) -> float:
    """Return the pixels that a picture of `bits_by_stage` is wide, so that no label covers another."""
    names = max((len(level.name) for level in chart.levels), default=0)
    ends = [level.end for level in chart.levels if level.end is not None]
    last = max([*ends, *(x for one in chart.series for x in one.x)])
    wide = max(_STAGE_WIDTH, _LETTER_WIDTH * max(len(chart.x.format(x)) for x in chart.x.ticks or ()) + 10)
    return max(760, 130 + _LETTER_WIDTH * names + wide * (last + 1) * 1.04)


def _without_outliers(series: Sequence[Series], levels: Sequence[Level]) -> float | None:
    """Return where an axis ends so that a few values far above do not squeeze the others; None: above all.

    Far is what lies beyond the upper quartile by more than one and a half times the quartiles' distance.
    """
    values = [y for one in series if one.style == "dots" for y in one.y]
    lower, upper = np.quantile(values, (0.25, 0.75))
    rates = [level.value for level in levels]
    low = min([*values, *rates])
    most = max([*rates, *(y for y in values if y <= upper + 1.5 * (upper - lower))])
    return most if max(values) - low > 2 * (most - low) else None
