"""Figures of what happens inside a model: bits per byte against loops, and three histograms side by side.

A part that is switched off says so in its place, so that each figure exists for every model and two of them
can be laid side by side. Style and colours are those of `spider.report.plots`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spider.report.plots import COLOURS, GREY, STYLE, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Least height of the loops curve's axis, as a share of its values: what is flat shall look flat.
_LEAST_SPAN = 0.02
#: Longest patch with a bar of its own; longer ones share the last.
_LONGEST = 32
#: Rows and columns of the largest heat map whose cells hold their numbers.
_NUMBERED = 8


def plot_loops(loops: dict[str, Any] | None, path: Path, title: str) -> None:
    """bpb over the number of loops, with the number it was trained with marked.

    Args:
        loops: ``{"bpb": [after 1 loop, after 2, ...], "trained": R, "bytes": scored}``; None: switched off.
    """
    import matplotlib as mpl
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context(STYLE):
        figure, axes = new_figure(8.0, 4.4)
        axes.set_title(title)
        if loops is None:
            _instead(axes, "no curve was asked for\n(evaluation.loops_bytes is 0)")
            save(figure, path)
            return
        bpb, trained = loops["bpb"], loops["trained"]
        n = np.arange(1, len(bpb) + 1)
        axes.axvline(trained, color=GREY, lw=1.2, linestyle=(0, (4, 3)), zorder=1)
        axes.plot(n, bpb, color=COLOURS[0], marker="o", markersize=7, lw=2, zorder=3)
        middle, span = (max(bpb) + min(bpb)) / 2, max(max(bpb) - min(bpb), _LEAST_SPAN * max(bpb))
        axes.set_ylim(middle - 0.62 * span, middle + 0.8 * span)
        axes.set_xlim(1 - 0.06 * len(bpb), len(bpb) * 1.06)
        if len(bpb) <= 12:
            for x, value in zip(n, bpb, strict=True):
                falls = x > 1 and bpb[x - 2] - value > 0.1 * span  # the line comes from above: step aside
                axes.annotate(
                    f"{value:.3f}",
                    (x, value),
                    xytext=(12 if falls else 0, 8),
                    textcoords="offset points",
                    ha="center",
                    size=9,
                    zorder=4,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
                )
        right = trained <= len(bpb) / 2
        axes.annotate(
            "trained with",
            (trained, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(5 if right else -5, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="top",
            color=GREY,
            size=9,
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("loops of the core")
        axes.set_ylabel(f"bits per byte of {loops['bytes']:,} held-out bytes")
        axes.grid(axis="y")
        save(figure, path)


def plot_inside(inside: dict[str, Any], path: Path, title: str) -> None:
    """Bytes per patch, halting depth and expert load.

    Args:
        inside: as `spider.evaluation.inside.Inside.summary` gives it.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(STYLE | {"axes.titlesize": 11}):
        figure = Figure(figsize=(13.0, 4.4), layout=ConstrainedLayoutEngine(wspace=0.04))
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
        patches, halting, experts = figure.subplots(1, 3, width_ratios=(1.25, 0.9, 1.1))
        if (lengths := inside["patch_bytes"]) is None:
            _instead(patches, "patches are switched off:\nevery byte is its own")
        else:
            _histogram(patches, lengths, COLOURS[0], "bytes", longest=_LONGEST)
        patches.set_title(f"Bytes per patch{_mean(lengths)}")
        if (depths := inside["halting_loops"]) is None:
            _instead(halting, "halting is switched off:\nevery patch uses all loops")
        else:
            _histogram(halting, depths, COLOURS[2], "loops")
        halting.set_title(f"Loops a patch uses{_mean(depths)}")
        experts.set_title("Expert load (1 = equal share)")
        if inside["expert_share"] is None:
            _instead(experts, "experts are switched off:\none dense layer instead")
        else:
            _heat_map(experts, np.array(inside["expert_share"]))
        save(figure, path)


def _mean(counts: list[int] | None) -> str:
    total = sum(counts or [])
    return f" (mean {np.arange(len(counts)) @ counts / total:.2f})" if counts and total else ""


def _histogram(axes: Axes, counts: list[int], colour: str, unit: str, longest: int | None = None) -> None:
    """Bars of the shares of patches with 1, 2, ... units; what is past ``longest`` is in one last bar."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if not (total := sum(counts)):
        _instead(axes, "no patch was closed")
        return
    share = np.array(counts, float) / total
    folded = longest is not None and len(share) > longest + 1
    if folded:
        share = np.append(share[:longest], share[longest:].sum())
    n = np.arange(len(share))
    axes.bar(n[1:], share[1:], width=0.85, color=colour, zorder=2)
    axes.set_xlim(0.3, max(n[-1], 2) + 0.7)
    axes.set_ylim(0, 1.08 * share.max())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
    axes.set_xlabel(f"{unit} (last bar: {longest} and more)" if folded else unit)
    axes.set_ylabel(f"share of {total:,} patches")
    axes.grid(axis="y")


def _heat_map(axes: Axes, share_NRE: np.ndarray) -> None:
    """Rows are loops within layers, columns experts; white is balance, blue less and red more."""
    from matplotlib.colors import TwoSlopeNorm

    layers, loops, experts = share_NRE.shape
    rows = share_NRE.reshape(layers * loops, experts)
    # One scale for all runs, so that colours can be compared; beyond it the colour stays.
    image = axes.imshow(rows, cmap="RdBu_r", norm=TwoSlopeNorm(1, 0, 2.5), aspect="auto")
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, extend="max", shrink=0.9, ticks=[0, 0.5, 1, 1.5, 2, 2.5])
    if max(rows.shape) <= _NUMBERED:
        for (y, x), value in np.ndenumerate(rows):
            dark = value < 0.25 or value > 2
            axes.text(
                x, y, f"{value:.2f}", ha="center", va="center", size=9, color="white" if dark else "black"
            )
    for layer in range(1, layers):
        axes.axhline(layer * loops - 0.5, color="black", lw=1)
    every = max(1, -(-len(rows) // 18))
    names = [f"layer {i // loops + 1}, loop {i % loops + 1}" for i in range(len(rows))]
    axes.set_yticks(range(0, len(rows), every), names[::every], size=9 if len(rows) <= 12 else 7)
    step = max(1, -(-experts // 8))
    axes.set_xticks(range(0, experts, step), [str(e + 1) for e in range(0, experts, step)])
    axes.set_xlabel("expert")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _instead(axes: Axes, text: str) -> None:
    """A sentence where a figure would be."""
    axes.set_facecolor("#F5F5F5")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
