"""Show a text in segments: coloured in the terminal, as a web page, or as a picture.

Neighbouring segments have different tints, so a boundary is where the colour changes. The open end after the
last boundary is not tinted. Text that stands for a character without a glyph is grey. Without colours, in a
pipe or under ``NO_COLOR``, a ``|`` closes each segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from spider.evaluation.result import CutText
from spider.files import write_text
from spider.report.render import TINTS, colours, html, text, write_svg

#: Characters in a line of a picture, and the width and height of one in pixels.
_COLUMNS = 100
_CHAR_WIDTH = 8
_LINE_HEIGHT = 18


def tints() -> list[str]:
    """Return the background colours of segments with black text."""
    return [colours()[f"t{i}"] for i in range(TINTS)]


def show(cut: CutText, console: Console) -> None:
    """Print in colours, or with a ``|`` after each segment (a ``|`` of the text itself becomes ``\\x7c``).

    A terminal of sixteen colours has too few tints and counts as one without colours.
    """
    coloured = console.color_system in ("256", "truecolor") and not console.no_color
    shown = Text()
    backgrounds = tints()
    for number, segment in enumerate(cut.segments):
        if not coloured:
            plain = "".join(piece.text.replace("|", "\\x7c") for piece in segment.pieces)
            line = plain.removesuffix("\n")
            shown.append(line + "|" * segment.closed + plain[len(line) :])
            continue
        for piece in segment.pieces:
            colour = "#606060" if piece.mark else "black"
            tinted = segment.closed and piece.text != "\n"
            shown.append(piece.text, f"{colour} on {backgrounds[number % TINTS]}" if tinted else "")
    console.print(shown, soft_wrap=True, end="" if shown.plain.endswith("\n") else "\n")


def write_page(cut: CutText | None, path: Path, title: str) -> None:
    """Write a web page. The tooltip of a segment has its size and its boundary probability."""
    write_text(path, html("text.html.j2", title=title, cut=cut))


def write_picture(cut: CutText, path: Path, title: str) -> None:
    """Write an SVG file in a fixed-width font."""
    parts = [text(20, 28, title, 'font-size="16" font-weight="bold"')]
    parts.append(text(20, 50, cut.caption, 'fill="var(--soft)"'))
    tint = Markup('<rect x="{}" y="{}" width="{}" height="{}" fill="{}"/>')
    top = 66
    for cells in _lines(cut):
        x = 20
        for (number, mark), run in groupby(cells, key=lambda cell: (cell.segment, cell.mark)):
            content = "".join(cell.char for cell in run)
            width = cell_len(content) * _CHAR_WIDTH
            if number is not None:
                parts.append(tint.format(x, top, width, _LINE_HEIGHT - 2, tints()[number % TINTS]))
            # A fixed text length keeps letters on their tints in any font.
            style = f'textLength="{width}" lengthAdjust="spacingAndGlyphs" xml:space="preserve" class="mono"'
            if mark:
                style += ' fill="var(--soft)"'
            if content.strip():
                parts.append(text(x, top + 13, content, style))
            x += width
        top += _LINE_HEIGHT
    parts.append(Markup('<style>.mono { font: 13px "DejaVu Sans Mono", Menlo, monospace; }</style>'))
    write_svg(path, parts, 40 + _COLUMNS * _CHAR_WIDTH, top + 14, title)


class _Cell(NamedTuple):
    """A character of a picture."""

    char: str
    segment: int | None
    """Number of the segment; None for the open end."""
    mark: bool


def _lines(cut: CutText) -> Iterator[list[_Cell]]:
    """Yield the text as lines of at most `_COLUMNS` characters."""
    cells: list[_Cell] = []
    column = 0
    for number, segment in enumerate(cut.segments):
        for piece in segment.pieces:
            for char in piece.text:
                if char == "\n" or column + cell_len(char) > _COLUMNS:
                    yield cells
                    cells = []
                    column = 0
                if char != "\n":
                    cells.append(_Cell(char, number if segment.closed else None, piece.mark))
                    column += cell_len(char)
    if cells:
        yield cells
