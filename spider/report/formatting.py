"""Numbers and text as people read them: the one place that decides how many digits, and which unit."""

from __future__ import annotations

import math
from functools import partial

from spider.evaluation.result import Table

plain = "{:g}".format
percent = "{:.3g}%".format
#: Bits per byte: ``1.842``.
bits = "{:.3f}".format
#: Beside figures of a text that is not what was written, and what it says.
DAGGER = "†"
LOSSY = (
    f"{DAGGER} of the decoded text: the tokenizer does not keep newlines and runs of spaces, so this is no "
    "figure of the text as it was written, to be compared with others of the same decoded text alone."
)


def quantity(value: float, unit: str) -> str:
    """Three figures and a decimal prefix: ``3.20 MB``."""
    prefixes = ["", "k", "M", "G", "T", "P", "E", "Z"]
    whole = float(value).is_integer() and abs(value) < 999.5
    while abs(value) >= 999.5 and prefixes[1:]:
        value, prefixes = value / 1000, prefixes[1:]
    digits = 0 if whole else max(0, 2 - int(math.log10(max(abs(value), 1))))
    return f"{value:.{digits}f} {prefixes[0]}{unit}".strip()


def _short(units: dict[str, float], value: float) -> str:
    return next(
        (f"{value / size:g}{unit}" for unit, size in units.items() if abs(value) >= size), plain(value)
    )


#: A round number beside an axis: ``1.5 MB``, ``200k``.
bytes_label = partial(_short, {" TB": 1e12, " GB": 1e9, " MB": 1e6, " kB": 1e3})
count_label = partial(_short, {"B": 1e9, "M": 1e6, "k": 1e3})


def flops_label(value: float) -> str:
    """``1.8e12``."""
    return f"{value:.3g}".replace("e+", "e")


def number(value: float) -> str:
    """A setting as one writes it: 8e-3 rather than 0.008."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,}" if isinstance(value, int) else plain(value)


def duration(seconds: float) -> str:
    """``3.2 s``, ``1 min 01 s`` or ``2 h 03 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def cells(table: Table) -> list[list[str]]:
    """Return the rows of a table: label, value and further columns."""
    return [
        [row.label, str(row), *(str(row.columns.get(title, "")) for title in table.columns())]
        for row in table.rows
    ]


def titles(table: Table) -> str:
    """Return the titles of a table's columns, with ``|`` between them."""
    return "|".join([table.head, table.value, *table.columns()])


def printable(text: str) -> str:
    """Text without what would move a terminal's cursor or change its colours."""
    return "".join(
        c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4)
    )


def markdown_table(header: str, rows: list[list[str]]) -> str:
    """Titles, ``|`` between them, above rows of cells; all columns but the first are aligned to the right."""
    lines = [titles := header.split("|"), ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
