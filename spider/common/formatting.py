"""Format numbers and text for people. The number of digits and the units are decided only here."""

from __future__ import annotations

import math

#: Bits per byte: ``1.842``.
bits = "{:.3f}".format


def quantity(value: float | None, unit: str) -> str:
    """Return three digits and a decimal prefix: ``3.20 MB``. An unknown value is ``?``."""
    if value is None:
        return "?"
    prefixes = ["", "k", "M", "G", "T", "P", "E", "Z"]
    whole = float(value).is_integer() and abs(value) < 999.5
    while abs(value) >= 999.5 and prefixes[1:]:
        value /= 1000
        prefixes = prefixes[1:]
    digits = 0 if whole else max(0, 2 - int(math.log10(max(abs(value), 1))))
    return f"{value:.{digits}f} {prefixes[0]}{unit}".strip()


def number(value: float) -> str:
    """Return a setting in its usual form: 8e-3 rather than 0.008."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


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
