"""The block ``cleaning:`` of a dataset: which documents are left out before the text is encoded.

A filter is one line, ``COLUMN OPERATOR VALUE``. `spider.data.documents` applies it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from pydantic import Field, field_validator, model_validator

from spider.config.block import Block, must_be, wrong_key

#: Fewest words of a protected text that can be found.
SHORTEST = 8
#: Name in a filter for the size of the text in bytes.
SIZE = "bytes"
_COMPARE = ("<", "<=", ">", ">=")
_FORM = re.compile(r"(?P<column>\S.*?)\s+(?P<operator><=|>=|<|>|==|!=|~|!~|not in|in)\s+(?P<value>.+)")


class Filter(NamedTuple):
    """A condition that a document has to meet."""

    written: str
    column: str
    operator: str
    value: Any
    """A number for an order, text for a regular expression, else a list of texts."""


def parse_filter(written: str) -> Filter:
    """Return a filter from its line. Raise `ValueError` if it cannot be parsed."""
    found = _FORM.fullmatch(written.strip())
    if not found:
        raise ValueError(
            f"{written!r} is not COLUMN OPERATOR VALUE with spaces between them, such as `bytes >= 200`, "
            "`language in en, de`, `score >= 3` or `text !~ lorem ipsum`"
        )
    column, operator, value = found["column"], found["operator"], found["value"]
    if operator in _COMPARE or column == SIZE:
        return Filter(written, column, operator, _number(written, column, operator, value))
    if operator in ("~", "!~"):
        return Filter(written, column, operator, _pattern(written, _unquoted(value)))
    texts = value.strip("[]").split(",") if operator in ("in", "not in") else [value]
    return Filter(written, column, operator, [_unquoted(text.strip()) for text in texts])


def _number(written: str, column: str, operator: str, value: str) -> float:
    if operator not in (*_COMPARE, "==", "!="):
        raise ValueError(f"{written!r}: {column} is a size, which {operator} does not compare; use >= or <=")
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{written!r}: {operator} compares numbers, and {value!r} is none") from None


def _pattern(written: str, pattern: str) -> str:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        pc.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{written!r}: not a regular expression of RE2 ({error})") from None
    return pattern


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


_true_or_list = must_be("true, or a list of files and folders", lambda value: isinstance(value, bool | list))


class Cleaning(Block):
    """Documents that are left out before the text is encoded (docs/data.md)."""

    filters: list[str] = []
    """Conditions that a document has to meet: ``bytes >= 200``, ``language in en, de``, ``text !~ spam``."""
    exact: bool = False
    """Leave out a document whose text, but for white space, an earlier document has."""
    against: list[str] = []
    """Datasets whose documents count as earlier ones. They do not change."""
    near: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out a document if an earlier one has at least this share of its word 5-grams, such as 0.8 (null:
    keep it)."""
    decontaminate: Annotated[bool | list[str], _true_or_list] = False
    """true: leave out a document with text that the runs on this dataset are measured with: held-out text,
    and questions and right answers of tasks. A list names files and folders with more such text."""

    @field_validator("filters")
    @classmethod
    def _parses(cls, filters: list[str]) -> list[str]:
        for one in filters:
            parse_filter(one)
        return filters

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Cleaning:
        if self.against and not (self.exact or self.near):
            raise wrong_key("against", "needs exact: true, or near")
        return self

    @property
    def removes(self) -> bool:
        """Whether documents are compared with others, so that there is evidence of what was removed."""
        return bool(self.steps)

    @property
    def folders(self) -> list[str]:
        """Files and folders that ``decontaminate`` names."""
        return self.decontaminate if isinstance(self.decontaminate, list) else []

    @property
    def decontaminates(self) -> bool:
        """Whether documents are compared with text that models are measured with."""
        return self.decontaminate is not False

    @property
    def steps(self) -> list[str]:
        """Steps whose files have the pairs of a document and what it repeats."""
        compared = ["pairs"] if self.exact or self.near else []
        return compared + (["contaminated"] if self.decontaminates else [])
