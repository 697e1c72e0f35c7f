"""The figures of the report: bits per byte by stage against compressors, and loss curves.

Colours are Okabe and Ito's, told apart by people with any colour vision, and every series differs by marker
or dash as well. matplotlib is imported by the functions alone, and without pyplot: no window system, no
global state, and half a second less at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spider.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = {"zlib": (0, (1, 1.5)), "bz2": (0, (5, 2, 1, 2)), "xz": (0, (6, 2)), "zstd": (0, (3, 2))}
GREY = "#666666"
#: rc settings of every figure.
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Curve:
    """What one stage's training logged, over bytes trained since the run began."""

    run: str
    stage: str
    begin: float
    """Bytes trained before this stage."""
    end: float
    bytes_S: np.ndarray
    """(S,) where each logged step stands."""
    bpb_S: np.ndarray
    """(S,) training loss in bits per byte."""
    held_out: float | None = None
    """bpb on the validation text after the stage."""


def plot_bpb(groups: list[dict[str, Any]], path: Path, which: str = "") -> None:
    """bpb after each stage, run beside run, with the compressors' rates as lines across.

    Args:
        groups: one a run: ``{"run", "stages": [(name, bpb), ...], "compressors": {name: bits}}``.
        which: added to the title, where these are not all runs.
    """
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        places = sum(len(g["stages"]) for g in groups) + 0.6 * (len(groups) - 1)
        figure, axes = new_figure(max(7.0, 2.4 + 1.1 * places), 4.4)
        values = [bpb for g in groups for _, bpb in g["stages"]]
        lines = [bits for g in groups for bits in g["compressors"].values()]
        low, high = min(values + lines), max(values + lines)
        margin = 0.12 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + 1.4 * margin)
        at, ticks, names = 0.0, [], []
        same_text = all(g["compressors"] == groups[0]["compressors"] for g in groups)
        for number, group in enumerate(groups):
            x = at + np.arange(len(group["stages"]))
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            bpb = [value for _, value in group["stages"]]
            axes.plot(x, bpb, color=colour, marker=marker, markersize=8, lw=2, label=group["run"], zorder=3)
            for xi, value in zip(x, bpb, strict=True):
                axes.annotate(
                    f"{value:.3f}",
                    (xi, value),
                    xytext=(7, 6),
                    textcoords="offset points",
                    weight="bold",
                    color=colour,
                    zorder=5,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
                )
            last = number == len(groups) - 1
            _compressor_lines(axes, group["compressors"], x[0], x[-1], named=last or not same_text)
            ticks += list(x)
            names += [name for name, _ in group["stages"]]
            at = x[-1] + (1.6 if same_text else 2.4)
        axes.set_xticks(ticks, names)
        axes.set_xlim(-0.5, ticks[-1] + 1.35)
        axes.set_xlabel("after stage")
        axes.set_ylabel("bits per byte (lower is better)")
        axes.set_title(f"Held-out text: bits per byte by stage, against compressors{which}")
        axes.grid(axis="y")
        if len(groups) > 1:
            figure.legend(loc="outside lower center", ncols=min(4, len(groups)))
        save(figure, path)


def _compressor_lines(
    axes: Axes, compressors: dict[str, float], first: float, last: float, named: bool
) -> None:
    """Dashed lines across one run's stages, named at their right end without overlapping."""
    low, high = axes.get_ylim()
    gap = 0.052 * (high - low)
    ordered = sorted(compressors.items(), key=lambda item: item[1])
    places = _spread([bits for _, bits in ordered], gap)
    for (name, bits), place in zip(ordered, places, strict=True):
        axes.hlines(
            bits, first - 0.4, last + 0.6, color=GREY, lw=1.2, linestyle=DASHES.get(name, "-"), zorder=1
        )
        if named:
            axes.plot([last + 0.6, last + 0.67], [bits, place], color=GREY, lw=0.7, clip_on=False)
            axes.text(last + 0.7, place, f"{name} {bits:.3f}", va="center", color=GREY, size=9)


