"""Each message with advice is followed by a test of this folder, so a new one needs a case."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from pathlib import Path

from .exceptions import ELSEWHERE, NOT_ADVICE
from .listing import ROOT, messages


def _followed() -> list[tuple[str, str]]:
    """Return the module and the phrase of each message that the tests of this folder name."""
    found = []
    here = sorted(Path(__file__).parent.glob("test_*.py"))
    for path in [*here, *ROOT.glob("tests/unit/**/test_*.py"), *ROOT.glob("extras/*/tests/test_*.py")]:
        if path not in here and "from tests.advice.followed" not in path.read_text():
            continue
        module = importlib.import_module(f"{__package__}.{path.stem}") if path in here else None
        for name, rows in getattr(module, "ADVICE", {}).items():
            found += [(name, row[0]) for row in rows]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("refused", "advised"):
                name, *phrases = [ast.literal_eval(one) for one in node.args if _is_text(one)]
                found += [(name, phrase) for phrase in phrases]
    return found


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_the_advice_of_every_message_is_followed():
    followed = set(_followed())
    listed = [(name, one) for lists in (ELSEWHERE, NOT_ADVICE) for name in lists for one in lists[name]]
    named = followed | set(listed)
    unknown = [
        str(message)
        for message in messages()
        if not any(name == message.module and phrase in message.text for name, phrase in named)
    ]
    assert not unknown, "no test follows the advice of these messages:\n" + "\n".join(unknown)


def test_every_phrase_names_one_message():
    named = [
        *set(_followed()),
        *((n, p) for lists in (ELSEWHERE, NOT_ADVICE) for n in lists for p in lists[n]),
    ]
    wrong = []
    for module, phrase in sorted(named):
        matches = [message for message in messages() if message.module == module and phrase in message.text]
        if len(matches) != 1:
            wrong.append(f"{module}: {phrase!r} is in {len(matches)} messages")
    assert not wrong, "\n".join(wrong)
    twice = [one for one, times in Counter(named).items() if times > 1]
    assert not twice, f"these are followed and listed as not followed: {twice}"
