"""Numbers and text as people read them: the one place that decides how many digits, and which unit."""

from __future__ import annotations

import math


def plain(value: float) -> str:
    return f"{value:g}"


def bits(value: float) -> str:
    """Bits per byte: ``1.842``."""
    return f"{value:.3f}"


def percent(value: float) -> str:
    return f"{value:.3g}%"


def quantity(value: float, unit: str) -> str:
    """Three figures and a decimal prefix: ``3.20 MB``."""
    prefixes = ["", "k", "M", "G", "T", "P", "E", "Z"]
    whole = float(value).is_integer() and abs(value) < 999.5
    while abs(value) >= 999.5 and prefixes[1:]:
        value, prefixes = value / 1000, prefixes[1:]
    digits = 0 if whole else max(0, 2 - int(math.log10(max(abs(value), 1))))
    return f"{value:.{digits}f} {prefixes[0]}{unit}".strip()


def _short(value: float, units: tuple[tuple[float, str], ...]) -> str:
    return next((f"{value / size:g}{unit}" for size, unit in units if abs(value) >= size), f"{value:g}")


def bytes_label(value: float) -> str:
    """A round number of bytes beside an axis: ``1.5 MB``."""
    return _short(value, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB")))


def count_label(value: float) -> str:
    """A round number beside an axis: ``200k``, ``1.5M``."""
    return _short(value, ((1e9, "B"), (1e6, "M"), (1e3, "k")))


def flops_label(value: float) -> str:
    """``1.8e12``."""
    return f"{value:.3g}".replace("e+", "e")


def number(value: float) -> str:
    """A setting as one writes it: 8e-3 rather than 0.008."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def duration(seconds: float) -> str:
    """``3.2 s``, ``1 min 01 s`` or ``2 h 03 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def printable(text: str) -> str:
    """Text without what would move a terminal's cursor or change its colours."""
    shown = (c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4))
    return "".join(shown)


def markdown_table(header: str, rows: list[list[str]]) -> str:
    """Titles, ``|`` between them, above rows of cells; all columns but the first are aligned to the right."""
    lines = [titles := header.split("|"), ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
