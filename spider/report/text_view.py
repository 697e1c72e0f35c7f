"""A text as a model cuts it, for the eye: coloured in the terminal, as a web page, as a picture.

Neighbours have different tints, so that a boundary is where the colour changes; the open tail behind the last
boundary has none. What stands for something without a glyph is grey. Where there is no colour, in a pipe or
under ``NO_COLOR``, a ``|`` closes each segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from spider.evaluation.result import CutText
from spider.files import write_text
from spider.report.render import TINTS, colours, html, text, write_svg

#: Of a picture: characters a line, and pixels of one.
_COLUMNS, _ADVANCE, _LINE = 100, 8, 18


def tints() -> list[str]:
    """Backgrounds under black text."""
    return [colours()[f"t{i}"] for i in range(TINTS)]


def show(cut: CutText, console: Console) -> None:
    """Print in colours, or with a ``|`` where a segment closes (then one of the text itself is ``\\x7c``).

    Sixteen colours are too few for tints that differ, so they count as none.
    """
    coloured = console.color_system in ("256", "truecolor") and not console.no_color
    shown, backgrounds = Text(), tints()
    for number, segment in enumerate(cut.segments):
        if not coloured:
            plain = "".join(piece.text.replace("|", "\\x7c") for piece in segment.pieces)
            line, newline = (plain[:-1], "\n") if plain.endswith("\n") else (plain, "")
            shown.append(line + "|" * segment.closed + newline)
            continue
        for piece in segment.pieces:
            colour = "#606060" if piece.mark else "black"
            tinted = segment.closed and piece.text != "\n"
            shown.append(piece.text, f"{colour} on {backgrounds[number % TINTS]}" if tinted else "")
    console.print(shown, soft_wrap=True, end="" if shown.plain.endswith("\n") else "\n")


def write_page(cut: CutText | None, path: Path, title: str) -> None:
    """A web page; length and boundary probability of a segment are its tooltip."""
    write_text(path, html("text.html.j2", title=title, cut=cut))


def write_picture(cut: CutText, path: Path, title: str) -> None:
    """The same as an SVG file, in a fixed-width font."""
    parts = [text(20, 28, title, 'font-size="16" font-weight="bold"')]
    parts.append(text(20, 50, cut.caption, 'fill="var(--soft)"'))
    tint, bottom = Markup('<rect x="{}" y="{}" width="{}" height="{}" fill="{}"/>'), 66
    for cells in _lines(cut):
        x = 20
        for (number, mark), run in groupby(cells, key=lambda cell: cell[1:]):
            said = "".join(char for char, *_ in run)
            width = cell_len(said) * _ADVANCE
            if number is not None:
                parts.append(tint.format(x, bottom, width, _LINE - 2, tints()[number % TINTS]))
            # A given length keeps letters on their tints whatever the font.
            style = f'textLength="{width}" lengthAdjust="spacingAndGlyphs" xml:space="preserve" class="mono"'
            if said.strip():
                parts.append(text(x, bottom + 13, said, style + (' fill="var(--soft)"' if mark else "")))
            x += width
        bottom += _LINE
    parts.append(Markup('<style>.mono { font: 13px "DejaVu Sans Mono", Menlo, monospace; }</style>'))
    write_svg(path, parts, 40 + _COLUMNS * _ADVANCE, bottom + 14, title)


def _lines(cut: CutText) -> Iterator[list[tuple[str, int | None, bool]]]:
    """The text as lines of at most `_COLUMNS` cells: a character, the number of its segment (None: the open
    tail), and whether it is a mark."""
    cells: list[tuple[str, int | None, bool]] = []
    column = 0
    for number, segment in enumerate(cut.segments):
        for piece in segment.pieces:
            for char in piece.text:
                if char == "\n" or column + cell_len(char) > _COLUMNS:
                    yield cells
                    cells, column = [], 0
                if char != "\n":
                    cells.append((char, number if segment.closed else None, piece.mark))
                    column += cell_len(char)
    if cells:
        yield cells
