"""Charts for a page: SVG that is stretched to the width there is, under text that is not.

An SVG scaled to a phone's width scales its letters too, down to nothing. So the lines are drawn in a square
of 1000 units that is stretched in each direction by itself (their width is not), and all text is HTML, placed
in per cent. Colours are the page's variables, which are others in the dark. What is drawn is also in the
figure as JSON, for the script that reads values out; a page without script, or on paper, lacks only that.

Text of users comes through Markup's formatting, which escapes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

_SIZE = 1000
#: Points of a line at most; beyond, neighbours are averaged.
_POINTS = 600

Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One line, or a set of dots.

    ``colour`` numbers the page's variables ``--c0``...; a ``faint`` line is a background without name, and
    ``dots`` are drawn apart. Names go into the legend and into what the script reads out.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Band:
    """A named stretch of the x axis."""

    name: str
    begin: float
    end: float


def line_chart(
    series: Iterable[Series],
    *,
    title: str,
    x_label: str,
    x_format: Format,
    y_format: Format,
    say: Format | None = None,
    log: bool = False,
    zero: bool = False,
    least_span: float = 0.0,
    bands: Sequence[Band] = (),
    levels: Sequence[tuple[str, float]] = (),
    x_ticks: Sequence[float] | None = None,
) -> Markup:
    """Lines over a common axis; nothing at all where there is no point to draw.

    Args:
        title: what is shown, with its unit; it stands above, in the place of a label of the y axis.
        say: how a value is read out (default: as beside the axis).
        log: y on a logarithmic scale, if all values are positive.
        zero: y begins at 0.
        least_span: height of the y axis at least, as a share of its values: what is flat shall look flat.
        bands: shaded by turns, their names above where there is room.
        levels: dashed lines across, with their names at the right; only those within the lines' reach.
        x_ticks: instead of round numbers.
    """
    say = say or y_format
    drawn = [one if one.dots else _thinned(one) for one in series if len(one.x)]
    if not drawn:
        return Markup("")
    xs = [x for one in drawn for x in one.x] + [edge for band in bands for edge in (band.begin, band.end)]
    ys = [y for one in drawn for y in one.y]
    low, high = min(ys), max(ys)
    shown = [(name, value) for name, value in levels if low - 0.3 * (high - low) <= value <= high]
    low = 0.0 if zero else min([low, *(value for _, value in shown)])
    if (short := least_span * high - (high - low)) > 0:
        low, high = low - short / 2, high + short / 2
    to_x = _scale(min(xs), max(xs) + 0.012 * (max(xs) - min(xs)))
    to_y = _scale(low, high, log=log, margin=0.06)
    inside = [_shading(bands, to_x)]
    labels = []
    for value in ticks(low, high, 6):
        if 0 <= (at := to_y(value)) <= _SIZE:
            inside.append(Markup('<path class="grid" d="M0 {0}H{1}"/>').format(_SIZE - at, _SIZE))
            labels.append(
                Markup('<span class="y" style="bottom:{}%">{}</span>').format(at / 10, y_format(value))
            )
    for value in x_ticks if x_ticks is not None else ticks(min(xs), max(xs), 5):
        labels.append(
            Markup('<span class="x" style="left:{}%">{}</span>').format(to_x(value) / 10, x_format(value))
        )
    for band in bands:
        width = (to_x(band.end) - to_x(band.begin)) / 10
        if width < 1.3 * len(band.name):
            continue  # no room for it on a narrow page
        middle = (to_x(band.begin) + to_x(band.end)) / 20
        labels.append(Markup('<span class="band" style="left:{}%">{}</span>').format(middle, band.name))
    for name, value in shown:
        at = to_y(value)
        inside.append(Markup('<path class="level" d="M0 {0}H{1}"/>').format(_SIZE - at, _SIZE))
        labels.append(Markup('<span class="level" style="bottom:{}%">{}</span>').format(at / 10, name))
    inside += [_drawn(one, to_x, to_y) for one in drawn]
    values = [
        {
            "name": one.name,
            "colour": one.colour,
            "x": [round(to_x(x) / 10, 2) for x in one.x],
            "said": [f"{say(y)} at {x_format(x)}" for x, y in zip(one.x, one.y, strict=True)],
        }
        for one in _named(drawn)
    ]
    return _figure(title, x_label, inside, labels, _legend(drawn), json.dumps(values, separators=(",", ":")))


def bar_chart(
    values: Sequence[float],
    *,
    title: str,
    x_label: str,
    y_format: Format,
    names: Sequence[str],
    colour: int = 0,
) -> Markup:
    """One bar a value, named below."""
    high = max(values) * 1.06 or 1.0
    step = _SIZE / len(values)
    inside, labels = [], []
    for value in ticks(0, high, 5):
        if value <= high:
            at = value / high * _SIZE
            inside.append(Markup('<path class="grid" d="M0 {0}H{1}"/>').format(_SIZE - at, _SIZE))
            labels.append(
                Markup('<span class="y" style="bottom:{}%">{}</span>').format(at / 10, y_format(value))
            )
    every = math.ceil(len(values) / 12)
    for i, (value, name) in enumerate(zip(values, names, strict=True)):
        height = value / high * _SIZE
        bar = '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="var(--c{})">'
        bar += "<title>{}: {}</title></rect>"
        inside.append(
            Markup(bar).format(
                (i + 0.08) * step, _SIZE - height, 0.84 * step, height, colour, name, y_format(value)
            )
        )
        if i % every == 0:
            labels.append(
                Markup('<span class="x" style="left:{}%">{}</span>').format((i + 0.5) * step / 10, name)
            )
    return _figure(title, x_label, inside, labels, Markup(""), "[]")


def _figure(
    title: str, x_label: str, inside: list[Markup], labels: list[Markup], legend: Markup, values: str
) -> Markup:
    return Markup(
        '<figure class="chart" data-values="{values}"><figcaption>{title}</figcaption>{legend}'
        '<div class="plot"><svg viewBox="0 0 {n} {n}" preserveAspectRatio="none" role="img" '
        'aria-label="{title}">{inside}</svg>{labels}</div><div class="under">{x_label}</div></figure>'
    ).format(
        values=values, title=title, legend=legend, n=_SIZE, inside=Markup("").join(inside),
        labels=Markup("").join(labels), x_label=x_label,
    )  # fmt: skip


def _shading(bands: Sequence[Band], to_x: Callable[[float], float]) -> Markup:
    rects = [
        Markup('<rect class="band" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>').format(
            to_x(band.begin), to_x(band.end) - to_x(band.begin), _SIZE
        )
        for band in bands[1::2]
    ]
    return Markup("").join(rects)


def _drawn(one: Series, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> Markup:
    places = [f"{to_x(x):.1f} {_SIZE - to_y(y):.1f}" for x, y in zip(one.x, one.y, strict=True)]
    if one.dots:  # a line of no length with round ends is a dot whatever the stretching
        path, kind = "".join(f"M{place}h0" for place in places), "dots"
    else:
        path, kind = "M" + "L".join(places), "faint" if one.faint else "line"
    return Markup('<path class="{}" style="stroke:var(--c{})" d="{}"/>').format(kind, one.colour, path)


def _legend(drawn: list[Series]) -> Markup:
    named = _named(drawn)
    if len(named) < 2:
        return Markup("")
    keys = [
        Markup('<li class="{}" style="--own:var(--c{})">{}</li>').format(
            "dots" if one.dots else "line", one.colour, one.name
        )
        for one in named
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(keys))


def _named(drawn: list[Series]) -> list[Series]:
    """What a legend names: not what is faint, and once what is drawn as a line and as dots."""
    return list({one.name: one for one in reversed(drawn) if not one.faint}.values())[::-1]


def _thinned(one: Series) -> Series:
    """Neighbours averaged, so that a page of a long run stays small."""
    every = math.ceil(len(one.x) / _POINTS)
    if every == 1:
        return one
    x, y = (
        [sum(values[i : i + every]) / len(values[i : i + every]) for i in range(0, len(values), every)]
        for values in (one.x, one.y)
    )
    return Series(one.name, x, y, one.colour, one.faint, one.dots)


def _scale(low: float, high: float, *, log: bool = False, margin: float = 0.0) -> Callable[[float], float]:
    """From values to 0.._SIZE."""
    turn: Callable[[float], float] = math.log if log and low > 0 else float
    first, last = turn(low), turn(high)
    span = (last - first) or abs(last) or 1.0
    if last == first:
        first -= span / 2
    first, span = first - margin * span, span * (1 + 2 * margin)
    return lambda value: (turn(value) - first) / span * _SIZE


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers in ``low..high``, 1, 2, 2.5 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