def _spread(values: list[float], gap: float) -> list[float]:
    """Sorted values moved apart as little as it takes to be ``gap`` from each other."""
    placed = list(values)
    for _ in range(100):
        for i in range(1, len(placed)):
            short = gap - (placed[i] - placed[i - 1])
            if short > 1e-9:
                placed[i - 1] -= short / 2
                placed[i] += short / 2
    return placed


def plot_loss(curves: list[Curve], path: Path, title: str = "Training loss") -> None:
    """Training loss over bytes trained: raw faintly, smoothed on top, held-out bpb as marks at stage ends.

    Stages are shaded where there is one run; with several, each run's stage ends are its marks.
    """
    import matplotlib as mpl
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    runs = list(dict.fromkeys(c.run for c in curves))
    with mpl.rc_context(STYLE):
        figure, axes = new_figure(8.0, 4.4)
        drawn: list[np.ndarray] = []
        for number, run in enumerate(runs):
            own = [c for c in curves if c.run == run]
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            x = np.concatenate([c.bytes_S for c in own])
            y = np.concatenate([c.bpb_S for c in own])
            if len(x):
                smooth = smoothed(y)
                axes.plot(x, y, color=colour, alpha=0.25, lw=0.8)
                axes.plot(
                    x, smooth, color=colour, lw=1.8, label=f"{run}: training" if len(runs) > 1 else "training"
                )
                drawn += [y, smooth]
            scored = [(c.end, c.held_out) for c in own if c.held_out is not None]
            if scored:
                marks_x, marks_y = zip(*scored, strict=True)
                style: dict[str, Any] = {
                    "marker": marker,
                    "linestyle": "none",
                    "markersize": 8,
                    "markeredgecolor": "white",
                }
                label = f"{run}: held-out" if len(runs) > 1 else "held-out, after a stage"
                axes.plot(
                    marks_x,
                    marks_y,
                    color=COLOURS[1] if len(runs) == 1 else colour,
                    label=label,
                    zorder=4,
                    **style,
                )
                drawn.append(np.array(marks_y))
            if len(runs) == 1:
                _shade(axes, own)
        if drawn:
            seen = np.concatenate(drawn)
            axes.set_yscale("log")
            axes.set_ylim(seen.min() * 0.96, seen.max() * 1.08)
            axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())
            axes.legend(loc="upper right")
        else:
            axes.text(0.5, 0.5, "no step was logged", transform=axes.transAxes, ha="center", color=GREY)
        end = max((c.end for c in curves), default=0)
        begin = min((c.begin for c in curves), default=0)
        axes.set_xlim(begin - 0.01 * (end - begin), end + 0.02 * (end - begin) or 1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: bytes_label(v)))
        axes.set_xlabel("bytes trained")
        axes.set_ylabel("bits per byte (log scale)")
        axes.set_title(title)
        axes.grid(axis="y")
        save(figure, path)


def _shade(axes: Axes, stages: list[Curve]) -> None:
    for number, curve in enumerate(stages):
        if number % 2:
            axes.axvspan(curve.begin, curve.end, color="#F1F3F5", zorder=0)
        axes.annotate(
            curve.stage,
            ((curve.begin + curve.end) / 2, 0.015),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            color=GREY,
            size=9,
        )


def smoothed(y_S: np.ndarray) -> np.ndarray:
    """Mean of about a twentieth of the points, centred so that it does not lag; narrower at both ends."""
    n = len(y_S)
    at_S = np.arange(n)
    half_S = np.minimum(np.minimum(at_S, n - 1 - at_S), 1 + n // 40)
    sums = np.concatenate([[0.0], np.cumsum(y_S)])
    return (sums[at_S + half_S + 1] - sums[at_S - half_S]) / (2 * half_S + 1)


def bytes_label(value: float) -> str:
    """A round number of bytes beside an axis: ``1.5 MB``."""
    for size, unit in ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def save(figure: Figure, path: Path) -> None:
    with replacing(path) as beside:
        figure.savefig(beside, format="png", dpi=150)
