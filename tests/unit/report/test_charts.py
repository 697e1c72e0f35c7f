import math
import re

import pytest

from spider.report.charts import Band, Series, bar_chart, line_chart, ticks


def chart(*series, **options):
    common = {"title": "t", "x_label": "x", "x_format": str, "y_format": str}
    return str(line_chart(series, **common | options))


def places(drawn: str, kind: str) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'<path class="{kind}"[^>]* d="([^"]*)"', drawn)
    return [tuple(map(float, place.split())) for place in re.findall(r"[ML]([\d. ]+)", path)]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.98, 1.07, [0.98, 1, 1.02, 1.04, 1.06]), (3, 3, [3])],
)
def test_ticks_are_round_and_within(low, high, found):
    assert ticks(low, high, 5) == pytest.approx(found)


def test_points_lie_where_their_values_say():
    drawn = places(chart(Series("a", [0, 5, 10], [1, 2, 3])), "line")
    xs, ys = zip(*drawn, strict=True)
    assert xs[0] == 0 and xs[1] == pytest.approx(xs[2] / 2, abs=0.2) and xs[2] < 1000
    assert ys[0] > ys[1] > ys[2] and ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


def test_a_logarithmic_axis_spaces_equal_ratios_equally():
    ys = [y for _, y in places(chart(Series("a", [0, 1, 2], [1, 10, 100]), log=True), "line")]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


def test_a_long_line_is_thinned_and_keeps_its_course():
    n = 10_000
    drawn = places(chart(Series("a", range(n), [math.sin(i / n * math.pi) for i in range(n)])), "line")
    assert len(drawn) <= 600
    assert min(drawn, key=lambda place: place[1])[0] == pytest.approx(500, abs=20)


def test_names_are_escaped_and_a_band_without_room_is_not_named():
    bands = [Band("<b>", 0, 90), Band("narrow", 90, 92)]
    drawn = chart(Series("<i>", [0, 100], [1, 2]), Series("b", [0, 100], [2, 1]), bands=bands)
    assert "<b>" not in drawn and "&lt;b&gt;" in drawn and "<i>" not in drawn
    assert ">narrow</span>" not in drawn and drawn.count('<rect class="band"') == 1


def test_nothing_is_drawn_of_nothing():
    assert chart(Series("a", [], [])) == ""
    assert "<rect" in str(bar_chart([0.0, 0.0], title="t", x_label="x", y_format=str, names=["1", "2"]))
