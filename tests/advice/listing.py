"""List the messages of Spider that tell a person what to do, from its source.

A message is a string of the source or of a rule, with `{}` for each value in it. It gives advice where a
clause begins with a verb of `VERBS`: "...; lower seq_len". Docstrings and the help of commands are no
messages. Reading all files takes a second.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The verbs of advice.
VERBS = (
    "accept|add|ask|bring|change|check|choose|clone|commit|compare|copy|correct|delete|download|encode|end|"
    "evaluate|export|fill|free|give|halve|hold|install|keep|leave|limit|look|lower|make|move|name|omit|pass|"
    "point|push|put|raise|reinstall|remove|rename|repair|repeat|replace|restore|run|save|send|set|shorten|"
    "start|stop|switch|take|train|try|unset|update|use|wait|write"
)
CLAUSE = re.compile(
    r"(?:^|[;:.,(]\s+|\n\s*|\b(?:or|and|then)\s+)(?:(?:do not|never|then|first|please|either)\s+)?"
    rf"(?:{VERBS})\b(?![-_=(:])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Message:
    """A message with advice: where it is, and its text."""

    module: str
    """Path of its file below `spider`, such as `config/run.py`. For a rule's: `rules/common.smk`; for
    an extra's `lab/fit.py`."""
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.text!r}"


@cache
def messages() -> tuple[Message, ...]:
    """Return all messages with advice, each text of a module once."""
    found: dict[tuple[str, str], Message] = {}
    for module, line, text in _strings():
        if len(text.split()) > 1 and CLAUSE.search(text):
            found.setdefault((module, text), Message(module, line, text))
    return tuple(found.values())


def _strings() -> Iterator[tuple[str, int, str]]:
    folders = {ROOT / "spider": ""} | {one: f"{one.parent.name}/" for one in ROOT.glob("extras/*/spider_*/")}
    for folder, before in folders.items():
        for path in sorted(folder.rglob("*.py")):
            module = f"{before}{path.relative_to(folder)}"
            yield from ((module, *found) for found in _in_tree(ast.parse(path.read_text())))
    for path in [
        *sorted((ROOT / "rules").glob("*.smk")),
        *sorted(ROOT.glob("extras/*/spider_*/rules/*.smk")),
    ]:
        yield from ((f"rules/{path.name}", *found) for found in _in_rules(path.read_text()))


def _in_tree(node: ast.AST) -> Iterator[tuple[int, str]]:
    text = _text(node)
    if text is not None:
        yield node.lineno, text  # type: ignore[attr-defined]
    documented = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_help = isinstance(node, ast.keyword) and node.arg == "help"
    if not documented and not is_help and not isinstance(node, ast.BinOp if text else ()):
        for child in ast.iter_child_nodes(node):
            # The constants of an f-string are parts of its text.
            if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
                yield from _in_tree(child)


def _text(node: ast.AST) -> str | None:
    """Return the text of a string or of a sum of strings, with `{}` for each value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = _text(node.left), _text(node.right)
        return None if sides == (None, None) else "".join("{}" if side is None else side for side in sides)
    return None


def _in_rules(source: str) -> Iterator[tuple[int, str]]:
    """Yield the strings of a Snakefile; strings that stand one after another are one.

    A string that begins a line of code is documentation.
    """
    before = tokenize.NEWLINE
    together: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NL, tokenize.COMMENT):
            continue
        if token.type == tokenize.STRING and before not in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        ):
            together.append(token)
            continue
        if together:
            parsed = ast.parse(f"({' '.join(one.string for one in together)})", mode="eval").body
            yield together[0].start[0], _text(parsed) or ""
        together, before = [], token.type
