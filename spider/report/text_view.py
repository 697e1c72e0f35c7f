"""Show a text in segments: coloured in the terminal, or as a web page.

Neighbouring segments have different tints, so a boundary is where the colour changes. The open end after the
last boundary is not tinted. Text that stands for a character without a glyph is grey. Without colours, in a
pipe or under ``NO_COLOR``, a ``|`` closes each segment.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from spider.evaluation.result import CutText
from spider.files import write_text
from spider.report.render import TINTS, colours, html


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
