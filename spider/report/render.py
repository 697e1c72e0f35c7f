"""What is opened: pages from templates, and figures in a page or as files of their own.

    html        a page that asks for nothing: one base, one sheet of styles, one way to show a number
    in_page     a figure of it: HTML around an SVG that is stretched to the width there is; colours are the
                page's variables, which are others in the dark, and a script reads values out
    picture     an SVG file of a fixed size on white that needs nothing else, of one figure or of several

All take colours from `page.css`, the one place that names them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from spider.evaluation.result import BITS, HeatMap, Note, scores
from spider.files import write_text
from spider.report.charts import Figure, Label, Series, draw, mark, named
from spider.report.formatting import bits, duration, number, printable, quantity, titles

HERE = Path(__file__).parent
#: How many tints of a cut text follow one another: the variables ``--t0``... of `page.css`.
TINTS = 4
_SIZE = 1000


def html(name: str, *, script: str = "", **values: Any) -> str:
    """A page by its template; ``script`` is a file, the only one that the page's security policy lets run."""
    style, code = ((HERE / file).read_text(encoding="utf-8") if file else "" for file in ("page.css", script))
    values |= {"style": Markup(style), "script": Markup(code)}
    values["script_hash"] = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return _TEMPLATES.get_template(name).render(values)


def _shown(value: Any) -> Any:
    """Text without control characters, wherever it comes from; what is markup already stays as it is."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def in_page(figure: Figure) -> Markup:
    """A figure of a page; nothing at all of a chart without a point."""
    drawing = None if isinstance(figure, Note) else draw(figure, _SIZE, _SIZE, stretched=True)
    if not (drawing or isinstance(figure, Note)):
        return Markup("")
    said = json.dumps(drawing.said if drawing else [], separators=(",", ":"))
    shown = {"figure": figure, "drawing": drawing, "values": said, "size": _SIZE}
    return Markup(_TEMPLATES.get_template("figure.html.j2").render(shown))


_TEMPLATES = Environment(
    loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, finalize=_shown,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_TEMPLATES.globals |= {"TINTS": TINTS, "BITS": BITS}
_TEMPLATES.filters |= {
    "quantity": quantity, "duration": duration, "number": number, "bits": bits, "bits4": "{:.4f}".format,
    "count": "{:,}".format, "draw": in_page, "titles": titles,
    "score_values": lambda results: {row.name: str(row) for row in scores(results) if row.value is not None},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ pictures

_FONT = Markup('font-family="DejaVu Sans, Verdana, sans-serif" font-size="13"')
#: Width of a letter, about, for what has to be kept free.
_LETTER = 7.5
_SOFT = 'fill="var(--soft)" font-size="12"'
_STYLE = Markup("""
path { fill: none; } .grid { stroke: var(--line); } .axis { stroke: var(--ink); }
.level { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 6 3; }
.line { stroke-width: 2; stroke-linejoin: round; } .faint { stroke-width: 1; opacity: .3; }
.dashed { stroke-dasharray: 6 4; } .mark { stroke: #fff; } .band { fill: var(--tint); }
.cell { stroke: #fff; } .lead { stroke: var(--soft); stroke-width: .7; }
""")


@cache
def colours() -> dict[str, str]:
    """The variables of a light page."""
    light = (HERE / "page.css").read_text(encoding="utf-8").partition("}")[0]
    return dict(re.findall(r"--([\w-]+): ([^;]+);", light))


def coloured(svg: str) -> str:
    """With the values of a light page in place of its variables, which few viewers of pictures know."""

    def mixed(match: re.Match[str]) -> str:
        share = int(match[2]) / 100
        ends = [[int(colours()[name][i : i + 2], 16) for i in (1, 3, 5)] for name in (match[1], "middle")]
        return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in zip(*ends, strict=True))

    svg = re.sub(r"color-mix\(in oklab, var\(--(\w+)\) (\d+)%, var\(--middle\)\)", mixed, svg)
    return re.sub(r"var\(--([\w-]+)\)", lambda match: colours()[match[1]], svg)


def text(x: float, y: float, said: str, style: str = "", anchor: str = "start") -> Markup:
    """A line of text of a picture."""
    shape = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" {}>{}</text>'
    return Markup(shape).format(x, y, anchor, Markup(style), printable(said))


def write_svg(path: Path, parts: Sequence[Markup], width: float, height: float, title: str) -> None:
    """A file of its own around what is drawn."""
    shape = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" width="{w:.0f}" height="{h:.0f}" '
        'viewBox="0 0 {w:.0f} {h:.0f}" {font} fill="var(--ink)"><title>{title}</title>'
        '<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )
    body, title = Markup("").join(parts), printable(title)
    write_text(
        path, coloured(shape.format(w=width, h=height, font=_FONT, title=title, style=_STYLE, body=body))
    )


def picture(
    path: Path,
    columns: Sequence[tuple[float, Sequence[Figure]]],
    width: float = 800,
    height: float = 440,
    title: str = "",
) -> None:
    """Write figures as one file below a title; ``columns`` are from left to right, each with its share of
    the width and figures from top to bottom."""
    top = 34 if title else 6
    parts = [text(14, 24, title, 'font-size="16" font-weight="bold"')] if title else []
    x, total = 0.0, sum(weight for weight, _ in columns)
    for weight, figures in columns:
        wide, high = width * weight / total, (height - top - 4) / len(figures)
        parts += [_panel(one, x, top + i * high, wide, high) for i, one in enumerate(figures)]
        x += wide
    write_svg(path, parts, width, height, title)


def _panel(figure: Figure, x: float, y: float, width: float, height: float) -> Markup:
    """One figure with its title, axes and labels, in a box of pixels."""
    left, right, top, bottom = 70.0, 18.0, 30.0, 48.0
    if isinstance(figure, HeatMap):
        left = 16 + _LETTER * max(len(name) for name in figure.rows)
    elif not isinstance(figure, Note):
        lines = _legend_lines(named(figure.series), width - 88)
        top += 20 * len(lines)
        right += 26 * any(one.values for one in figure.series)
        right += max((24 + _LETTER * len(level.name) for level in figure.levels), default=0)
    w, h = width - left - right, height - top - bottom
    heading = text(x + left, y + 16, figure.title, 'font-size="14" font-weight="bold"')
    drawing = None if isinstance(figure, Note) else draw(figure, w, h, stretched=False)
    if drawing:
        parts = [*drawing.shapes]
        if not isinstance(figure, HeatMap):
            parts.append(Markup('<path class="axis" d="M0 0V{0:.1f}H{1:.1f}"/>').format(h, w))
        parts += [_picture_label(label, w, h) for label in drawing.labels if label.kind != "level"]
        parts += _level_names([label for label in drawing.labels if label.kind == "level"], w, h)
        parts.append(text(w / 2, h + 38, drawing.under, "", "middle"))
        if drawing.beside:
            turned = f'transform="rotate(-90 -54 {h / 2:.1f})"'
            parts.append(text(-54, h / 2, drawing.beside, turned, "middle"))
        lines = _legend_lines(drawing.legend, width - 88)
        parts += [part for above, line in enumerate(reversed(lines)) for part in _legend(line, -20.0 * above)]
    else:
        said = figure.text if isinstance(figure, Note) else getattr(figure, "instead", "")
        parts = [Markup('<rect class="band" width="{}" height="{}"/>').format(w, h)]
        for i, line in enumerate(said.split("\n")):
            parts.append(text(w / 2, h / 2 + 18 * i, line, 'fill="var(--soft)"', "middle"))
    group = Markup('<g transform="translate({:.1f} {:.1f})">{}</g>')
    return heading + group.format(x + left, y + top, Markup("").join(parts))


def _picture_label(label: Label, w: float, h: float) -> Markup:
    halo = 'paint-order="stroke" stroke="#fff" stroke-width="4" font-weight="bold"'
    dx, dy, style, anchor = {
        "x": (0, 18, "", "middle"),
        "y": (-8, 4, "", "end"),
        "band": (0, -7, _SOFT, "middle"),
        "ruler": (5, 14, _SOFT, "start"),
        "cell": (0, 4, 'font-size="12"', "middle"),
        "value": (7, -8, f'{halo} fill="var(--c{label.colour})"', "start"),
        "corner": (-8, 16, "", "end") if label.x else (8, 16, "", "start"),
    }[label.kind]
    return text(label.x * w + dx, h - label.y * h + dy, label.text, style, anchor)


def _level_names(labels: list[Label], w: float, h: float) -> list[Markup]:
    """At the right ends of their lines, moved apart where they would overlap."""
    parts: list[Markup] = []
    lead = Markup('<path class="lead" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>')
    for end in dict.fromkeys(label.x for label in labels):
        own = sorted((label for label in labels if label.x == end and label.text), key=lambda label: label.y)
        for label, place in zip(own, spread([label.y * h for label in own], 15), strict=True):
            parts.append(lead.format(end * w, h - label.y * h, end * w + 12, h - place))
            parts.append(text(end * w + 15, h - place + 4, label.text, _SOFT))
    return parts


def spread(values: list[float], gap: float) -> list[float]:
    """Sorted values moved apart as little as it takes to be ``gap`` from each other."""
    placed = list(values)
    for _ in range(100):
        for i in range(1, len(placed)):
            short = gap - (placed[i] - placed[i - 1])
            if short > 1e-9:
                placed[i - 1] -= short / 2
                placed[i] += short / 2
    return placed


def _legend_lines(drawn: Sequence[Series], width: float) -> list[list[Series]]:
    """Return the entries of a legend, line by line, as many in each as fit; a single entry needs none."""
    lines: list[list[Series]] = []
    free = 0.0
    for one in drawn if len(drawn) > 1 else ():
        if _entry_width(one) > free:
            lines.append([])
            free = width
        lines[-1].append(one)
        free -= _entry_width(one)
    return lines


def _entry_width(one: Series) -> float:
    return 26 + _LETTER * len(one.name) + 18


def _legend(drawn: Sequence[Series], y: float) -> list[Markup]:
    """Return one line of a legend above the box, ``y`` below its lowest line."""
    parts, x = [], 0.0
    shape = Markup('<path class="{}" style="{}:var(--c{})" d="{}"/>')
    for one in drawn:
        key, paint, path = "line" + (" dashed" if one.dashed else ""), "stroke", f"M{x} {y - 13:.0f}h20"
        if one.style == "dots":
            key, paint, path = "mark", "fill", mark(one.marker, x + 10, y - 13, 5)
        parts += [shape.format(key, paint, one.colour, path), text(x + 26, y - 9, one.name)]
        x += _entry_width(one)
    return parts
