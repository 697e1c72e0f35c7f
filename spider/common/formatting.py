"""Format numbers and text for people, and leave secrets out of what is written or sent.

The number of digits and the units are decided only here.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from typing import Any

log = logging.getLogger(__name__)

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


#: Variable of the environment: with the value `log`, a job writes all its output into its log.
OUTPUT = "SPIDER_OUTPUT"

#: Seconds between two lines. A loop that takes less logs none.
EVERY = 5.0


class Pace:
    """Log the part of a loop that is done, such as ``scored 3,000 of 10,000 ids``.

    Args:
        form: Format of the line, with ``{done}`` and ``{total}``.
    """

    def __init__(self, form: str, total: int) -> None:
        self.form = form
        self.total = total
        self.logged = time.monotonic()

    def __call__(self, done: int) -> None:
        """Log a line if the last one is `EVERY` seconds old."""
        now = time.monotonic()
        if now - self.logged >= EVERY:
            self.logged = now
            log.info(self.form.format(done=f"{done:,}", total=f"{self.total:,}"))


_SECRET_NAME = re.compile(
    r"passw|secret|credential|api_?key|access_?key|private_?key|authori[sz]ation|(?<!per )token$", re.I
)
_SECRET_TEXT = {
    r"(://)[^/\s:@]*:[^/\s@]*@": r"\1***@",
    r"(?i)\b(https?://)[^/\s@?#]+@": r"\1***@",  # a token, while the address of a database may name a user
    r"(?i)\b(bearer|basic)\s+[\w.~+/-]{8,}=*": r"\1 ***",
    r"\b(?:hf_|gh[pousr]_|github_pat_|sk-|glpat-|xox[bap]-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b": "***",
}
#: A setting in a text. Code has such assignments too.
_SECRET_SETTING = {r"(?i)((?:password|passwd|secret|api_?key|token)[=:]\s*)[^\s&'\",;]+": r"\1***"}


def redact(value: Any, *, settings: bool = True) -> Any:
    """Return ``value`` without secrets: values of secret keys, texts like tokens, secrets of the environment.

    With ``settings``, texts such as ``password=...`` lose their value too. Numbers like ``tokens: 5000`` and
    ``eos_token: 258`` stay, and so does a column ``by nats per token``.
    """
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= 8]
    patterns = _SECRET_TEXT | (_SECRET_SETTING if settings else {})
    secrets.sort(key=len, reverse=True)  # a longer secret may contain a shorter one

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: "***" if _is_secret(str(k), v) else clean(v) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v) for v in value]
        if not isinstance(value, str):
            return value
        for secret in secrets:
            value = value.replace(secret, "***")
        for pattern, replacement in patterns.items():
            value = re.sub(pattern, replacement, value)
        return value

    return clean(value)


def _is_secret(name: str, value: Any) -> bool:
    if not _SECRET_NAME.search(name) or value is None or isinstance(value, bool):
        return False
    return not (name.lower().endswith("token") and isinstance(value, (int, float)))
