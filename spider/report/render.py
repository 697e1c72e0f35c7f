"""Render pages from templates, and figures in a page or as files.

    html        a page that loads no other file, with the styles of `page.css`
    in_page     a figure of a page: HTML around an SVG that is stretched to the width of the screen. Its
                colours are CSS variables, which differ in dark mode, and a script shows values
    picture     an SVG file of a fixed size on white, of one figure or several

`page.css` defines all colours.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from spider.evaluation.result import BITS, HeatMap, Note
from spider.files import write_text
from spider.report.charts import Figure, Label, Series, draw, mark, named
from spider.report.formatting import bits, duration, flops_label, number, printable, quantity, times, titles

HERE = Path(__file__).parent
#: Number of tints of a text in segments: the variables ``--t0``, ``--t1``, ... of `page.css`.
TINTS = 4
_SIZE = 1000


def html(name: str, *, script: str = "", **values: Any) -> str:
    """Render a page. Its security policy allows only ``script``, a file of this package."""
    code = (HERE / script).read_text(encoding="utf-8") if script else ""
    values |= {
        "style": Markup((HERE / "page.css").read_text(encoding="utf-8")),
        "script": Markup(code),
        "script_hash": base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
    }
    return _TEMPLATES.get_template(name).render(values)


def _without_controls(value: Any) -> Any:
    """Remove control characters from any text of a template; keep markup as it is."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def in_page(figure: Figure) -> Markup:
    """Render a figure of a page; empty for a chart without points."""
    drawing = None if isinstance(figure, Note) else draw(figure, _SIZE, _SIZE, stretched=True)
    if drawing is None and not isinstance(figure, Note):
        return Markup("")
    readout = json.dumps(drawing.readout if drawing else [], separators=(",", ":"))
    template = _TEMPLATES.get_template("figure.html.j2")
    return Markup(template.render(figure=figure, drawing=drawing, values=readout, size=_SIZE))


_TEMPLATES = Environment(
    loader=FileSystemLoader(HERE),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_without_controls,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals |= {"TINTS": TINTS, "BITS": BITS}
_TEMPLATES.filters |= {
    "quantity": quantity,
    "duration": duration,
    "number": number,
    "bits": bits,
    "bits4": "{:.4f}".format,
    "count": "{:,}".format,
    "draw": in_page,
    "flops_label": flops_label,
    "shell": shlex.quote,
    "times": times,
    "titles": titles,
}


# ------------------------------------------------------------------------------------------------ pictures

_FONT = Markup('font-family="DejaVu Sans, Verdana, sans-serif" font-size="13"')
#: Approximate width of a letter of a picture in pixels, to reserve space.
LETTER_WIDTH = 7.5
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
    """Return the CSS variables of a page in light mode."""
    light = (HERE / "page.css").read_text(encoding="utf-8").partition("}")[0]
    return dict(re.findall(r"--([\w-]+): ([^;]+);", light))


def coloured(svg: str) -> str:
    """Replace CSS variables and mixed colours by their values, because few viewers support them."""

    def mixed(match: re.Match[str]) -> str:
        share = int(match[2]) / 100
        ends = [[int(colours()[name][i : i + 2], 16) for i in (1, 3, 5)] for name in (match[1], "middle")]
        return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in zip(*ends, strict=True))

    svg = re.sub(r"color-mix\(in oklab, var\(--(\w+)\) (\d+)%, var\(--middle\)\)", mixed, svg)
    return re.sub(r"var\(--([\w-]+)\)", lambda match: colours()[match[1]], svg)


def text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> Markup:
    """Return a line of text of a picture."""
    shape = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" {}>{}</text>'
    return Markup(shape).format(x, y, anchor, Markup(style), printable(content))


def picture(
    path: Path,
    columns: Sequence[tuple[float, Sequence[Figure]]],
    width: float = 800,
    height: float = 440,
    title: str = "",
) -> None:
    """Write figures as one file with a title.

    Args:
        columns: Columns from left to right: each its share of the width, and its figures from top to bottom.
    """
    top = 34 if title else 6
    parts = [text(14, 24, title, 'font-size="16" font-weight="bold"')] if title else []
    x = 0.0
    total = sum(weight for weight, _ in columns)
    for weight, figures in columns:
        panel_width = width * weight / total
        panel_height = (height - top - 4) / len(figures)
        for i, figure in enumerate(figures):
            parts.append(_panel(figure, x, top + i * panel_height, panel_width, panel_height))
        x += panel_width
    shape = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" width="{w:.0f}" height="{h:.0f}" '
        'viewBox="0 0 {w:.0f} {h:.0f}" {font} fill="var(--ink)"><title>{title}</title>'
        '<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )
    body = Markup("").join(parts)
    svg = shape.format(w=width, h=height, font=_FONT, title=printable(title), style=_STYLE, body=body)
    write_text(path, coloured(svg))


