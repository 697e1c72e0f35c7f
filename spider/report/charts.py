"""Figures as values, and what is drawn of them: the one engine behind pages and pictures.

A figure (`Chart`, `HeatMap`, `Note`) says what is shown. `draw` turns it into SVG shapes in a box of any size
and labels at shares of it; `spider.report.render` puts these into a page or into a file of its own. A page
stretches its box, so its lines keep their width and its text is HTML: an SVG scaled to a phone's width would
scale its letters too, down to nothing. Text of users is escaped by Markup's formatting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, NamedTuple

from markupsafe import Markup

from spider.evaluation.result import HeatMap, Note
from spider.report.formatting import plain

#: Points of a line at most; beyond, neighbours are averaged.
_POINTS = 600
#: Rows and columns of the largest heat map whose cells hold their numbers.
_NUMBERED = 8
COLOURS = 7
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Format = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """How values become places.

    ``zero``: it begins at 0. ``least_span``: its least length, as a share of its values, so that what is flat
    looks flat. ``margin``: free at either end, as a share. ``ticks`` (of x): instead of round numbers.
    ``most`` (of y): where it ends, though points lie above: lines are cut there, marks stand at the edge.
    """

    label: str = ""
    format: Format = plain
    log: bool = False
    zero: bool = False
    least_span: float = 0.0
    margin: float = 0.0
    most: float | None = None
    ticks: Sequence[float] | None = None


@dataclass(frozen=True)
class Series:
    """Points of one kind: a line, a ``faint`` one for the background, ``dots``, or ``bars``.

    ``colour`` numbers the page's variables ``--c0``... Names go into the legend and into what a page reads
    out; what is faint has none. ``values``: write them beside the points of a picture.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    style: Literal["line", "faint", "dots", "bars"] = "line"
    marker: str = "o"
    dashed: bool = False
    values: Format | None = None

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.x, self.y, strict=True))


class Band(NamedTuple):
    """A named stretch of the x axis."""

    name: str
    begin: float
    end: float


