"""Patches for the eye: coloured in the terminal, as a web page, as a picture.

Neighbours have different tints, so that a boundary is where the colour changes; the open tail behind the last
boundary has none. What stands for something without a glyph is grey. Where there is no colour, in a pipe or
under ``NO_COLOR``, a ``|`` closes each patch.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from spider.evaluation.boundaries import Patch, Piece, escaped
from spider.files import write_text
from spider.report.plots import GREY, STYLE, save

#: Backgrounds that follow one another: light ones, under black text, and dark ones, under white.
TINTS = ("#BFDFF5", "#FFDDA8", "#BDE8CF", "#F3CBE0")
_DARK_TINTS = ("#12496E", "#6B4200", "#0B5639", "#6A2A50")
#: Of a picture: characters a line, and lines at most (matplotlib's pictures end at 65,536 pixels).
_COLUMNS, _LINES = 100, 2000


def show(patches: list[Patch], console: Console) -> None:
    """Print in colours, or with a ``|`` where a patch closes (then one of the text itself is ``\\x7c``).

    Sixteen colours are too few for tints that differ, so they count as none.
    """
    coloured = console.color_system in ("256", "truecolor") and not console.no_color
    text = Text()
    for number, patch in enumerate(patches):
        if not coloured:
            plain = "".join(piece.text.replace("|", "\\x7c") for piece in patch.pieces)
            line, newline = (plain[:-1], "\n") if plain.endswith("\n") else (plain, "")
            text.append(line + "|" * patch.closed + newline)
            continue
        for piece in patch.pieces:
            colour = "#606060" if piece.mark else "black"
            tinted = patch.closed and piece.text != "\n"
            text.append(piece.text, f"{colour} on {TINTS[number % len(TINTS)]}" if tinted else "")
    console.print(text, soft_wrap=True, end="" if text.plain.endswith("\n") else "\n")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --mark: #0009; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ --mark: #fff9; {dark} }} }}
body {{ max-width: 60rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.25rem; margin: 0; }}
pre {{ font: .95rem/1.75 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
span {{ padding: .15em 0; border-radius: .2em; }}
span:hover {{ outline: 2px solid currentColor; }}
i {{ font-style: normal; color: var(--mark); }}
{classes}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{caption}</p>
<pre>{body}</pre>
</body>
</html>
"""


def write_page(patches: list[Patch], path: Path, title: str, line: str) -> None:
    """A web page that needs nothing else; length and boundary probability of a patch are its tooltip.

    Args:
        line: said under the title (see `spider.evaluation.boundaries.caption`).
    """
    body = []
    for number, patch in enumerate(patches):
        inner = "".join(
            f"<i>{html.escape(piece.text)}</i>" if piece.mark else html.escape(piece.text)
            for piece in patch.pieces
        )
        if not patch.closed:
            body.append(f'<span title="{_size(patch)}, no boundary yet">{inner}</span>')
            continue
        sure = f", boundary probability {patch.probability:.2f}" if patch.probability is not None else ""
        body.append(f'<span class="t{number % len(TINTS)}" title="{_size(patch)}{sure}">{inner}</span>')
    page = _PAGE.format(
        title=html.escape(title),
        caption=html.escape(line),
        body="".join(body),
        light=_variables(TINTS),
        dark=_variables(_DARK_TINTS),
        classes="\n".join(f".t{i} {{ background: var(--t{i}); }}" for i in range(len(TINTS))),
    )
    write_text(path, page)


@dataclass
class ShownPatch:
    """A patch as a page shows it."""

    tint: int | None
    """Which of `TINTS`; None for the open tail."""
    tooltip: str
    pieces: list[Piece]


def read_page(path: Path) -> tuple[str, list[ShownPatch]]:
    """The line under the title, and the patches, of a page that `write_page` has written.

    Only text is taken, so whatever a page from elsewhere holds, a page made from this is as safe as any.
    """
    reader = _PageReader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.caption, reader.patches


