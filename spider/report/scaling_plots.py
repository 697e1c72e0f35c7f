"""The figure of a scaling law: IsoFLOP parabolas, and the best size, bytes and loss against FLOPs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spider.report.plots import COLOURS, GREY, MARKERS, STYLE, bytes_label, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from spider.evaluation.scaling import IsoFlop, Law, ScalingFit


def plot_scaling(found: ScalingFit, path: Path, title: str) -> None:
    """Parabolas at the left, a dashed one where it has no minimum to use; the laws at the right."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE | {"axes.titlesize": 11}):
        figure = Figure(figsize=(13.0, 6.4), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
        grid = figure.add_gridspec(3, 2, width_ratios=(1.7, 1))
        parabolas = figure.add_subplot(grid[:, 0])
        for number, curve in enumerate(found.curves):
            _parabola(parabolas, curve, number)
        parabolas.set_xscale("log")
        parabolas.set_xlabel("parameters, without those that are looked up")
        parabolas.set_ylabel("bits per byte on held-out text")
        parabolas.set_title("Runs by size, a curve for each budget")
        parabolas.grid(axis="y")
        parabolas.legend(title="FLOPs", loc="best")
        _plain_ticks(parabolas)
        panels = (
            ("best_parameters", found.parameters, "Best parameters", "N"),
            ("best_bytes", found.bytes, "Best bytes", "D"),
            ("best_bpb", found.bpb, "Bits per byte there", "L"),
        )
        for row, (name, law, label, letter) in enumerate(panels):
            axes = figure.add_subplot(grid[row, 1])
            _law(axes, found, name, law, letter)
            axes.set_title(label)
            if row == 2:
                axes.set_xlabel("FLOPs of training")
            else:
                axes.tick_params(labelbottom=False)
        save(figure, path)


def _parabola(axes: Axes, curve: IsoFlop, number: int) -> None:
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    size_N = np.array([point.parameters for point in curve.points])
    axes.plot(
        size_N,
        [point.bpb for point in curve.points],
        linestyle="none",
        marker=marker,
        markersize=7,
        color=colour,
        label=flops_label(curve.budget) + (" (not used)" if curve.problem else ""),
        zorder=3,
    )
    if curve.coefficients is None:
        return
    dense = np.geomspace(size_N[0] * 0.92, size_N[-1] * 1.08, 200)
    fitted = np.polyval(curve.coefficients, np.log10(dense))
    axes.plot(dense, fitted, color=colour, lw=1.6, linestyle="--" if curve.problem else "-", zorder=2)
    if curve.best_parameters is not None and curve.best_bpb is not None:
        axes.plot(
            curve.best_parameters,
            curve.best_bpb,
            marker="*",
            markersize=17,
            color=colour,
            markeredgecolor="white",
            zorder=4,
        )


def _law(axes: Axes, found: ScalingFit, name: str, law: Law | None, letter: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    good = [(n, curve) for n, curve in enumerate(found.curves) if curve.problem is None]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(axis="y")
    flops = [curve.flops for curve in found.curves]
    axes.set_xlim(min(flops) / 1.6, max(flops) * 1.6)
    for number, curve in good:
        colour = COLOURS[number % len(COLOURS)]
        value = getattr(curve, name)
        axes.plot(curve.flops, value, marker="*", markersize=14, color=colour, zorder=3, clip_on=False)
    if law is None:
        said = found.problem or "no law"
        axes.text(0.5, 0.5, said, transform=axes.transAxes, ha="center", va="center", color=GREY, size=9)
    else:
        ends = np.array([min(flops) / 1.3, max(flops) * 1.3])
        axes.plot(ends, law.factor * ends**law.exponent, color=GREY, lw=1.4, zorder=2)
        error = f" ± {law.error:.3f}" if law.error is not None else ""
        falls = law.exponent < 0
        axes.text(
            0.97 if falls else 0.03,
            0.95,
            f"{letter} ~ C^{law.exponent:.3f}{error}",
            transform=axes.transAxes,
            ha="right" if falls else "left",
            va="top",
            parse_math=False,
        )
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda v, _: bytes_label(v) if name == "best_bytes" else _short(v))
    )
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: flops_label(v)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    if not good:
        axes.yaxis.set_major_locator(NullLocator())


def _plain_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _short(v)))
    axes.xaxis.set_minor_locator(NullLocator())


def flops_label(value: float) -> str:
    """``1.8e12``."""
    return f"{value:.3g}".replace("e+", "e")


def _short(value: float) -> str:
    """``200k``, ``1.5M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
