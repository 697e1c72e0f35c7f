"""Test what is drawn of a chart: positions, ticks, labels and the readout of a page."""

import json
import math
import re

import pytest

from spider.evaluation.result import HeatMap
from spider.report.charts import Axis, Band, Chart, Level, Series, draw, ticks
from spider.report.render import in_page


def chart(*series, log=False, **options):
    return Chart("t", Axis("x", str), Axis("", str, log=log), series, **options)


def positions(figure: Chart, kind: str) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'<path class="{kind}"[^>]* d="([^"]*)"', str(in_page(figure)))
    return [tuple(map(float, position.split())) for position in re.findall(r"[ML]([\d. ]+)", path)]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.98, 1.07, [0.98, 1, 1.02, 1.04, 1.06]), (3, 3, [3])],
)
def test_ticks_are_round_and_within_the_range(low, high, found):
    assert ticks(low, high, 5) == pytest.approx(found)


def test_ticks_over_decades_are_one_two_and_five_times_powers_or_the_powers_alone():
    assert ticks(1e5, 2e6, 5, log=True) == pytest.approx([1e5, 2e5, 5e5, 1e6, 2e6])
    assert ticks(1, 1e6, 5, log=True) == pytest.approx([10.0**n for n in range(7)])


def test_positions_of_points_are_proportional_to_their_values():
    xs, ys = zip(*positions(chart(Series("a", [0, 5, 10], [1, 2, 3])), "line"), strict=True)
    assert xs[0] == 0 and xs[1] == pytest.approx(xs[2] / 2, abs=0.2) and xs[2] < 1000
    assert ys[0] > ys[1] > ys[2] and ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


def test_a_logarithmic_axis_spaces_equal_ratios_equally():
    ys = [y for _, y in positions(chart(Series("a", [0, 1, 2], [1, 10, 100]), log=True), "line")]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    wide = Chart("t", Axis("x", str, log=True), Axis(), [Series("a", [1, 10, 100], [1, 2, 3])])
    xs = [x for x, _ in positions(wide, "line")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)


def test_a_long_line_is_thinned_and_keeps_its_shape():
    n = 10_000
    drawn = positions(chart(Series("a", range(n), [math.sin(i / n * math.pi) for i in range(n)])), "line")
    assert len(drawn) <= 600
    assert min(drawn, key=lambda position: position[1])[0] == pytest.approx(500, abs=20)


def test_names_are_escaped_and_a_narrow_band_is_not_named():
    bands = [Band("<b>", 0, 90), Band("narrow", 90, 92)]
    drawn = str(in_page(chart(Series("<i>", [0, 100], [1, 2]), Series("b", [0, 100], [2, 1]), bands=bands)))
    assert "<b>" not in drawn and "&lt;b&gt;" in drawn and "<i>" not in drawn
    assert ">narrow</span>" not in drawn and drawn.count('<rect class="band"') == 1


def test_a_chart_without_points_is_empty():
    assert in_page(chart(Series("a", [], []))) == ""
    assert "<rect" in in_page(chart(Series("", [1, 2], [0.0, 0.0], style="bars")))


def test_bars_begin_at_the_axis():
    drawing = draw(chart(Series("", [1, 2], [1.0, 3.0], style="bars")), 100, 100, stretched=False)
    numbers = r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)"'
    bars = [tuple(map(float, re.findall(numbers, shape)[i])) for shape in drawing.shapes
            if "<title>" in shape for i in (0, 1)]  # fmt: skip
    assert all(y + height == pytest.approx(100, abs=0.2) for y, height in bars)


def test_a_far_level_is_left_out_unless_far_levels_are_shown():
    levels = [Level("near", 2.1), Level("far", 9.0)]
    near, both = (
        [label.text for label in draw(chart(Series("a", [0, 1], [2, 3]), levels=levels, far_levels=far),
                                      100, 100, stretched=True).labels if label.kind == "level"]
        for far in (False, True)
    )  # fmt: skip
    assert near == ["near"] and both == ["near", "far"]


def test_a_page_has_a_readout_of_the_points():
    drawn = str(in_page(chart(Series("a", [0, 4], [1.5, 2.5]), readout=lambda v: f"{v} bits")))
    readout = json.loads(re.findall(r'data-values="([^"]*)"', drawn)[0].replace("&#34;", '"'))
    assert readout[0]["texts"] == ["1.5 bits at 0", "2.5 bits at 4"] and readout[0]["x"][0] == 0


def test_cells_are_neutral_at_the_middle_and_strong_at_the_ends():
    shown = HeatMap(title="t", rows=["r"], column="expert", values=[[1, 0, 2.5, 9]], middle=1, most=2.5)
    drawing = draw(shown, 100, 100, stretched=False)
    fills = [re.findall(r"var\(--(\w+)\) (\d+)%", shape)[0] for shape in drawing.shapes]
    assert fills == [("cold", "0"), ("cold", "100"), ("hot", "100"), ("hot", "100")]
    assert [label.text for label in drawing.labels if label.kind == "cell"] == [
        "1.00",
        "0.00",
        "2.50",
        "9.00",
    ]


def test_above_the_end_of_an_axis_lines_are_cut_and_marks_are_at_the_edge():
    line = Series("a", [0, 1, 2, 3, 4], [9.0, 2.0, 1.0, 5.0, 2.0])
    marks = Series("b", [0, 2], [9.0, 1.0], style="dots", values=str)
    figure = Chart("t", Axis("x", str), Axis(most=3.0), [line, marks])
    drawn = str(in_page(figure))
    (path,) = re.findall(r'<path class="line"[^>]* d="([^"]*)"', drawn)
    pieces = [[[float(n) for n in one.split()] for one in piece.split("L")] for piece in path[1:].split("M")]
    unit = pieces[1][-1][0] / 4
    assert [[x / unit for x, _ in piece] for piece in pieces] == [
        pytest.approx([6 / 7, 1, 2, 2.5], abs=0.01),
        pytest.approx([3 + 2 / 3, 4], abs=0.01),
    ]
    edge = pieces[0][0][1]
    assert pieces[0][-1][1] == pieces[1][0][1] == edge < pieces[0][1][1]
    (dots,) = re.findall(r'<path class="dots"[^>]* d="([^"]*)"', drawn)
    assert float(dots[1:].split("h0")[0].split()[1]) == edge
    labels = [label.text for label in draw(figure, 100, 100, stretched=False).labels if label.kind == "value"]
    assert labels == ["9.0 ↑", "1.0"]
    readout = json.loads(re.findall(r'data-values="([^"]*)"', drawn)[0].replace("&#34;", '"'))
    assert readout[0]["texts"][0].startswith("9"), "the readout of a page has the value"


def test_a_legend_shows_dashed_lines():
    series = Series("a", [0, 1], [1, 2]), Series("b", [0, 1], [2, 1], 1, dashed=True)
    assert re.findall(r'<li class="([^"]*)"', str(in_page(chart(*series)))) == ["line", "line dashed"]
