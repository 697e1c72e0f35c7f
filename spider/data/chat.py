"""Conversations: encode a JSON list of messages to tokens (`spider.tokens.turns`).

A row of text holds ``[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]``,
with at most one system message before them. An assistant's content may be a list of parts, as in
``[{"type": "text", "text": "48 / 2 = "}, {"type": "python", "text": "48 / 2"}, {"type": "python_output",
"text": "24"}]``: a call of the calculator is learned, and its output is read only.

Malformed rows are errors. They are never skipped or repaired, because training data would then miss text, or
hold wrong text, unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from spider.tokens import Tokens
from spider.tokens.turns import ASSISTANT, OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START, ROLES, TURN

Part = tuple[str, str]
"""Type and text of a part of an answer."""
Message = tuple[str, str | list[Part]]
"""Role and content."""

#: The tokens around a part, by type.
_AROUND = {"text": (), "python": (PYTHON_START, PYTHON_END), "python_output": (OUTPUT_START, OUTPUT_END)}
#: The type of the part that begins with a token.
_BEGINS = {PYTHON_START: "python", PYTHON_END: "text", OUTPUT_START: "python_output", OUTPUT_END: "text"}


def parse(text: bytes | str) -> list[Message]:
    """Return the messages of a row; `ValueError` states what is wrong with them."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    if not isinstance(plain, list) or not plain:
        raise ValueError("must be a list of messages" + (", and is empty" if plain == [] else ""))
    messages = [message(number, entry) for number, entry in enumerate(plain)]
    turns = [role for role, _ in messages if role != "system"]
    if "system" in [role for role, _ in messages[1:]]:
        raise ValueError("a system message may only be the first one")
    if not turns or turns[0] != "user":
        raise ValueError("must begin with a user's message, after the system's if there is one")
    for role, following in pairwise(turns):
        if role == following:
            raise ValueError(f"two messages of the {role} in a row")
    if turns[-1] != "assistant":
        raise ValueError("must end with an assistant's message, because only answers are learned")
    return messages


def message(number: int, plain: Any) -> Message:
    """Return one message of a conversation; `ValueError` states what is wrong with it."""
    where = f"message {number}"
    if not isinstance(plain, dict) or not plain.keys() >= {"role", "content"}:
        raise ValueError(f"{where} must have a role and a content")
    role, content = plain["role"], plain["content"]
    if role not in [*ROLES]:  # a list compares what cannot be hashed
        raise ValueError(f"{where}: role must be one of {', '.join(ROLES)} (got {role!r})")
    if role == "assistant" and isinstance(content, list) and content:
        return role, _parts(where, content)
    if not isinstance(content, str) or not content:
        raise ValueError(
            f"{where}: content must be text, and not empty; only an assistant's may be a list of parts"
        )
    return role, content


def _parts(where: str, plain: list[Any]) -> list[Part]:
    """Return the parts of an answer; `ValueError` states what is wrong with them."""
    parts: list[Part] = []
    for number, entry in enumerate(plain):
        at = f"{where}, part {number}"
        if not isinstance(entry, dict) or not entry.keys() >= {"type", "text"}:
            raise ValueError(f"{at} must have a type and a text")
        kind, text = entry["type"], entry["text"]
        if kind not in [*_AROUND]:
            raise ValueError(f"{at}: type must be one of {', '.join(_AROUND)} (got {kind!r})")
        if not isinstance(text, str) or not text:
            raise ValueError(f"{at}: text must be a string, and not empty")
        if kind == "python_output" and (not parts or parts[-1][0] != "python"):
            raise ValueError(f"{at}: a python_output must follow a python part, whose output it is")
        parts.append((kind, text))
    return parts


def parts_of(ids: Iterable[int], tokens: Tokens) -> list[Part]:
    """Return the parts of an answer that a model wrote, without empty ones."""
    parts: list[tuple[str, list[int]]] = [("text", [])]
    for i in ids:
        if i in _BEGINS:
            parts.append((_BEGINS[i], []))
        else:
            parts[-1][1].append(i)
    return [(kind, tokens.decode(part)) for kind, part in parts if part]


def asked(question: str | None, answer: str | None) -> str:
    """Return the row of a conversation of one question and its answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps(messages, ensure_ascii=False)


def opening(messages: Sequence[Message], tokens: Tokens, *, answer: bool = False) -> np.ndarray:
    """Return the tokens of a conversation so far, after BOS; ``answer`` begins an assistant's answer."""
    ids: list[Sequence[int] | np.ndarray] = [[tokens.bos]]
    for role, content in messages:
        ids.append([ROLES[role]])
        for kind, text in [("text", content)] if isinstance(content, str) else content:
            encoded = tokens.encode(text.encode("utf-8", "replace"))[1:-1]
            ids += [_AROUND[kind][:1], encoded, _AROUND[kind][1:]]
        ids.append([TURN])
    if answer:
        ids.append([ASSISTANT])
    return np.concatenate([np.asarray(some, np.uint16) for some in ids])


def ids_of(text: bytes | str, tokens: Tokens) -> np.ndarray:
    """Return the tokens of a row, with BOS and EOS: (n,) uint16."""
    return np.concatenate([opening(parse(text), tokens), np.array([tokens.eos], np.uint16)])


def plain(text: bytes | str) -> bytes:
    """Return the contents of a conversation, without the roles and the types of parts."""
    contents = [
        content if isinstance(content, str) else "".join(part for _, part in content)
        for _, content in parse(text)
    ]
    return "\n".join(contents).encode("utf-8", "replace")
