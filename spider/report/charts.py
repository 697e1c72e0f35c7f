"""Define figures as values, and draw them. Pages and pictures share this one engine.

A figure (`Chart`, `HeatMap`, `Note`) says what is shown. `draw` turns it into SVG shapes in a box of any
size, and labels at relative positions in it. `spider.report.render` puts them into a page or a file. A page
stretches its box to the width of the screen: its lines keep their width and its text is HTML. A scaled SVG
would also scale its letters, which are too small on a phone.
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

#: Most points of a line. Neighbours of a longer one are averaged.
_POINTS = 600
#: Most rows and columns of a heat map whose cells show their numbers.
_NUMBERED = 8
COLOURS = 7
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Format = Callable[[float], str]
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """An axis of a chart."""

    label: str = ""
    format: Format = plain
    log: bool = False
    zero: bool = False
    """Begin at 0."""
    least_span: float = 0.0
    """Least length, as a share of the largest value, so that a nearly flat line looks flat."""
    margin: float = 0.0
    """Free space at both ends, as a share of the axis."""
    most: float | None = None
    """End of a y axis below the largest values. Lines are cut there, and marks are drawn at the edge."""
    ticks: Sequence[float] | None = None
    """Ticks of an x axis (default: round numbers)."""


@dataclass(frozen=True)
class Series:
    """Points of one kind. The legend and the readout of a page show the names of all but faint series."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    """Number of the CSS variable ``--c0``, ``--c1``, ..."""
    style: Literal["line", "faint", "dots", "bars"] = "line"
    marker: str = "o"
    dashed: bool = False
    values: Format | None = None
    """Format of the values beside the points of a picture (default: no values)."""

    @property
    def points(self) -> list[Point]:
        return list(zip(self.x, self.y, strict=True))


class Band(NamedTuple):
    """A named part of the x axis."""

    name: str
    begin: float
    end: float


class Level(NamedTuple):
    """A horizontal dashed line over the whole width, or from ``begin`` to ``end``."""

    name: str
    value: float
    begin: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Chart:
    """Series over two axes."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    """Parts of the x axis. Every second one is shaded, and names are shown if they fit."""
    levels: Sequence[Level] = ()
    far_levels: bool = False
    """Show levels that are far from the points as well."""
    rulers: Sequence[tuple[str, float]] = ()
    """Vertical dashed lines: name and x."""
    readout: Format | None = None
    """Format of the values that a page shows at the pointer (default: that of the y axis)."""
    instead: str = ""
    """Text of a picture without points."""


Figure = Chart | HeatMap | Note


class Label(NamedTuple):
    """Text at a relative position from the left and the bottom. Its kind decides the alignment."""

    kind: Literal["x", "y", "band", "level", "ruler", "cell", "value"]
    x: float
    y: float
    text: str
    colour: int | None = None


@dataclass
class Drawing:
    """The shapes and labels of a figure."""

    x_label: str
    y_label: str = ""
    legend: Sequence[Series] = ()
    shapes: list[Markup] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    readout: list[dict[str, object]] = field(default_factory=list)
    """The values of each series that a page shows at the pointer, as JSON."""


def draw(figure: Chart | HeatMap, width: float, height: float, *, stretched: bool) -> Drawing | None:
    """Draw a figure in a box; None for a chart without points.

    Args:
        stretched: The box is shown at other proportions, so the shapes of markers would be distorted.
    """
    if isinstance(figure, HeatMap):
        return _draw_cells(figure, width, height)
    drawn = [_thinned(series) for series in figure.series if len(series.x)]
    if not drawn:
        return None
    box = _Box(figure, drawn, width, height)
    drawing = Drawing(figure.x.label, figure.y.label, named(drawn))
    _draw_frame(figure, box, drawing)
    for series in drawn:
        shape = _draw_bars(series, box) if series.style == "bars" else _draw_line(series, box, stretched)
        drawing.shapes.append(shape)
        if series.values:
            for x, y in series.points:
                text = series.values(y) + (" ↑" if y > box.most else "")
                label = Label("value", box.x(x), box.y(min(y, box.most)), text, series.colour)
                drawing.labels.append(label)
    readout = figure.readout or figure.y.format
    for series in drawing.legend:
        if series.style != "bars":
            entry = {
                "name": series.name,
                "colour": series.colour,
                "x": [round(100 * box.x(x), 2) for x in series.x],
                "texts": [f"{readout(y)} at {figure.x.format(x)}" for x, y in series.points],
            }
            drawing.readout.append(entry)
    return drawing


class _Box:
    """The scales of a chart: `x` from the left and `y` from the bottom, as shares of the box."""

    def __init__(self, chart: Chart, drawn: list[Series], width: float, height: float) -> None:
        self.chart = chart
        self.width = width
        self.height = height
        bars = any(series.style == "bars" for series in drawn)
        xs = [x for series in drawn for x in series.x]
        xs += [edge for band in chart.bands for edge in (band.begin, band.end)]
        xs += [edge for level in chart.levels for edge in (level.begin, level.end) if edge is not None]
        self.low_x = min(xs) - 0.6 * bars
        self.high_x = max(xs) + 0.6 * bars
        end = 0.0 if chart.x.log or chart.x.margin or bars else 0.012
        self.x = _scale(self.low_x, self.high_x, chart.x.log, chart.x.margin, chart.x.margin + end)

        ys = [y for series in drawn for y in series.y]
        self.most = math.inf if chart.y.most is None else chart.y.most
        near = min(ys) - 0.3 * (max(ys) - min(ys))
        self.levels = [
            level
            for level in chart.levels
            if level.value <= self.most and (chart.far_levels or near <= level.value <= max(ys))
        ]
        ys += [level.value for level in self.levels]
        low = 0.0 if chart.y.zero else min(ys)
        high = min(max(ys), self.most)
        missing = chart.y.least_span * high - (high - low)
        if missing > 0:
            low -= missing / 2
            high += missing / 2
        self.low_y = low
        self.high_y = high
        margin = chart.y.margin or 0.06
        self.y = _scale(low, high, chart.y.log, 0.0 if bars else margin, margin)

    def position(self, x: float, y: float) -> Point:
        """Return the position of a point in pixels from the left and the top."""
        return self.x(x) * self.width, self.height - self.y(y) * self.height


def _draw_frame(chart: Chart, box: _Box, drawing: Drawing) -> None:
    """Draw the background of the points: bands, axes, levels and rulers."""
    for number, band in enumerate(chart.bands):
        begin = box.x(band.begin)
        end = box.x(band.end)
        if number % 2:
            shape = Markup('<rect class="band" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>')
            drawing.shapes.append(shape.format(begin * box.width, (end - begin) * box.width, box.height))
        if 100 * (end - begin) >= 1.3 * len(band.name):  # the name fits on a narrow page
            drawing.labels.append(Label("band", (begin + end) / 2, 0, band.name))
    for value in ticks(box.low_y, box.high_y, 6, chart.y.log):
        at = box.y(value)
        if 0 <= at <= 1:
            shape = Markup('<path class="grid" d="M0 {:.1f}H{}"/>')
            drawing.shapes.append(shape.format(box.height - at * box.height, box.width))
            drawing.labels.append(Label("y", 0, at, chart.y.format(value)))
    for value in chart.x.ticks or ticks(box.low_x, box.high_x, 5, chart.x.log):
        drawing.labels.append(Label("x", box.x(value), 0, chart.x.format(value)))
    for level in box.levels:
        begin = 0.0 if level.begin is None else box.x(level.begin)
        end = 1.0 if level.end is None else box.x(level.end)
        at = box.y(level.value)
        shape = Markup('<path class="level" d="M{:.1f} {:.1f}H{:.1f}"/>')
        drawing.shapes.append(shape.format(begin * box.width, box.height - at * box.height, end * box.width))
        drawing.labels.append(Label("level", end, at, level.name))
    for name, value in chart.rulers:
        shape = Markup('<path class="level" d="M{:.1f} 0V{}"/>')
        drawing.shapes.append(shape.format(box.x(value) * box.width, box.height))
        drawing.labels.append(Label("ruler", box.x(value), 1, name))


def _draw_bars(series: Series, box: _Box) -> Markup:
    shape = Markup(
        '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" style="fill:var(--c{})">'
        "<title>{}: {}</title></rect>"
    )
    half = 0.42 * (box.x(1) - box.x(0)) * box.width
    bars = []
    for x, y in series.points:
        middle, top = box.position(x, y)
        x_text = box.chart.x.format(x)
        y_text = box.chart.y.format(y)
        bars.append(
            shape.format(middle - half, top, 2 * half, box.height - top, series.colour, x_text, y_text)
        )
    return Markup("").join(bars)


def _draw_line(series: Series, box: _Box, stretched: bool) -> Markup:
    """Draw a line or dots. Dots of a stretched box are lines of no length with round ends."""
    kind = series.style + (" dashed" if series.dashed else "")
    paint = "stroke"
    if series.style != "dots":
        pieces = [[box.position(*point) for point in piece] for piece in _below(series.points, box.most)]
        path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in piece) for piece in pieces)
    else:
        dots = [box.position(x, min(y, box.most)) for x, y in series.points]
        if stretched:
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in dots)
        else:
            path = "".join(mark(series.marker, x, y, 10 if series.marker == "*" else 5) for x, y in dots)
            kind = "mark"
            paint = "fill"
    shape = Markup('<path class="{}" style="{}:var(--c{})" d="{}"/>')
    return shape.format(kind, paint, series.colour, path)


def _below(points: Sequence[Point], most: float) -> list[list[Point]]:
    """Return the pieces of a line at or below a value. Cut pieces begin and end exactly at the value."""
    pieces: list[list[Point]] = []
    before: Point | None = None
    for x, y in points:
        inside = y <= most
        if before is not None and inside != (before[1] <= most):
            share = (most - before[1]) / (y - before[1])
            edge = (before[0] + share * (x - before[0]), most)
            if inside:
                pieces.append([edge])
            else:
                pieces[-1].append(edge)
        elif before is None and inside:
            pieces.append([])
        if inside:
            pieces[-1].append((x, y))
        before = (x, y)
    return pieces


#: Corners of each marker as polar coordinates: angle in degrees, and distance in radii.
_CORNERS = {
    "s": [(45 + 90 * i, 1.25) for i in range(4)],
    "D": [(90 * i, 1.25) for i in range(4)],
    "^": [(90 + 120 * i, 1.25) for i in range(3)],
    "v": [(-90 + 120 * i, 1.25) for i in range(3)],
    "*": [(90 + 36 * i, 0.42 if i % 2 else 1.0) for i in range(10)],
    "P": [(45 + 90 * i + angle, far) for i in range(4) for angle, far in ((0, 0.5), (25, 1.2), (65, 1.2))],
    "X": [(90 + 90 * i + angle, far) for i in range(4) for angle, far in ((0, 0.5), (25, 1.2), (65, 1.2))],
}


def mark(kind: str, x: float, y: float, r: float) -> str:
    """Return the outline of a marker as a path: a circle, or a shape of `_CORNERS`."""
    if kind not in _CORNERS:
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"
    corners = []
    for degrees, far in _CORNERS[kind]:
        angle = math.radians(degrees)
        corners.append(f"{x + far * r * math.cos(angle):.1f} {y - far * r * math.sin(angle):.1f}")
    return "M" + "L".join(corners) + "z"


def _draw_cells(figure: HeatMap, width: float, height: float) -> Drawing:
    rows = len(figure.values)
    columns = len(figure.values[0])
    drawing = Drawing(figure.column + (f"; {figure.caption}" if figure.caption else ""))
    shape = Markup(
        '<rect class="cell" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" '
        'style="fill:color-mix(in oklab, var(--{}) {:.0f}%, var(--middle))"><title>{}</title></rect>'
    )
    w = width / columns
    h = height / rows
    for i, (name, values) in enumerate(zip(figure.rows, figure.values, strict=True)):
        at = 1 - (i + 0.5) / rows
        if i % -(-rows // 18) == 0:
            drawing.labels.append(Label("y", 0, at, name))
        for j, value in enumerate(values):
            if value > figure.middle:
                colour = "hot"
                strength = (value - figure.middle) / (figure.most - figure.middle)
            else:
                colour = "cold"
                strength = (figure.middle - value) / figure.middle
            tooltip = f"{figure.column} {j + 1}, {name}: {value:.3f}"
            drawing.shapes.append(shape.format(j * w, i * h, w, h, colour, 100 * min(1.0, strength), tooltip))
            if max(rows, columns) <= _NUMBERED:
                drawing.labels.append(Label("cell", (j + 0.5) / columns, at, f"{value:.2f}"))
    for j in range(0, columns, -(-columns // 8)):
        drawing.labels.append(Label("x", (j + 0.5) / columns, 0, str(j + 1)))
    return drawing


def named(drawn: Sequence[Series]) -> list[Series]:
    """Return the series of a legend: one for each name, without faint ones."""
    by_name = {series.name: series for series in reversed(drawn) if series.name and series.style != "faint"}
    return [*reversed(by_name.values())]


def _thinned(series: Series) -> Series:
    """Average neighbours on a long line, so that the page of a long run stays small."""
    every = math.ceil(len(series.x) / _POINTS)
    if every == 1 or series.style in ("dots", "bars"):
        return series
    starts = range(0, len(series.x), every)
    return replace(
        series,
        x=[fmean(series.x[i : i + every]) for i in starts],
        y=[fmean(series.y[i : i + every]) for i in starts],
    )


def _scale(low: float, high: float, log: bool, before: float, after: float) -> Callable[[float], float]:
    """Return a map from values to 0..1, with shares ``before`` and ``after`` of the range left free."""
    transform: Callable[[float], float] = math.log if log and low > 0 else float
    first = transform(low)
    last = transform(high)
    span = (last - first) or abs(last) or 1.0
    if last == first:
        first -= span / 2
    first -= before * span
    span *= 1 + before + after
    return lambda value: (transform(value) - first) / span


def ticks(low: float, high: float, count: int, log: bool = False) -> list[float]:
    """Return about ``count`` round numbers in ``low..high``, 1, 2, 2.5 or 5 times a power of ten apart.

    A logarithmic scale over more than a decade has 1, 2 and 5 times the powers of ten, or the powers alone.
    """
    if not high > low:
        return [low]
    if log and low > 0 and high / low > 10:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        fine = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
        return fine if len(fine) <= count + 2 else [10.0**p for p in powers if low <= 10.0**p <= high]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
