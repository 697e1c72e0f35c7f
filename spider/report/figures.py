"""Which figures there are: bits per byte by stage, what a training logged, what is inside a model.

Each is a value of `spider.report.charts`, the same for a page and for a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from spider.evaluation import artifact
from spider.evaluation.artifact import Histogram, LoopsCurve, Note
from spider.report.charts import COLOURS, MARKERS, Axis, Band, Chart, Figure, Level, Series
from spider.report.curves import Curve, points, smoothed
from spider.report.formatting import bits, bytes_label, number, percent, plain
from spider.report.stages import StageRecord

#: Last bar of a histogram; what is longer is in it as well.
_LONGEST = 32
#: Points of a line at most that have their values beside them.
_VALUED = 12


def loss(curves: Sequence[Curve], title: str, levels: Sequence[Level] = ()) -> Chart:
    """Training loss over bytes trained: raw faintly, smoothed on top, held-out bpb as marks at stage ends.

    Stages are shaded where there is one run; with several, each run's stage ends are its marks.
    """
    runs = list(dict.fromkeys(curve.run for curve in curves))
    alone = len(runs) == 1
    series: list[Series] = []
    for index, run in enumerate(runs):
        own = [curve for curve in curves if curve.run == run]
        colour, marker = index % COLOURS, MARKERS[index % len(MARKERS)]
        x, y_S = [float(b) for c in own for b in c.bytes_S], np.concatenate([c.bpb_S for c in own])
        series.append(Series("", x, y_S.tolist(), colour, "faint"))
        series.append(Series("training" if alone else f"{run}: training", x, smoothed(y_S).tolist(), colour))
        scored = [(c.end, c.held_out) for c in own if c.held_out is not None]
        name = "held-out text" if alone else f"{run}: held-out"
        ends, bpb = [end for end, _ in scored], [value for _, value in scored]
        series.append(Series(name, ends, bpb, 1 if alone else colour, "dots", marker))
    return Chart(
        title,
        Axis("bytes trained", bytes_label),
        Axis("bits per byte (log scale)", log=True),
        series,
        bands=[Band(c.stage, c.begin, c.end) for c in curves] if alone else (),
        levels=levels,
        say=lambda v: f"{v:.3f} bits per byte",
        instead="no step was logged",
    )


def training(stages: list[StageRecord]) -> list[Chart]:
    """Charts of a run over bytes trained: bits per byte, learning rates, norm of the gradient, speed."""
    begun = [stage for stage in stages if stage.rows]
    if not begun:
        return []
    scored = [stage.evaluation for stage in stages if stage.evaluation and stage.receipt]
    levels = []
    if scored:
        name, rate = min(scored[-1].compressors.items(), key=lambda item: item[1])
        levels = [Level(scored[-1].compressor_settings.get(name, name), rate)]
    curves = [stage.curve() for stage in stages if stage.rows or stage.evaluation]

    def logged(name: str, key: str, colour: int) -> Series:
        pairs = [points(s.rows, s.span, s.begin, lambda m: m.get(f"train/{key}", math.nan)) for s in begun]
        x, y = ([float(v) for pair in pairs for v in pair[i]] for i in (0, 1))
        return Series(name, x, y, colour)

    bands = [Band(stage.name, stage.begin, stage.begin + stage.span.bytes) for stage in begun]
    x = Axis("bytes trained", bytes_label)
    rates = [logged("AdamW", "lr", 0), logged("Muon", "muon_lr", 2)]
    norm, speed = [logged("norm", "grad_norm", 3)], [logged("speed", "bytes_per_second", 4)]
    return [
        loss(curves, "Bits per byte", levels),
        Chart("Learning rate", x, Axis("", number, zero=True), rates, bands, say=lambda v: f"{v:.2e}"),
        Chart("Norm of the gradient", x, Axis(log=True), norm, bands, say=lambda v: f"{v:.3g}"),
        Chart(
            "Bytes a second", x, Axis("", bytes_label, zero=True), speed, bands, say="{:,.0f} bytes/s".format
        ),
    ]


def loops(curves: Mapping[str, LoopsCurve | None]) -> Figure:
    """bpb over the number of loops after one stage or several, by name, and the number trained with."""
    series: list[Series] = []
    for index, (name, curve) in enumerate(curves.items()):
        if curve:
            values = bits if len(curves) == 1 and len(curve.bpb) <= _VALUED else None
            line = Series(name, range(1, len(curve.bpb) + 1), curve.bpb, index % COLOURS)
            series += [line, replace(line, style="dots", values=values)]
    last = next((curve for curve in reversed([*curves.values()]) if curve), None)
    if last is None:
        why = "no curve was asked for\n(evaluation.loops_bytes is 0),\nor there are no loops"
        return Note(title="What more loops are worth", text=why)
    count = len(last.bpb)
    ticks = range(1, count + 1, -(-count // _VALUED))
    return Chart(
        f"Bits per byte of {last.bytes:,} held-out bytes",
        Axis(f"loops (trained with {last.trained})", ticks=ticks, margin=0.05),
        Axis("bits per byte", lambda v: f"{v:.4g}", least_span=0.02, margin=0.1),
        series,
        rulers=[("trained with", last.trained)],
        say=lambda v: f"{v:.4f} bits per byte",
    )


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
    shares = [100 * count / total for count in counts[1:]]
    folded = len(shares) > _LONGEST
    if folded:
        shares = [*shares[: _LONGEST - 1], sum(shares[_LONGEST - 1 :])]
    names = [*map(str, range(1, len(shares))), f"{_LONGEST}+" if folded else str(len(shares))]
    under = f"{one.unit} (last bar: {_LONGEST} and more)" if folded else one.unit
    ticks = range(1, len(shares) + 1, -(-len(shares) // 12))
    return Chart(
        f"{one.title} (mean {mean:.2f})",
        Axis(under, lambda x: names[int(x) - 1], ticks=ticks),
        Axis(f"share of {total:,} {one.things}", percent, zero=True),
        [Series("", range(1, len(shares) + 1), shares, colour, "bars")],
    )


def bits_by_stage(
    runs: Mapping[str, Sequence[tuple[str, float]]],
    compressors: Mapping[str, Mapping[str, float]],
    which: str,
) -> Chart:
    """bpb after each stage, run beside run, with the compressors' rates as lines across.

    Args:
        runs: stages of each run and their bits per byte.
        compressors: rates on the text of each run.
        which: added to the title, where these are not all runs.
    """
    same_text = len({tuple(rates.items()) for rates in compressors.values()}) == 1
    series: list[Series] = []
    levels: list[Level] = []
    names: dict[float, str] = {}
    at = 0.0
    for index, (run, stages) in enumerate(runs.items()):
        x, values = [at + i for i in range(len(stages))], [value for _, value in stages]
        colour, marker = index % COLOURS, MARKERS[index % len(MARKERS)]
        line = Series(run, x, values, colour)
        series += [line, replace(line, style="dots", marker=marker, values=bits)]
        names |= dict(zip(x, (name for name, _ in stages), strict=True))
        named = not same_text or index == len(runs) - 1
        levels += [
            Level(f"{name} {rate:.3f}" if named else "", rate, x[0] - 0.4, x[-1] + 0.6)
            for name, rate in compressors[run].items()
        ]
        at = x[-1] + (1.6 if same_text else 2.4)
    return Chart(
        f"Held-out text: bits per byte by stage, against compressors{which}",
        Axis("after stage", lambda x: names[x], ticks=[*names], margin=0.02),
        Axis("bits per byte (lower is better)", plain, margin=0.1),
        series,
        levels=levels,
        far_levels=True,
    )