def _panel(figure: Figure, x: float, y: float, width: float, height: float) -> Markup:
    """Return one figure with its title, axes and labels, in a box of pixels."""
    left = 70.0
    right = 18.0
    top = 30.0
    bottom = 48.0
    lines: list[list[Series]] = []
    if isinstance(figure, HeatMap):
        left = 16 + LETTER_WIDTH * max(len(name) for name in figure.rows)
    elif not isinstance(figure, Note):
        lines = _legend_lines(named(figure.series), width - 88)
        top += 20 * len(lines)
        right += 26 * any(series.values for series in figure.series)
        right += max((24 + LETTER_WIDTH * len(level.name) for level in figure.levels), default=0)
    w = width - left - right
    h = height - top - bottom
    heading = text(x + left, y + 16, figure.title, 'font-size="14" font-weight="bold"')
    drawing = None if isinstance(figure, Note) else draw(figure, w, h, stretched=False)
    if drawing:
        parts = [*drawing.shapes]
        if not isinstance(figure, HeatMap):
            parts.append(Markup('<path class="axis" d="M0 0V{0:.1f}H{1:.1f}"/>').format(h, w))
        parts += [_label(label, w, h) for label in drawing.labels if label.kind != "level"]
        parts += _level_names([label for label in drawing.labels if label.kind == "level"], w, h)
        parts.append(text(w / 2, h + 38, drawing.x_label, "", "middle"))
        if drawing.y_label:
            turned = f'transform="rotate(-90 -54 {h / 2:.1f})"'
            parts.append(text(-54, h / 2, drawing.y_label, turned, "middle"))
        for above, line in enumerate(reversed(lines)):
            parts += _legend(line, -20.0 * above)
    else:
        content = figure.text if isinstance(figure, Note) else getattr(figure, "instead", "")
        parts = [Markup('<rect class="band" width="{}" height="{}"/>').format(w, h)]
        for i, line_of_text in enumerate(content.split("\n")):
            parts.append(text(w / 2, h / 2 + 18 * i, line_of_text, 'fill="var(--soft)"', "middle"))
    group = Markup('<g transform="translate({:.1f} {:.1f})">{}</g>')
    return heading + group.format(x + left, y + top, Markup("").join(parts))


def _label(label: Label, w: float, h: float) -> Markup:
    halo = 'paint-order="stroke" stroke="#fff" stroke-width="4" font-weight="bold"'
    dx, dy, style, anchor = {
        "x": (0, 18, "", "middle"),
        "y": (-8, 4, "", "end"),
        "band": (0, -7, _SOFT, "middle"),
        "ruler": (5, 14, _SOFT, "start"),
        "cell": (0, 4, 'font-size="12"', "middle"),
        "value": (7, -8, f'{halo} fill="var(--c{label.colour})"', "start"),
    }[label.kind]
    return text(label.x * w + dx, h - label.y * h + dy, label.text, style, anchor)


def _level_names(labels: list[Label], w: float, h: float) -> list[Markup]:
    """Return the names of levels at the right ends of their lines, moved apart if they would overlap."""
    parts: list[Markup] = []
    lead = Markup('<path class="lead" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>')
    for end in dict.fromkeys(label.x for label in labels):
        own = sorted((label for label in labels if label.x == end and label.text), key=lambda label: label.y)
        heights = spread([label.y * h for label in own], 15)
        for label, height in zip(own, heights, strict=True):
            parts.append(lead.format(end * w, h - label.y * h, end * w + 12, h - height))
            parts.append(text(end * w + 15, h - height + 4, label.text, _SOFT))
    return parts


def spread(values: list[float], gap: float) -> list[float]:
    """Move sorted values apart, as little as possible, until neighbours have a distance of ``gap``."""
    moved = list(values)
    for _ in range(100):
        for i in range(1, len(moved)):
            missing = gap - (moved[i] - moved[i - 1])
            if missing > 1e-9:
                moved[i - 1] -= missing / 2
                moved[i] += missing / 2
    return moved


def _legend_lines(drawn: Sequence[Series], width: float) -> list[list[Series]]:
    """Return the entries of a legend, line by line. A single series needs no legend."""
    lines: list[list[Series]] = []
    free = 0.0
    for series in drawn if len(drawn) > 1 else ():
        if _entry_width(series) > free:
            lines.append([])
            free = width
        lines[-1].append(series)
        free -= _entry_width(series)
    return lines


def _entry_width(series: Series) -> float:
    return 26 + LETTER_WIDTH * len(series.name) + 18


def _legend(drawn: Sequence[Series], y: float) -> list[Markup]:
    """Return one line of a legend above the box."""
    parts = []
    x = 0.0
    shape = Markup('<path class="{}" style="{}:var(--c{})" d="{}"/>')
    for series in drawn:
        if series.style == "dots":
            outline = mark(series.marker, x + 10, y - 13, 5)
            parts.append(shape.format("mark", "fill", series.colour, outline))
        else:
            kind = "line dashed" if series.dashed else "line"
            parts.append(shape.format(kind, "stroke", series.colour, f"M{x} {y - 13:.0f}h20"))
        parts.append(text(x + 26, y - 9, series.name))
        x += _entry_width(series)
    return parts
