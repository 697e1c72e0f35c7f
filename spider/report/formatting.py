"""Format numbers and text for people. The number of digits and the units are decided only here."""

from __future__ import annotations

import math
from functools import partial

from spider.evaluation.result import Table

plain = "{:g}".format
percent = "{:.3g}%".format
#: Bits per byte: ``1.842``.
bits = "{:.3f}".format
#: Mark of scores on decoded text, and its explanation.
DAGGER = "†"
LOSSY = (
    f"{DAGGER} of decoded text: the tokenizer does not keep newlines and runs of spaces. Compare this score "
    "only with others on the same decoded text."
)


def quantity(value: float, unit: str) -> str:
    """Return three digits and a decimal prefix: ``3.20 MB``."""
    prefixes = ["", "k", "M", "G", "T", "P", "E", "Z"]
    whole = float(value).is_integer() and abs(value) < 999.5
    while abs(value) >= 999.5 and prefixes[1:]:
        value /= 1000
        prefixes = prefixes[1:]
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
    """Return ``1.8e12``."""
    return f"{value:.3g}".replace("e+", "e")


def number(value: float) -> str:
    """Return a setting in its usual form: 8e-3 rather than 0.008."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,}" if isinstance(value, int) else plain(value)


def duration(seconds: float) -> str:
    """Return ``3.2 s``, ``1 min 01 s`` or ``2 h 03 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def times(count: int) -> str:
    """Return ``once`` or ``1,200 times``."""
    return "once" if count == 1 else f"{count:,} times"


def printable(text: str) -> str:
    """Replace characters that would move a terminal's cursor or change its colours."""
    return "".join(
        c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4)
    )


def titles(table: Table) -> list[str]:
    """Return the column titles of a table."""
    return [table.head, table.value, *table.columns()]


def cells(table: Table) -> list[list[str]]:
    """Return the rows of a table: label, value and further columns."""
    return [
        [row.label, str(row), *(str(row.columns.get(title, "")) for title in table.columns())]
        for row in table.rows
    ]


def markdown_table(titles: list[str], rows: list[list[str]], align: str = "---:") -> str:
    """Return a Markdown table. ``align`` is that of all columns but the first (default: right)."""
    lines = [titles, ["---", *[align] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
