"""Test figures as SVG files: their text, their colours and the positions of their labels."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from spider.evaluation.records import Training
from spider.evaluation.result import Curve, HeatMap, Histogram, Note
from spider.report import figures
from spider.report.render import colours, picture, spread
from spider.report.stages import Log
from spider.training.metrics import Row

LOOPS = Curve(title="Loops", x="loops", y="bits per byte", values=[2.4, 2.1, 2.05, 2.06], mark=2,
              mark_label="trained with")  # fmt: skip
LENGTHS = Histogram(title="Lengths", unit="bytes", things="patches", counts=[0, 90, 200, 150, 60, *[3] * 40])
HALTING = Histogram(title="Halting", unit="loops", things="patches", counts=[0, 300, 800, 100])
EXPERTS = HeatMap(title="Load", rows=["layer 1", "layer 2"], column="expert", middle=1, most=2.5,
                  values=[[1.2, 0.8], [0.3, 1.7]])  # fmt: skip
OFF = Note(title="Load", text="experts are switched off:\none dense layer instead")
RATES = {"zlib": 2.7, "bz2": 2.31, "xz": 2.39, "zstd": 2.41}
STAGES = [("warmup", 3.0), ("main", 2.2)]


def log(run="demo", stage="main", begin=0.0, n=50, held_out: float | None = 2.2):
    rows = [Row(i + 1, 0.0, {"train/bpb": 2 + 3 * math.exp(-(begin + i * 1e6 / n) / 4e5)}) for i in range(n)]
    span = Training(steps=n, global_step=n, tokens=10**6, bytes=10**6, seconds=0)
    return Log(run, stage, rows, span, begin, [] if held_out is None else [(begin + span.bytes, held_out)])


def validated(one: Log) -> Log:
    """Return a log with rows of validation, as training writes them."""
    rows = [Row(20, 0.0, {"val/bpb": 3.0}), Row(50, 0.0, {"val/bpb": 2.3})]
    return dataclasses.replace(one, rows=sorted([*one.rows, *rows], key=lambda row: row.step))


def drawn(*shown, folder, title="a <title>") -> tuple[str, list[str]]:
    """Write a file of figures side by side; return the SVG and all its text."""
    picture(folder / "figure.svg", [(1, [one]) for one in shown], 800, 440, title)
    assert [path.name for path in folder.iterdir()] == ["figure.svg"]
    svg = (folder / "figure.svg").read_text()
    root = ElementTree.fromstring(svg)
    assert "var(" not in svg and "href" not in svg and "color-mix" not in svg
    return svg, [texts for one in root.iter("{http://www.w3.org/2000/svg}text") for texts in one.itertext()]


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (lambda: figures.loss([log(), log(stage="anneal", begin=1e6)], "t"), ["training", "anneal"]),
        (lambda: figures.loss([validated(log())], "t"), ["training", "validation", "held-out text"]),
        (lambda: figures.loss([log(), log(run="wide")], "t"), ["demo", "wide"]),
        (lambda: figures.loss([log(n=1)], "t"), ["training"]),
        (lambda: figures.inside([LOOPS])[0], ["2.400", "2.060", "trained with", "4"]),
        (lambda: figures.inside([LOOPS.model_copy(update={"values": [2.1, 2.0]})])[0], ["2.100"]),
        (lambda: figures.bits_by_stage({"demo": STAGES}, {"demo": RATES}, ""), ["2.200", "xz 2.390"]),
        (
            lambda: figures.bits_by_stage(
                {"demo": STAGES, "wide": STAGES}, {"demo": RATES, "wide": {"xz": 2.0}}, ", some"
            ),
            ["demo", "wide", "xz 2.390", "xz 2.000"],
        ),
        (lambda: figures.bits_by_stage({"demo": STAGES[1:]}, {"demo": RATES}, ""), ["main", "zstd 2.410"]),
        (lambda: figures.inside([LENGTHS])[0], ["share of 620 patches", "bytes (last bar: 32 and more)"]),
        (lambda: figures.inside([HALTING])[0], ["Halting (mean 1.83)", "60%"]),
        (lambda: figures.inside([EXPERTS])[0], ["layer 2", "1.70", "expert"]),
    ],
)  # fmt: skip
def test_a_figure_has_its_text_and_its_colours(make, needed, tmp_path):
    svg, texts = drawn(make(), folder=tmp_path)
    for text in ["a <title>", *needed]:
        assert text in texts, text
    assert any(colours()[name] in svg for name in ("c0", "c2")) or "fill:#" in svg


def test_a_large_heat_map_has_no_numbers_and_names_some_rows(tmp_path):
    values = (np.random.default_rng(0).dirichlet(np.ones(32), 36) * 32).tolist()
    rows = [f"row {i}" for i in range(36)]
    large = EXPERTS.model_copy(update={"values": values, "rows": rows})
    _, texts = drawn(*figures.inside([large]), folder=tmp_path)
    assert texts.count("row 0") == 1 and "row 1" not in texts and not any("." in text for text in texts)


def test_figures_without_data_have_a_sentence(tmp_path):
    empty = log(n=0, held_out=None)
    one = HALTING.model_copy(update={"counts": [0, 0, 7]})
    once = HALTING.model_copy(update={"counts": [0, 9]})
    none = HALTING.model_copy(update={"counts": []})
    shown = [
        figures.loss([empty], "t"),
        *figures.inside([one, once, none, OFF]),
    ]
    _, texts = drawn(*shown, folder=tmp_path)
    for text in (
        "no step was logged", "all 7 patches: 2 loops",
        "all 9 patches: 1 loop", "there were no patches", "one dense layer instead",
    ):  # fmt: skip
        assert text in texts, text


def words(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Return each text of a picture with its box (left, right, top, bottom); a letter is 7 pixels wide."""
    found, root = [], ElementTree.fromstring(svg)

    def visit(element: ElementTree.Element, dx: float, dy: float) -> None:
        if moved := re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", element.get("transform", "")):
            dx, dy = dx + float(moved[1]), dy + float(moved[2])
        if element.tag.endswith("}text") and "rotate" not in element.get("transform", ""):
            wide, x, y = (
                7 * len(element.text or ""),
                float(element.get("x")) + dx,
                float(element.get("y")) + dy,
            )
            left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor")]
            found.append((element.text or "", left, left + wide, y - 9, y + 2))
        for child in element:
            visit(child, dx, dy)

    visit(root, 0.0, 0.0)
    return found


