"""Draw all figures by matplotlib, as SVG: of results, of a training, of stages beside each other.

A figure is a value of `spider.evaluation.result`, or a function that draws on axes. Equal figures have equal
bytes. matplotlib takes half a second to load, so only commands that draw import this module.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from spider.common import files
from spider.common.formatting import printable
from spider.evaluation import result
from spider.evaluation.records import DAGGER
from spider.evaluation.result import BITS, Plot, Series, baselines, shortened
from spider.report.stages import Log, bits_per_byte, smoothed, validated
from spider.report.summary import Summary, leading

matplotlib.rcParams |= {
    "svg.hashsalt": "spider",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "figure.constrained_layout.use": True,
    "axes.prop_cycle": cycler(
        color=["#0072b2", "#d55e00", "#009e73", "#b8558e", "#2f8ec4", "#b97a00", "#333333"]
    ),
}
#: Names of the tasks that are answered during training, and of CORE for a bundle of them.
TASKS = "val/tasks/([^/]+|.+/CORE)"
#: Kinds of figures that are drawn. The others are HTML.
DRAWN = ("histogram", "heatmap", "curve", "plot", "note")
_MARKERS = "os^DvPX"
#: Last bar of a histogram, which also counts larger sizes.
_LAST_BAR = 32
#: Most points of a line. Neighbours of a longer one are averaged.
_POINTS = 600
#: Most runs in the picture of all stages. Of more, the best are drawn.
_DRAWN_RUNS = 7
_WIDTH, _HEIGHT = 4.6, 3.2


def save(
    shown: Sequence[Any], path: Path | None = None, *, size: tuple[float, float] = (_WIDTH, _HEIGHT)
) -> str:
    """Return figures beside each other as SVG, the same bytes each time, and write it to a path."""
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure((size[0] * columns, size[1] * rows))
    for ax, one in zip(figure.subplots(rows, columns, squeeze=False).flat, shown, strict=False):
        draw(ax, one)
    for ax in figure.axes[len(shown) :]:
        ax.set_axis_off()
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    if path:
        files.write_text(path, text.getvalue())
    return text.getvalue()


def inline(one: Any) -> str:
    """Return a figure as SVG for a page."""
    svg = save([one])
    return re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg[svg.index("<svg") :], count=1)


def draw(ax: Axes, one: Any) -> None:
    """Draw a figure on axes."""
    ax.set_title(_safe(getattr(one, "title", "")))
    match one:
        case result.Histogram():
            _histogram(ax, one)
        case result.HeatMap():
            _heatmap(ax, one)
        case result.Curve():
            ax.plot(range(1, len(one.values) + 1), one.values, "o-", markersize=4)
            if one.mark is not None:
                ax.axvline(one.mark, ls="--", color="0.5", label=_safe(one.mark_label))
                ax.legend()
            middle, half = (max(one.values) + min(one.values)) / 2, 0.01 * max(map(abs, one.values))
            low, high = ax.get_ylim()
            ax.set_ylim(min(low, middle - half), max(high, middle + half))  # a nearly flat line looks flat
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.set(xlabel=_safe(one.x), ylabel=_safe(one.y))
        case result.Note():
            ax.text(0.5, 0.5, _safe(one.text), ha="center", va="center", wrap=True, transform=ax.transAxes)
            ax.set_axis_off()
        case Plot():
            _plot(ax, one)
        case _:
            one(ax)


def _safe(text: str) -> str:
    """Return a text without control characters, whose dollars are no mathematics."""
    return printable(text).replace("$", r"\$")


def _histogram(ax: Axes, one: result.Histogram) -> None:
    """Draw bars of the shares of sizes 1, 2, ...; sizes above `_LAST_BAR` are in the last bar."""
    counts = np.array(one.counts)
    total = int(counts.sum())
    if np.count_nonzero(counts) < 2:
        unit = one.unit.removesuffix("s") if len(counts) == 2 else one.unit
        text = (
            f"all {total:,} {one.things}: {len(counts) - 1} {unit}"
            if total
            else f"there were no {one.things}"
        )
        return draw(ax, result.Note(title=one.title, text=text))
    sizes = np.arange(len(counts))
    shown = np.bincount(np.minimum(sizes, _LAST_BAR), counts)
    ax.bar(range(1, len(shown)), 100 * shown[1:] / total, color="C2")
    more = f" (last bar: {_LAST_BAR} and more)" if len(counts) > _LAST_BAR + 1 else ""
    ax.set_title(_safe(f"{one.title} (mean {(sizes * counts).sum() / total:.2f})"))
    ax.set(xlabel=_safe(one.unit + more), ylabel=_safe(f"% of {total:,} {one.things}"))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _heatmap(ax: Axes, one: result.HeatMap) -> None:
    """Draw a matrix as colours, with some of the names of its rows and of the numbers of its columns."""
    low = 2 * one.middle - one.most
    image = ax.imshow(one.values, cmap="RdBu_r", vmin=low, vmax=one.most, aspect="auto")
    rows = range(0, len(one.rows), -(-len(one.rows) // 18))
    ax.set_yticks(rows, [_safe(one.rows[i]) for i in rows])
    columns = range(0, len(one.values[0]), -(-len(one.values[0]) // 8))
    ax.set_xticks(columns, [str(i + 1) for i in columns])
    ax.set_xlabel(_safe("; ".join(filter(None, [one.column, one.caption]))))
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax)


def _plot(ax: Axes, one: Plot) -> None:
    """Draw lines and dots. Each style has its own look, and each colour its own marker."""
    ax.set_xscale("log" if one.log_x else "linear")
    ax.set_yscale("log" if one.log_y else "linear")
    for number, (begin, end) in enumerate(one.bands.values()):
        if number % 2:
            ax.axvspan(begin, end, color="0.95", zorder=0)
    named = set[str]()
    for series in one.series:
        style: dict[str, Any] = {"color": f"C{series.colour}"}
        if series.name and series.name not in named and series.style != "faint":
            named.add(series.name)
            style["label"] = _safe(series.name)
        marker = _MARKERS[series.colour % len(_MARKERS)]
        looks: dict[str, dict[str, Any]] = {
            "line": {},
            "dashed": {"ls": "--"},
            "faint": {"alpha": 0.3, "lw": 1},
            "dots": {"ls": "", "marker": marker, "markersize": 6},
            "stars": {"ls": "", "marker": "*", "markersize": 11},
        }
        x, y = np.array(series.x), np.array(series.y)
        if series.style in ("line", "dashed", "faint"):
            x, y = _thinned(x), _thinned(y)
        ax.plot(x, y, **style, **looks[series.style])
    if not any(len(series.x) for series in one.series):
        return draw(ax, result.Note(title=one.title, text=one.instead))
    for value in one.levels.values():
        ax.axhline(value, color="0.5", ls=":", lw=1.2)
    if one.top is not None:
        ax.set_ylim(top=one.top)
    low, high = ax.get_ylim()
    ranked = sorted(one.levels, key=one.levels.__getitem__)
    for name, height in zip(ranked, _apart([*one.levels.values()], 0.05 * (high - low)), strict=True):
        ax.text(1, height, _safe(name), ha="right", va="bottom", color="0.35", fontsize="small",
                transform=ax.get_yaxis_transform())  # fmt: skip
    if not one.log_x:
        ax.xaxis.set_major_locator(MaxNLocator(6))
    for axis, unit in ((ax.xaxis, one.x_unit), (ax.yaxis, one.y_unit)):
        if unit:
            axis.set_major_formatter(EngFormatter(unit))
    if one.log_y and not one.y_unit:
        low, high = ax.get_ylim()
        if high / low < 20:  # else only powers of ten would have numbers
            ax.yaxis.set_major_locator(MaxNLocator(6))
            ax.yaxis.set_minor_formatter(NullFormatter())
            ax.yaxis.set_major_formatter("{x:.3g}")
    ax.set(xlabel=_safe(one.x), ylabel=_safe(one.y))
    if len(named) > 1:
        ax.legend()


def _thinned(x_S: np.ndarray) -> np.ndarray:
    """Average neighbours on a long line, so that the page of a long run stays small."""
    every = math.ceil(len(x_S) / _POINTS) or 1
    return np.array([x_S[i : i + every].mean() for i in range(0, len(x_S), every)])


# -------------------------------------------------------------------------------------------------- training


def loss(
    logs: Sequence[Log], title: str = "Bits per byte", levels: Mapping[str, float] | None = None
) -> Plot:
    """Return training loss over bytes trained, raw and smoothed, and a dot for the score of each stage.

    If the beginning of training would take most of the axis, the axis ends below it.
    """
    x_S, y_S = _points(logs, bits_per_byte)
    dots = [(log.end, log.held_out) for log in logs if log.held_out is not None]
    lines = [
        Series(x=x_S, y=y_S, style="faint"),
        Series(name="training", x=x_S, y=smoothed(np.array(y_S)).tolist()),
    ]
    scores = Series(
        name="held-out text", x=[x for x, _ in dots], y=[y for _, y in dots], style="dots", colour=1
    )
    x_V, y_V = _points(logs, validated)
    lines.append(Series(name="validation", x=x_V, y=y_V, style="dashed", colour=1))
    shown = [*scores.y, *y_V, *(one for one in lines[1].y[len(y_S) // 10 :])]
    low, most = min([*shown, *y_S], default=1.0), max(shown, default=1.0)
    steep = low > 0 and y_S and math.log(max(y_S) / low) > 1.5 * math.log(most / low)
    return Plot(
        title=title,
        x="bytes trained" + (f"; begins at {max(y_S):.2f}" if steep else ""),
        y="bits per byte",
        series=[*lines, *([scores] if dots else [])],
        log_y=True,
        x_unit="B",
        top=most * 1.02 if steep else None,
        bands=_bands(logs),
        levels={name: value for name, value in (levels or {}).items() if low * 0.9 < value <= most},
    )


def _points(
    logs: Sequence[Log], read: Callable[[dict[str, float]], float]
) -> tuple[list[float], list[float]]:
    """Return bytes trained and a value of all rows of several stages."""
    points = [log.points(read) for log in logs]
    return (
        [x for x_S, _ in points for x in x_S.tolist()],
        [y for _, y_S in points for y in y_S.tolist()],
    )


def _logged(metrics: dict[str, float], name: str) -> float:
    return metrics.get(name, math.nan)


def _bands(logs: Sequence[Log]) -> dict[str, tuple[float, float]]:
    return {log.stage: (log.begin, log.end) for log in logs}


def training(logs: Sequence[Log], levels: Mapping[str, float]) -> list[Plot]:
    """Return charts of a run over bytes trained: bits per byte, learning rates, gradient norm, speed.

    Validation of other names has a chart for each kind: of sources, and of questions.
    """
    found = dict.fromkeys(name for log in logs for row in log.rows for name in row.metrics)

    def chart(title: str, names: Mapping[str, str], y: str = "", **more: Any) -> Plot:
        series = []
        for i, (name, label) in enumerate(names.items()):
            x_S, y_S = _points(logs, partial(_logged, name=name))
            series.append(Series(name=label, x=x_S, y=y_S, colour=i % _DRAWN_RUNS))
        return Plot(
            title=title, x="bytes trained", y=y, series=series, x_unit="B", bands=_bands(logs), **more
        )

    def matching(pattern: str) -> dict[str, str]:
        return {name: match[1] for name in found if (match := re.fullmatch(pattern, name))}

    charts = [
        loss(logs, levels=levels),
        chart("Learning rate", {"train/lr": "AdamW", "train/muon_lr": "Muon"}),
        chart("Gradient norm", {"train/grad_norm": "norm"}, log_y=True),
        chart("Bytes per second", {"train/bytes_per_second": "speed"}, y_unit="B"),
        chart("Held-out text by source", matching("val/bpb_(.+)"), BITS),
        chart("Questions answered correctly", matching(TASKS), "share"),
    ]
    return [one for one in charts if any(series.x for series in one.series)]


# ---------------------------------------------------------------------------------------------------- stages


def over_bytes(summary: Summary, run: str | None = None) -> list[Plot]:
    """Return bits per byte over bytes trained, on the text of a run: after stages, and of scored checkpoints.

    Of many runs, the best are drawn. One weak run does not decide the scale. Compressors are levels.

    Args:
        run: The run whose text it is (default: the first one).
    """
    text = summary.runs[run or next(iter(summary.runs))].last.text
    last = {name: own.last for name, own in summary.runs.items() if own.last.text == text}
    score = leading(last.values())
    best = sorted(last, key=lambda name: (name != run, float(getattr(last[name], score))))[:_DRAWN_RUNS]
    ends, sampled = list[Series](), list[Series]()
    for colour, name in enumerate(name for name in last if name in best):
        points: tuple[list[tuple[float, float]], ...] = ([], [])
        begin = 0
        for stage in summary.runs[name].stages.values():
            points[1].extend((begin + one.bytes, one.bpb) for one in stage.checkpoints)
            begin += stage.bytes
            points[0].append((begin, stage.bpb))
        label = name + ("" if last[name].lossless else DAGGER)
        for found, series in zip(points, (ends, sampled), strict=True):
            x, y = [x for x, _ in found], [y for _, y in found]
            own: dict[str, Any] = {"name": label, "x": x, "y": y, "colour": colour}
            series += [Series(style="line", **own), Series(style="dots", **own)] if x else []
    rates = {
        f"{row.label} {row.value:.3f}": row.value
        for name in best
        for row in shortened(baselines(last[name].results))
        if row.value is not None
    }
    values = [y for series in ends for y in series.y]
    lower, upper = np.quantile(values, (0.25, 0.75))
    top = 1.1 * max([*rates.values(), *(value for value in values if value <= upper + 1.5 * (upper - lower))])
    some = f", the best {len(best)} of {len(last)} runs" if len(best) < len(last) else ""
    axes: dict[str, Any] = {"x": "bytes trained", "y": BITS, "x_unit": "B"}
    plots = [
        Plot(title=f"Held-out text, each document alone{some}", series=ends, levels=rates, **axes,
             top=top if max(values) > 1.4 * top else None),
        Plot(title=f"Checkpoints, on a sample of held-out text{some}", series=sampled, **axes),
    ]  # fmt: skip
    return [one for one in plots if one.series]


def _apart(values: list[float], gap: float) -> list[float]:
    """Return sorted values, moved apart until neighbours have a distance of ``gap``."""
    moved = sorted(values)
    for _ in range(100):
        for i in range(1, len(moved)):
            missing = max(0.0, gap - (moved[i] - moved[i - 1]))
            moved[i - 1] -= missing / 2
            moved[i] += missing / 2
    return moved