class Level(NamedTuple):
    """A dashed line across, or from ``begin`` to ``end``."""

    name: str
    value: float
    begin: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Chart:
    """Points over two axes; ``instead`` is said where there is none.

    ``bands`` are shaded by turns, and named where there is room. ``levels``: only those within the reach of
    the points, unless ``far_levels``. ``rulers``: dashed lines upright, named. ``say``: how a value is read
    out (default: as beside the axis). ``corner``: a sentence in the free corner of a picture.
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    levels: Sequence[Level] = ()
    far_levels: bool = False
    rulers: Sequence[tuple[str, float]] = ()
    say: Format | None = None
    corner: str = ""
    instead: str = ""


Figure = Chart | HeatMap | Note


class Label(NamedTuple):
    """Text at shares of the box, from its left and its bottom; what it is decides how it hangs there."""

    kind: Literal["x", "y", "band", "level", "ruler", "cell", "value", "corner"]
    x: float
    y: float
    text: str
    colour: int | None = None


@dataclass
class Drawing:
    """What is drawn of a figure; ``said`` is what a page reads out at each point of a series."""

    under: str
    beside: str = ""
    legend: Sequence[Series] = ()
    shapes: list[Markup] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    said: list[dict[str, object]] = field(default_factory=list)


def draw(figure: Chart | HeatMap, width: float, height: float, *, stretched: bool) -> Drawing | None:
    """A figure in a box; None where there is nothing to draw. A ``stretched`` box is not drawn at its own
    proportions, so that shapes would not keep theirs."""
    if isinstance(figure, HeatMap):
        return _draw_cells(figure, width, height)
    drawn = [_thinned(one) for one in figure.series if len(one.x)]
    if not drawn:
        return None
    box = _Box(figure, drawn, width, height)
    result = Drawing(figure.x.label, figure.y.label, named(drawn))
    _draw_frame(figure, box, result)
    for one in drawn:
        result.shapes.append(_draw_bars(one, box) if one.style == "bars" else _draw_line(one, box, stretched))
        if values := one.values:
            for x, y in one.points:
                beside = values(y) + (" ↑" if y > box.most else "")
                place = box.x(x), box.y(min(y, box.most))
                result.labels.append(Label("value", *place, beside, one.colour))
    if figure.corner:
        rises = drawn[0].y[-1] > drawn[0].y[0]  # then the left corner is the free one
        result.labels.append(Label("corner", 0 if rises else 1, 1, figure.corner))
    say = figure.say or figure.y.format
    for one in result.legend:
        if one.style != "bars":
            read_out = [f"{say(y)} at {figure.x.format(x)}" for x, y in one.points]
            shares = [round(100 * box.x(x), 2) for x in one.x]
            result.said.append({"name": one.name, "colour": one.colour, "x": shares, "said": read_out})
    return result


class _Box:
    """Where values lie in it: `x` from the left, `y` from the bottom, as shares; `place` from the top."""

    def __init__(self, chart: Chart, drawn: list[Series], width: float, height: float) -> None:
        self.chart, self.width, self.height = chart, width, height
        bars = any(one.style == "bars" for one in drawn)
        xs = [x for one in drawn for x in one.x] + [edge for _, *edges in chart.bands for edge in edges]
        xs += [edge for level in chart.levels for edge in (level.begin, level.end) if edge is not None]
        ys = [y for one in drawn for y in one.y]
        self.low_x, self.high_x = min(xs) - 0.6 * bars, max(xs) + 0.6 * bars
        low, high = min(ys), max(ys)
        self.most = math.inf if chart.y.most is None else chart.y.most
        reach = low - 0.3 * (high - low)
        high = min(high, self.most)
        near = [one for one in chart.levels if chart.far_levels or reach <= one.value <= high]
        self.levels = [one for one in near if one.value <= self.most]
        ys += [level.value for level in self.levels]
        low, high = 0.0 if chart.y.zero else min(ys), min(max(ys), self.most)
        if (short := chart.y.least_span * high - (high - low)) > 0:
            low, high = low - short / 2, high + short / 2
        self.low_y, self.high_y = low, high
        margin, end = chart.x.margin, 0.0 if chart.x.log or chart.x.margin or bars else 0.012
        self.x = _scale(self.low_x, self.high_x, chart.x.log, margin, margin + end)
        margin = chart.y.margin or 0.06
        self.y = _scale(low, high, chart.y.log, 0.0 if bars else margin, margin)

    def place(self, x: float, y: float) -> tuple[float, float]:
        return self.x(x) * self.width, self.height - self.y(y) * self.height


def _draw_frame(chart: Chart, box: _Box, result: Drawing) -> None:
    """What lies behind the points: bands, axes, levels and rulers."""
    shapes, labels, width, height = result.shapes, result.labels, box.width, box.height
    names = []
    for number, band in enumerate(chart.bands):
        begin, end = box.x(band.begin), box.x(band.end)
        if number % 2:
            shape = Markup('<rect class="band" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>')
            shapes.append(shape.format(begin * width, (end - begin) * width, height))
        if 100 * (end - begin) >= 1.3 * len(band.name):  # else there is no room for it on a narrow page
            names.append(Label("band", (begin + end) / 2, 0, band.name))
    for value in ticks(box.low_y, box.high_y, 6, chart.y.log):
        if 0 <= (at := box.y(value)) <= 1:
            shapes.append(Markup('<path class="grid" d="M0 {:.1f}H{}"/>').format(height - at * height, width))
            labels.append(Label("y", 0, at, chart.y.format(value)))
    for value in chart.x.ticks or ticks(box.low_x, box.high_x, 5, chart.x.log):
        labels.append(Label("x", box.x(value), 0, chart.x.format(value)))
    labels += names
    for name, value, *ends in box.levels:
        begin, end = (edge if at is None else box.x(at) for at, edge in zip(ends, (0.0, 1.0), strict=True))
        line = begin * width, height - box.y(value) * height, end * width
        shapes.append(Markup('<path class="level" d="M{:.1f} {:.1f}H{:.1f}"/>').format(*line))
        labels.append(Label("level", end, box.y(value), name))
    for name, value in chart.rulers:
        shapes.append(Markup('<path class="level" d="M{:.1f} 0V{}"/>').format(box.x(value) * width, height))
        labels.append(Label("ruler", box.x(value), 1, name))


def _draw_bars(one: Series, box: _Box) -> Markup:
    shape = Markup(
        '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" style="fill:var(--c{})">'
        "<title>{}: {}</title></rect>"
    )
    half, parts = 0.42 * (box.x(1) - box.x(0)) * box.width, []
    for x, y in one.points:
        (middle, top), said = box.place(x, y), (box.chart.x.format(x), box.chart.y.format(y))
        parts.append(shape.format(middle - half, top, 2 * half, box.height - top, one.colour, *said))
    return Markup("").join(parts)


def _draw_line(one: Series, box: _Box, stretched: bool) -> Markup:
    places = [box.place(x, min(y, box.most)) for x, y in one.points]
    kind, paint = one.style + (" dashed" if one.dashed else ""), "stroke"
    if one.style != "dots":
        pieces = [[box.place(*point) for point in piece] for piece in _below(one.points, box.most)]
        path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in piece) for piece in pieces)
    elif stretched:  # a line of no length with round ends is a dot whatever the stretching
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    else:
        path = "".join(mark(one.marker, x, y, 10 if one.marker == "*" else 5) for x, y in places)
        kind, paint = "mark", "fill"
    return Markup('<path class="{}" style="{}:var(--c{})" d="{}"/>').format(kind, paint, one.colour, path)


def _below(points: Sequence[tuple[float, float]], most: float) -> list[list[tuple[float, float]]]:
    """Return the pieces of a line that lie at or below a value; cut pieces begin and end exactly there."""
    pieces: list[list[tuple[float, float]]] = []
    before: tuple[float, float] | None = None
    for x, y in points:
        inside = y <= most
        if before is not None and inside != (before[1] <= most):
            share = (most - before[1]) / (y - before[1])
            edge = before[0] + share * (x - before[0]), most
            if inside:
                pieces.append([edge])
            else:
                pieces[-1].append(edge)
        elif before is None and inside:
            pieces.append([])
        if inside:
            pieces[-1].append((x, y))
        before = x, y
    return pieces


#: Of markers with equal sides: corners, the angle of the first, and by turns how far they are.
_CORNERS = {"s": (4, 45, (1.25,)), "D": (4, 0, (1.25,)), "^": (3, 90, (1.25,)), "v": (3, -90, (1.25,)),
            "*": (10, 90, (1, 0.42))}  # fmt: skip


def mark(kind: str, x: float, y: float, r: float) -> str:
    """The outline of a marker, as a path."""
    if kind in _CORNERS:
        count, turn, far = _CORNERS[kind]
        corners = [(far[i % len(far)] * r, turn + 360 * i / count) for i in range(count)]
    elif kind in ("P", "X"):  # a plus, upright or turned
        turn = 45 * (kind == "X")
        corners = [(1.2 * r if i % 3 else 0.5 * r, turn + 45 + 90 * (i // 3) + (0, 25, 65)[i % 3])
                   for i in range(12)]  # fmt: skip
    else:
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"
    points = [(x + s * math.cos(math.radians(a)), y - s * math.sin(math.radians(a))) for s, a in corners]
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points) + "z"


def _draw_cells(figure: HeatMap, width: float, height: float) -> Drawing:
    rows, columns = len(figure.values), len(figure.values[0])
    result = Drawing(figure.column + (f"; {figure.caption}" if figure.caption else ""))
    shape = Markup(
        '<rect class="cell" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" '
        'style="fill:color-mix(in oklab, var(--{}) {:.0f}%, var(--middle))"><title>{}</title></rect>'
    )
    w, h = width / columns, height / rows
    for i, (name, values) in enumerate(zip(figure.rows, figure.values, strict=True)):
        at = 1 - (i + 0.5) / rows
        if i % -(-rows // 18) == 0:
            result.labels.append(Label("y", 0, at, name))
        for j, value in enumerate(values):
            end, heat = "cold", (figure.middle - value) / figure.middle
            if value > figure.middle:
                end, heat = "hot", (value - figure.middle) / (figure.most - figure.middle)
            said = f"{figure.column} {j + 1}, {name}: {value:.3f}"
            result.shapes.append(shape.format(j * w, i * h, w, h, end, 100 * min(1.0, heat), said))
            if max(rows, columns) <= _NUMBERED:
                result.labels.append(Label("cell", (j + 0.5) / columns, at, f"{value:.2f}"))
    for j in range(0, columns, -(-columns // 8)):
        result.labels.append(Label("x", (j + 0.5) / columns, 0, str(j + 1)))
    return result


def named(drawn: Sequence[Series]) -> list[Series]:
    """What a legend names: not what is faint, and once what is drawn as a line and as dots."""
    by_name = {one.name: one for one in reversed(drawn) if one.name and one.style != "faint"}
    return [*reversed(by_name.values())]


def _thinned(one: Series) -> Series:
    """Neighbours on a line averaged, so that a page of a long run stays small."""
    every = math.ceil(len(one.x) / _POINTS)
    if every == 1 or one.style in ("dots", "bars"):
        return one
    x, y = ([fmean(values[i : i + every]) for i in range(0, len(values), every)] for values in (one.x, one.y))
    return replace(one, x=x, y=y)


def _scale(low: float, high: float, log: bool, before: float, after: float) -> Callable[[float], float]:
    """From values to 0..1, with these shares of them free."""
    turn: Callable[[float], float] = math.log if log and low > 0 else float
    first, last = turn(low), turn(high)
    span = (last - first) or abs(last) or 1.0
    if last == first:
        first -= span / 2
    first, span = first - before * span, span * (1 + (before + after))
    return lambda value: (turn(value) - first) / span


def ticks(low: float, high: float, count: int, log: bool = False) -> list[float]:
    """About ``count`` round numbers in ``low..high``, 1, 2, 2.5 or 5 times a power of ten apart; on a
    logarithmic scale of more than a decade 1, 2 and 5 times powers of ten, or the powers alone."""
    if not high > low:
        return [low]
    if log and low > 0 and high / low > 10:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        some = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
        return some if len(some) <= count + 2 else [10.0**p for p in powers if low <= 10.0**p <= high]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