def overlapping(svg: str) -> list[tuple[str, str]]:
    return [
        (one[0], other[0])
        for one, other in itertools.combinations(words(svg), 2)
        if one[1] < other[2] and other[1] < one[2] and one[3] < other[4] and other[3] < one[4]
    ]


def of_sweep(folder, shifts, stages=(3.02, 2.21, 2.05)):
    """Draw the stages of runs that each have their own rate, as `compare` does."""
    given = {"ppmd": 1.90, "ppmd given all": 1.52, "xz": 2.39, "xz given all": 1.95, "zstd": 2.41}
    runs = {
        f"lr-0.00{i}": [(f"stage{n}", bpb + by) for n, bpb in enumerate(stages)]
        for i, by in enumerate(shifts)
    }
    rates = {run: given | {"ppmd given stage": 1.6 + 0.03 * i} for i, run in enumerate(runs)}
    chart = figures.bits_by_stage(runs, rates, "")
    picture(folder / "bpb.svg", [(1, [chart])], figures.width_of(chart))
    return (folder / "bpb.svg").read_text()


@pytest.mark.parametrize("count", [2, 4, 7])
def test_a_baseline_of_all_runs_is_named_once_and_labels_do_not_overlap(count, tmp_path):
    svg = of_sweep(tmp_path, [-0.04 * i for i in range(count)])
    texts = [word[0] for word in words(svg)]
    for name in ("ppmd 1.900", "ppmd given all 1.520", "xz given all 1.950"):
        assert texts.count(name) == 1, name
    last = 1.6 + 0.03 * (count - 1)
    assert texts.count(f"ppmd given stage {last:.3f}") == 1
    for i in range(count - 1):
        assert f"{1.6 + 0.03 * i:.3f}" in texts
    assert overlapping(svg) == []
    width = float(ElementTree.fromstring(svg).get("width"))
    assert all(left >= 0 and right <= width for _, left, right, *_ in words(svg))