class _PageReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.caption = ""
        self.patches: list[ShownPatch] = []
        self._within: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within.append(tag)
        if tag == "span" and "pre" in self._within:
            given = dict(attrs)
            number = re.fullmatch(r"t(\d)", given.get("class") or "")
            tint = int(number[1]) % len(TINTS) if number else None
            self.patches.append(ShownPatch(tint, given.get("title") or "", []))

    def handle_endtag(self, tag: str) -> None:
        if tag in self._within:
            del self._within[self._within.index(tag) :]

    def handle_data(self, data: str) -> None:
        if self._within[-1:] == ["p"]:
            self.caption += data
        elif "pre" in self._within and self.patches:
            self.patches[-1].pieces.append(Piece(data, self._within[-1] == "i"))


def tint_variables(dark: bool = False) -> str:
    """The tints as variables of a style sheet, ``--t0`` and on."""
    return _variables(_DARK_TINTS if dark else TINTS)


def _size(patch: Patch) -> str:
    return f"{patch.size} byte{'s' if patch.size > 1 else ''}"


def _variables(tints: tuple[str, ...]) -> str:
    return " ".join(f"--t{i}: {tint};" for i, tint in enumerate(tints))


def plot_boundaries(patches: list[Patch], path: Path, title: str, line: str) -> None:
    """The same as a picture, in a fixed-width font; characters that the font lacks appear as escapes.

    Raises:
        ValueError: the text has more lines than a picture can hold.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.font_manager import findfont, get_font

    # Pixels; an advance that is no whole number would be rounded, and that adds up along a line.
    dpi, advance, height = 150, 13, 26
    lines = list(_lines(patches, set(get_font(findfont("DejaVu Sans Mono")).get_charmap())))
    if len(lines) > _LINES:
        raise ValueError(
            f"{path}: the text makes {len(lines):,} lines and a picture holds {_LINES:,}; show fewer bytes, "
            "or write a web page"
        )
    # In points; DejaVu Sans Mono advances by 0.60205 em.
    font: Any = {"family": "DejaVu Sans Mono", "size": advance / dpi * 72 / 0.60205}
    font |= {"va": "center_baseline", "parse_math": False}
    width_px, head_px, margin_px = _COLUMNS * advance + 60, 95, 30
    height_px = head_px + len(lines) * height + margin_px
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_px / dpi, height_px / dpi))
        left, bottom = margin_px / width_px, margin_px / height_px
        figure.text(left, 1 - 22 / height_px, title, va="top", weight="bold", size=12, parse_math=False)
        figure.text(left, 1 - 58 / height_px, line, va="top", color=GREY, size=9)
        box = (left, bottom, _COLUMNS * advance / width_px, len(lines) * height / height_px)
        axes = figure.add_axes(box)
        axes.set(xlim=(0, _COLUMNS), ylim=(len(lines), 0))
        axes.set_axis_off()
        for y, cells in enumerate(lines):
            begin = 0
            for number, run in groupby(cells, key=lambda cell: cell[2]):
                length = len(list(run))
                if number is not None:
                    tint = TINTS[number % len(TINTS)]
                    axes.broken_barh([(begin, length)], (y + 0.06, 0.88), facecolors=tint)
                begin += length
            for mark, colour in ((False, "black"), (True, GREY)):
                shown = "".join(char if is_mark == mark else " " for char, is_mark, _ in cells).rstrip()
                if shown:
                    axes.text(0, y + 0.5, shown, color=colour, **font)
        save(figure, path)


#: A character, whether it is a mark, and the number of its patch (None: the open tail).
_Cell = tuple[str, bool, int | None]


def _lines(patches: list[Patch], glyphs: set[int]) -> Iterator[list[_Cell]]:
    """The text as lines of at most `_COLUMNS` cells."""
    cells: list[_Cell] = []
    for number, patch in enumerate(patches):
        for piece in patch.pieces:
            if piece.text == "\n":
                yield cells
                cells = []
                continue
            for char in piece.text:
                known = ord(char) in glyphs
                for shown in char if known else escaped(char):
                    if len(cells) == _COLUMNS:
                        yield cells
                        cells = []
                    cells.append((shown, piece.mark or not known, number if patch.closed else None))
    if cells:
        yield cells
