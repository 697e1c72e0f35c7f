"""What is wrong with a configuration, in words: pydantic's findings as lines with the path of their key."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any


class ConfigError(ValueError):
    """What is wrong in the configuration, one problem a line, each with the path of its key."""


def nearest(name: str, known: list[str]) -> str:
    """A hint for a misspelt name, or the names there are."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f" (there are: {', '.join(sorted(known))})"


_PLAIN = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "missing": "is required",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "literal_error": "must be one of {expected}",
    "union_tag_invalid": "kind must be one of {expected_tags}",
    "union_tag_not_found": "needs a kind",
    "too_short": "must not be empty",
}


def explain(error: Any, siblings: Callable[[tuple[Any, ...]], list[str]]) -> str:
    """One of pydantic's errors as a line.

    Args:
        siblings: the keys that the block which holds an unknown one does know.
    """
    loc, kind, ctx = error["loc"], error["type"], error.get("ctx", {})
    where = key_path(loc)
    if kind == "extra_forbidden":
        return f"{where}: unknown key{nearest(str(loc[-1]), siblings(loc))}"
    if kind == "greater_than" and ctx.get("gt") == 0:
        text = "must be positive"
    elif kind == "value_error":
        return f"{where}: {ctx['error']}"
    else:
        text = _PLAIN.get(kind, error["msg"]).format(**ctx)
    got = error["input"]
    shown = "" if kind == "missing" or isinstance(got, (dict, list)) else f" (got {got!r})"
    return f"{where}: {text}{shown}"


def key_path(loc: tuple[Any, ...]) -> str:
    """``("runs", "demo", "stages", 1, "tokens")`` as ``runs.demo.stages[1].tokens``."""
    path = ""
    for i, part in enumerate(loc):
        if i and loc[i - 1] == "source":
            continue  # pydantic names the branch of the union, the file does not
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
