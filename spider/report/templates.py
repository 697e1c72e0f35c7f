"""Pages from templates: one base, one sheet of styles, one way to show a number."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from spider.evaluation.artifact import Segment
from spider.report.formatting import bits, duration, number, printable, quantity
from spider.report.render import HERE, in_page

if TYPE_CHECKING:
    from jinja2 import Environment


#: How many tints of a cut text follow one another: the variables ``--t0``... of `page.css`.
TINTS = 4


def render(name: str, *, script: str = "", **values: Any) -> str:
    """A page that needs nothing else, as HTML.

    Args:
        script: file of a script, the only one that the page's security policy lets run.
    """
    code = (HERE / script).read_text(encoding="utf-8") if script else ""
    return _templates().get_template(name).render(
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(code),
        script_hash=base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
        **values,
    )  # fmt: skip


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, finalize=_shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {f.__name__: f for f in (quantity, duration, number, bits)}
    made.filters |= {"count": "{:,}".format, "bits4": "{:.4f}".format}
    made.filters |= {"code": _code, "draw": in_page, "tooltip": _tooltip}
    made.globals["TINTS"] = TINTS
    return made


def _tooltip(segment: Segment) -> str:
    size = f"{segment.size} byte{'s' if segment.size > 1 else ''}"
    if not segment.closed:
        return f"{size}, no boundary yet"
    sure = segment.probability
    return size + (f", boundary probability {sure:.2f}" if sure is not None else "")


def _shown(value: Any) -> Any:
    """Text without control characters, wherever it comes from; what is markup already stays as it is."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _code(text: str) -> Markup:
    """Text with commands between backticks."""
    pieces = printable(text).split("`")
    wraps = (Markup("{}"), Markup("<code>{}</code>"))
    return Markup("").join(wraps[i % 2].format(piece) for i, piece in enumerate(pieces))
