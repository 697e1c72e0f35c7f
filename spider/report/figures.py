"""Which figures there are: bits per byte by stage, what a training logged, what is inside a model.

Each is a value of `spider.report.charts`, the same for a page and for a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from spider.evaluation import artifact
from spider.evaluation.artifact import Evaluation, Histogram, LoopsCurve, Note
from spider.report.charts import COLOURS, MARKERS, Axis, Band, Chart, Figure, Level, Series
from spider.report.formatting import bits, bytes_label, number, percent, plain
from spider.report.render import picture
from spider.report.stages import Log, StageRecord, read_log, smoothed, validated
from spider.report.text_view import write_page
from spider.results import StageFolder

#: What is drawn into a stage's folder.
FIGURES = ("loss.svg", "loops.svg", "inside.svg", "boundaries.html")
#: Last bar of a histogram; what is longer is in it as well.
_LONGEST = 32
#: Points of a line at most that have their values beside them.
_VALUED = 12
_BYTES = Axis("bytes trained", bytes_label)


def draw_stage(folder: StageFolder) -> list[Path]:
    """Draw `FIGURES` into a stage's folder, from its evaluation.json, train.json and metrics.jsonl.
    `ValueError` where one is missing or damaged, or the evaluation is from before figures were kept."""
    measured = Evaluation.read(folder.evaluation)
    if measured.figures is None:
        raise ValueError(f"{folder.evaluation}: made by a Spider that kept no figures in it; evaluate again")
    where = f"{measured.run}, stage {measured.stage}"
    paths = [folder.path / name for name in FIGURES]
    curve, looped = loss([read_log(folder, 0, measured.bpb)], where), loops({measured.stage: measured.loops})
    picture(paths[0], [(1, [curve])])
    picture(paths[1], [(1, [looped])], height=460, title=f"{where}: what more loops are worth")
    columns = [(1.0, [panel]) for panel in inside(measured.figures)]
    picture(paths[2], columns, max(800, 430 * len(columns)), title=f"{where}: inside the model")
    unit = f" in {measured.text.unit}" if measured.text else ""
    write_page(measured.text, paths[3], f"{where}: held-out text{unit}")
    return paths


def loss(logs: Sequence[Log], title: str, levels: Sequence[Level] = ()) -> Chart:
    """Training loss over bytes trained: raw faintly, smoothed on top, held-out bpb as marks at stage ends.

    Where there is one run its stages are shaded, and what it validated on the way is a line; with several,
    each run's stage ends are its marks.
    """
    runs = list(dict.fromkeys(log.run for log in logs))
    alone = len(runs) == 1
    series: list[Series] = []
    for index, run in enumerate(runs):
        own = [log for log in logs if log.run == run]
        colour, marker = index % COLOURS, MARKERS[index % len(MARKERS)]
        x_S, y_S = (np.concatenate(parts) for parts in zip(*(log.points() for log in own), strict=True))
        scored = [(log.end, log.held_out) for log in own if log.held_out is not None]
        names = ("training", "held-out text") if alone else (f"{run}: training", f"{run}: held-out")
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
    return Chart(
        title,
        _BYTES,
        Axis("bits per byte (log scale)", log=True),
        series,
        bands=[Band(log.stage, log.begin, log.end) for log in logs] if alone else (),
        levels=levels,
        say="{:.3f} bits per byte".format,
        instead="no step was logged",
    )


def training(stages: list[StageRecord]) -> list[Chart]:
    """Charts of a run over bytes trained: bits per byte, learning rates, norm of the gradient, speed."""
    logs = [stage.log for stage in stages if stage.log.rows]
    if not logs:
        return []
    levels = []
    if scored := [stage.evaluation for stage in stages if stage.evaluation and stage.receipt]:
        name, rate = min(scored[-1].compressors.items(), key=lambda item: item[1])
        levels = [Level(scored[-1].compressor_settings.get(name, name), rate)]
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


def loops(curves: Mapping[str, LoopsCurve | None]) -> Figure:
    """bpb over the number of loops after one stage or several, by name, and the number trained with."""
    series: list[Series] = []
    last = None
    for index, (name, curve) in enumerate(curves.items()):
        if curve:
            last, count = curve, len(curve.bpb)
            values = bits if len(curves) == 1 and count <= _VALUED else None
            line = Series(name, range(1, count + 1), curve.bpb, index % COLOURS)
            series += [line, replace(line, style="dots", values=values)]
    if last is None:
        why = "no curve was asked for\n(evaluation.loops_bytes is 0),\nor there are no loops"
        return Note(title="What more loops are worth", text=why)
    return Chart(
        f"Bits per byte of {last.bytes:,} held-out bytes",
        Axis(f"loops (trained with {last.trained})", ticks=_some(count), margin=0.05),
        Axis("bits per byte", "{:.4g}".format, least_span=0.02, margin=0.1),
        series,
        rulers=[("trained with", last.trained)],
        say="{:.4f} bits per byte".format,
    )


def _some(count: int) -> range:
    """Whole numbers to ``count``, or some of them, to stand along an axis."""
    return range(1, count + 1, -(-count // _VALUED))


def inside(figures: Sequence[artifact.Figure] | None) -> list[Figure]:
    """What a model's family tells, figure by figure; a note where it tells nothing."""
    if not figures:
        why = "this kind of model shows nothing of what happens inside"
        return [Note(title="Inside the model", text=why)]
    colours = iter((0, 2, 3, 4, 5, 6) * len(figures))
    return [_bars(one, next(colours)) if isinstance(one, Histogram) else one for one in figures]


def _bars(one: Histogram, colour: int) -> Figure:
    """Bars of the shares of things with 1, 2, ... units; what is past `_LONGEST` is in one last bar."""
    counts, total = one.counts, sum(one.counts)
    if not total:
        return Note(title=one.title, text=f"there were no {one.things}")
    if counts.count(0) == len(counts) - 1:
        return Note(title=one.title, text=f"all {total:,} {one.things}: {len(counts) - 1} {one.unit}")
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
    """bpb after each stage of each run, run beside run, with the compressors' rates on its text as lines
    across; ``which`` is added to the title, where these are not all runs."""
    same_text = len({tuple(rates.items()) for rates in compressors.values()}) == 1
    series: list[Series] = []
    levels: list[Level] = []
    names: dict[float, str] = {}
    at = 0.0
    for index, (run, stages) in enumerate(runs.items()):
        places = {at + i: stage for i, (stage, _) in enumerate(stages)}
        line = Series(run, [*places], [value for _, value in stages], index % COLOURS)
        series += [line, replace(line, style="dots", marker=MARKERS[index % len(MARKERS)], values=bits)]
        names |= places
        begin, end = at, at + len(stages) - 1
        named = not same_text or index == len(runs) - 1
        levels += [
            Level(f"{name} {rate:.3f}" if named else "", rate, begin - 0.4, end + 0.6)
            for name, rate in compressors[run].items()
        ]
        at = end + (1.6 if same_text else 2.4)
    return Chart(
        f"Held-out text: bits per byte by stage, against compressors{which}",
        Axis("after stage", names.__getitem__, ticks=[*names], margin=0.02),
        Axis("bits per byte (lower is better)", plain, margin=0.1),
        series,
        levels=levels,
        far_levels=True,
    )
