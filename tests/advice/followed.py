"""Provoke a message, to follow its advice.

The calls of `refused` and `advised`, and the tables `ADVICE`, name what they cover as a module and a phrase
of the message, with `{}` for a value. `test_listing.py` compares them with the source.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

#: A key that the advice leaves out.
OUT = object()


@contextlib.contextmanager
def refused(
    module: str, *phrases: str, error: Any = (ValueError, OSError)
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error whose message has all these phrases of a module."""
    with pytest.raises(error) as caught:
        yield caught
    advised(str(caught.value), module, *phrases)


def advised(text: str, module: str, *phrases: str) -> None:
    """Check that a text has these phrases of a module. Their values may be any text."""
    for phrase in phrases:
        check_said(text, phrase)


def check_said(text: str, phrase: str) -> None:
    pattern = ".*?".join(re.escape(part).replace(r"\ ", r"\s+") for part in re.split(r"\{\w*\}", phrase))
    assert re.search(pattern, text, re.DOTALL), f"{phrase!r} is not in {text!r}"


def changed(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the values at dotted paths replaced, or left `OUT`.

    A path that begins with a dot is one of the run ``r``.
    """
    made = copy.deepcopy(dict(plain))
    for path, value in changes.items():
        whole = f"runs.r{path}" if path.startswith(".") else path
        *parents, last = [int(step) if step.isdigit() else step for step in whole.split(".")]
        block: Any = made
        for step in parents:
            block = block[step] if isinstance(step, int) else block.setdefault(step, {})
        if value is OUT:
            block.pop(last)
        else:
            block[last] = copy.deepcopy(value)
    return made
