"""Conversations: encode a JSON list of messages to tokens (`spider.tokens.turns`).

A row of text holds ``[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]``,
with at most one system message before them. Malformed rows are errors. They are never skipped or repaired,
because training data would then miss text, or hold wrong text, unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from spider.tokens import Tokens
from spider.tokens.turns import ASSISTANT, ROLES, TURN

Message = tuple[str, str]
"""Role and content."""


def parse(text: bytes | str) -> list[Message]:
    """Return the messages of a row; `ValueError` states what is wrong with them."""
    try:
        plain = json.loads(text)
    except ValueError as error:
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
    if role not in ROLES:
        raise ValueError(f"{where}: role must be one of {', '.join(ROLES)} (got {role!r})")
    if not isinstance(content, str) or not content:
        raise ValueError(f"{where}: content must be text, and not empty")
    return role, content


def asked(question: str | None, answer: str | None) -> str:
    """Return the row of a conversation of one question and its answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps(messages, ensure_ascii=False)


def opening(messages: Sequence[Message], tokens: Tokens, *, answer: bool = False) -> np.ndarray:
    """Return the tokens of a conversation so far, after BOS; ``answer`` begins an assistant's answer."""
    ids = [np.array([tokens.bos], np.uint16)]
    for role, content in messages:
        text = tokens.encode(content.encode("utf-8", "replace"))[1:-1]
        ids += [np.array([ROLES[role]], np.uint16), text, np.array([TURN], np.uint16)]
    if answer:
        ids.append(np.array([ASSISTANT], np.uint16))
    return np.concatenate(ids)


def ids_of(text: bytes | str, tokens: Tokens) -> np.ndarray:
    """Return the tokens of a row, with BOS and EOS: (n,) uint16."""
    return np.concatenate([opening(parse(text), tokens), np.array([tokens.eos], np.uint16)])


def plain(text: bytes | str) -> bytes:
    """Return the contents of a conversation, without the roles."""
    return "\n".join(content for _, content in parse(text)).encode("utf-8", "replace")
