"""What is wrong with a configuration, in words: pydantic's findings as lines with the path of their key."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class ConfigError(ValueError):
    """What is wrong in the configuration, one problem a line, each with the path of its key."""


def nearest(name: str, known: Collection[str]) -> str:
    """A hint for a misspelt name, or the names there are."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f" (there are: {', '.join(sorted(known))})"


def none_such(kind: str, name: str, known: Collection[str]) -> str:
    return f"no {kind} {name!r}{nearest(name, known)}"


def wrong_keys(problems: dict[Any, str], others: Sequence[Any] = ()) -> ValidationError:
    """For a block's validator to raise: what is wrong with which of its keys, and pydantic's ``others``."""
    details: list[InitErrorDetails] = [*others]
    for key, text in problems.items():
        error = PydanticCustomError("value_error", "{error}", {"error": text})
        details.append({"type": error, "loc": (key,), "input": None})
    return ValidationError.from_exception_data("block", details)


#: By the kind of error, else by its first word.
_PLAIN = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "missing": "is required",
    "int": "must be a whole number",
    "float": "must be a number",
    "string_type": "must be text",
    "bool": "must be true or false",
    "model": "must be a mapping",
    "dict": "must be a mapping",
    "list": "must be a list",
    "literal": "must be one of {expected}",
    "union_tag_invalid": "kind must be one of {expected_tags}",
    "union_tag_not_found": "needs a kind",
    "too_short": "must not be empty",
}


def explain(error: Any) -> str:
    """One of pydantic's errors as a line."""
    where, kind, ctx = key_path(error["loc"]), error["type"], error.get("ctx", {})
    if kind == "value_error":
        return f"{where}: {ctx['error']}"
    text = _PLAIN.get(kind) or _PLAIN.get(kind.partition("_")[0]) or error["msg"]
    text = "must be positive" if ctx.get("gt") == 0 else text.format(**ctx)
    got = error["input"]
    shown = "" if kind == "missing" or isinstance(got, (dict, list)) else f" (got {got!r})"
    return f"{where}: {text}{shown}"


def key_path(loc: tuple[Any, ...]) -> str:
    """``("runs", "demo", "stages", 1, "tokens")`` as ``runs.demo.stages[1].tokens``."""
    path = ""
    for i, part in enumerate(loc):
        if part == "[key]" or (i and loc[i - 1] == "source"):
            continue  # pydantic names the branch of the union, and keys as such; the file does not
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