def test_one_weak_run_does_not_hide_the_differences_between_the_others(tmp_path):
    plain = of_sweep(tmp_path, [0.0, -0.05, -0.1, -0.15])
    (tmp_path / "weak").mkdir()
    weak = of_sweep(tmp_path / "weak", [0.0, -0.05, -0.1, -0.15, 4.0])

    def apart(svg: str) -> float:
        top = {word: y for word, _, _, y, _ in words(svg)}
        return top["2.050"] - top["3.020"]

    assert apart(weak) > 0.7 * apart(plain) > 50
    assert "6.050 ↑" in {word for word, *_ in words(weak)} and "↑" not in plain


@pytest.mark.parametrize("runs", [2, 8])
def test_a_legend_names_every_run_within_the_picture(runs, tmp_path):
    logs = [log(run=f"a-long-name-of-a-run-{i}") for i in range(runs)]
    svg, texts = drawn(figures.loss(logs, "Training loss (lines) and held-out text (marks)"), folder=tmp_path)
    assert all(f"a-long-name-of-a-run-{i}" in texts for i in range(runs))
    assert all(right <= 800 for _, _, right, *_ in words(svg)) and overlapping(svg) == []


def test_the_beginning_of_training_does_not_take_most_of_the_axis():
    """The axis shows the rest, and its label has the first value."""
    steep = [Row(i + 1, 0.0, {"train/bpb": 2 + 6 * math.exp(-i / 5)}) for i in range(200)]
    chart = figures.loss([dataclasses.replace(log(n=200), rows=steep)], "t")
    assert 2.2 <= chart.y.most < 2.6
    assert chart.x.label == "bytes trained; the curve begins at 8.00, above the top edge"
    flat = [Row(i + 1, 0.0, {"train/bpb": 2.3 - 0.001 * i}) for i in range(50)]
    quiet = figures.loss([dataclasses.replace(log(), rows=flat)], "t")
    assert quiet.y.most is None and quiet.x.label == "bytes trained"


def test_markers_have_different_shapes(tmp_path):
    runs = {f"run{i}": STAGES for i in range(7)}
    svg, _ = drawn(figures.bits_by_stage(runs, dict.fromkeys(runs, RATES), ""), folder=tmp_path)
    marks = [shape for shape in ElementTree.fromstring(svg).iter() if shape.get("class") == "mark"]
    outlines = {len(shape.get("d").split("z")[0].split("L")) for shape in marks}
    assert len(marks) >= 7 and outlines >= {1, 3, 4, 12}


def test_labels_are_moved_apart_and_keep_their_order():
    placed = spread([1.0, 1.01, 1.02, 5.0], gap=0.5)
    assert placed[3] == 5.0
    assert all(b - a >= 0.5 - 1e-6 for a, b in itertools.pairwise(placed))
    assert np.mean(placed[:3]) == pytest.approx(1.01)


def test_there_is_one_chart_engine():
    code = [path.read_text() for path in Path(figures.__file__).parents[1].rglob("*.py")]
    assert len(code) > 50 and not any("import matplotlib" in one or "from matplotlib" in one for one in code)


def test_evaluation_does_not_import_the_report():
    folder = Path(figures.__file__).parents[1] / "evaluation"
    assert not [
        path
        for path in folder.glob("*.py")
        if "spider.report" in path.read_text().replace("`spider.report", "")
    ]
