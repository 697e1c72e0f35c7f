"""Test figures: their text, their numbers, and that equal figures have equal bytes."""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib.figure import Figure

from spider.checkpoints.metrics import Row
from spider.evaluation.records import Training
from spider.evaluation.result import Curve, HeatMap, Histogram, Note, Plot
from spider.report import figures
from spider.report.stages import Log
from spider.report.summary import join
from tests.unit.evaluation.stages import demo

LOOPS = Curve(title="Loops", x="loops", y="bits per byte", values=[2.4, 2.1, 2.05, 2.06], mark=2,
              mark_label="trained with")  # fmt: skip
LENGTHS = Histogram(title="Lengths", unit="bytes", things="patches", counts=[0, 90, 200, 150, 60, *[3] * 40])
HALTING = Histogram(title="Halting", unit="loops", things="patches", counts=[0, 300, 800, 100])
EXPERTS = HeatMap(title="Load", rows=["layer 1", "layer 2"], column="expert", middle=1, most=2.5,
                  values=[[1.2, 0.8], [0.3, 1.7]])  # fmt: skip
OFF = Note(title="Load", text="experts are switched off:\none dense layer instead")


def log(run="demo", stage="main", begin=0.0, n=50, held_out: float | None = 2.2):
    rows = [Row(i + 1, 0.0, {"train/bpb": 2 + 3 * math.exp(-(begin + i * 1e6 / n) / 4e5)}) for i in range(n)]
    span = Training(steps=n, global_step=n, tokens=10**6, bytes=10**6, seconds=0)
    return Log(run, stage, rows, span, begin, held_out)


def validated(one: Log) -> Log:
    """Return a log with rows of validation, as training writes them."""
    rows = [Row(20, 0.0, {"val/bpb": 3.0}), Row(50, 0.0, {"val/bpb": 2.3})]
    return dataclasses.replace(one, rows=sorted([*one.rows, *rows], key=lambda row: row.step))


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [text for one in root.iter("{http://www.w3.org/2000/svg}text") for text in one.itertext()]


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (lambda: figures.loss([log(), log(stage="anneal", begin=1e6)]), ["training", "bytes trained"]),
        (lambda: figures.loss([validated(log())], "<t>"), ["<t>", "training", "validation", "held-out text"]),
        (lambda: LOOPS, ["loops", "bits per byte", "trained with"]),
        (lambda: LENGTHS, ["% of 620 patches", "bytes (last bar: 32 and more)"]),
        (lambda: EXPERTS, ["layer 2", "expert"]),
        (lambda: OFF, ["Load", "one dense layer instead"]),
        (lambda: HALTING, ["Halting (mean 1.83)"]),
        (lambda: HALTING.model_copy(update={"counts": [0, 9]}), ["all 9 patches: 1 loop"]),
        (lambda: HALTING.model_copy(update={"counts": []}), ["there were no patches"]),
        (lambda: figures.loss([log(n=0, held_out=None)]), ["no step was logged"]),
        (lambda: Plot(title="$x$ \x1b", x="a", series=[]), ["$x$ \N{REPLACEMENT CHARACTER}"]),
    ],
)
def test_a_figure_has_its_text_and_equal_figures_have_equal_bytes(make, needed, tmp_path):
    svg = figures.save([make()], tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text() == svg == figures.save([make()])
    for text in needed:
        assert text in texts(svg), (text, texts(svg))


def test_the_scores_after_each_stage_stand_beside_the_baselines(tmp_path):
    """Of many runs, the best are drawn, and one weak run does not decide the scale."""
    paths = [path for i in range(12) for path in demo(tmp_path / "runs", f"run{i}", shift=-i / 100)]
    summary = join(paths)
    found = texts(figures.save(figures.over_bytes(summary)))
    assert [f"run{i}" in found for i in range(12)] == [i >= 5 for i in range(12)]
    assert "Held-out text, each document alone, the best 7 of 12 runs" in found
    assert {"bytes trained", "bz2 2.310"} <= {*found}
    weak = join([*paths[:12], *demo(tmp_path / "runs", "weak", shift=9, lossless=False)])
    ax = Figure().subplots()
    figures.draw(ax, figures.over_bytes(weak)[0])
    assert ax.get_ylim()[1] < 5 and "weak†" in [text.get_text() for text in ax.get_legend().get_texts()]
