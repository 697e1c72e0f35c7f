"""The figures of a page: what a training logged over its bytes, and what evaluation saw in the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from markupsafe import Markup

from spider.evaluation.compressors import SETTINGS
from spider.report.charts import Band, Series, bar_chart, line_chart
from spider.report.curves import bits_per_byte, points
from spider.report.plots import bytes_label, smoothed
from spider.report.stages import StageRecord

#: Longest patch with a bar of its own; longer ones share the last.
_LONGEST = 24


def _plain(value: float) -> str:
    return f"{value:g}"


def training_curves(stages: list[StageRecord]) -> list[Markup]:
    """Charts over bytes trained: bits per byte, learning rates, norm of the gradient, speed."""
    begun = [stage for stage in stages if stage.rows]
    bands = [Band(stage.name, stage.begin, stage.begin + stage.span["bytes"]) for stage in begun]
    common: dict[str, Any] = {"x_label": "bytes trained", "x_format": bytes_label, "bands": bands}

    def over_run(metric: Any) -> tuple[list[float], list[float]]:
        pairs = [points(stage.rows, stage.span, stage.begin, metric) for stage in begun]
        return [x for xs, _ in pairs for x in xs.tolist()], [y for _, ys in pairs for y in ys.tolist()]

    def named(key: str) -> tuple[list[float], list[float]]:
        return over_run(lambda metrics: metrics.get(f"train/{key}", math.nan))

    if not begun:
        return []
    x, y = over_run(bits_per_byte)
    scored = [stage for stage in stages if stage.evaluation and stage.receipt]
    held_out = (
        [stage.begin + stage.span["bytes"] for stage in scored],
        [stage.evaluation["bpb"] for stage in scored if stage.evaluation],
    )
    levels: list[tuple[str, float]] = []
    if scored and scored[-1].evaluation:
        best = min(scored[-1].evaluation["compressors"].items(), key=lambda item: item[1])
        levels = [(SETTINGS.get(best[0], best[0]), best[1])]
    charts = [
        line_chart(
            [
                Series("raw", x, y, 0, faint=True),
                Series("training", x, smoothed(np.array(y)).tolist() if y else [], 0),
                Series("held-out text", *held_out, 1, dots=True),
            ],
            title="Bits per byte",
            y_format=_plain,
            say=lambda v: f"{v:.3f} bits per byte",
            log=True,
            levels=levels,
            **common,
        ),
        line_chart(
            [Series("AdamW", *named("lr"), 0), Series("Muon", *named("muon_lr"), 2)],
            title="Learning rate",
            y_format=number,
            say=lambda v: f"{v:.2e}",
            zero=True,
            **common,
        ),
        line_chart(
            [Series("norm", *named("grad_norm"), 3)],
            title="Norm of the gradient",
            y_format=_plain,
            say=lambda v: f"{v:.3g}",
            log=True,
            **common,
        ),
        line_chart(
            [Series("speed", *named("bytes_per_second"), 4)],
            title="Bytes a second",
            y_format=bytes_label,
            say=lambda v: f"{v:,.0f} bytes/s",
            zero=True,
            **common,
        ),
    ]
    return [chart for chart in charts if chart]


def inside_charts(evaluated: list[StageRecord]) -> dict[str, Any]:
    """What the evaluation saw inside the model: loops curves of all stages, the rest of the last one."""
    if not evaluated or evaluated[-1].evaluation is None:
        return {}
    curves = []
    for number, stage in enumerate(evaluated):
        if loops := stage.evaluation and stage.evaluation["loops"]:
            curves.append(Series(stage.name, range(1, len(loops["bpb"]) + 1), loops["bpb"], number % 7))
    found = evaluated[-1].evaluation
    inside, loops = found["inside"], found["loops"]
    charts: dict[str, Any] = dict.fromkeys(("loops", "patch_bytes", "halting_loops", "only"))
    charts["experts"] = inside["expert_share"]
    if curves and loops:
        charts["loops"] = line_chart(
            [*curves, *(replace(one, dots=True) for one in curves)],
            title=f"Bits per byte of {loops['bytes']:,} held-out bytes",
            x_label=f"loops of the core (trained with {loops['trained']})",
            x_format=_plain,
            x_ticks=range(1, len(loops["bpb"]) + 1, math.ceil(len(loops["bpb"]) / 12)),
            least_span=0.02,
            y_format=lambda v: f"{v:.4g}",
            say=lambda v: f"{v:.4f} bits per byte",
        )
    for key, unit, colour, title in (
        ("patch_bytes", "bytes", 0, "Bytes a patch"),
        ("halting_loops", "loops", 2, "Loops a patch uses before it halts"),
    ):
        counts = inside[key]
        if counts and (total := sum(counts)):
            if counts.count(0) == len(counts) - 1:
                n = len(counts) - 1
                charts["only"] = f"every patch has {n} {unit if n > 1 else unit[:-1]}"
                continue
            mean = sum(n * count for n, count in enumerate(counts)) / total
            shares = [100 * count / total for count in counts[1:]]
            names = [str(n) for n in range(1, len(counts))]
            if len(shares) > _LONGEST:
                shares = [*shares[: _LONGEST - 1], sum(shares[_LONGEST - 1 :])]
                names = [*names[: _LONGEST - 1], f"{_LONGEST}+"]
            charts[key] = bar_chart(
                shares,
                title=f"{title}, share of {total:,} patches",
                x_label=f"{unit}, {mean:.2f} on average",
                y_format=lambda v: f"{v:.3g}%",
                names=names,
                colour=colour,
            )
    return charts


def number(value: float) -> str:
    """A setting as one writes it: 8e-3 rather than 0.008."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
