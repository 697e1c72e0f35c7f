"""Conversations: a list of messages in JSON to the ids of `spider.tokens.turns`.

A row of text holds ``[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]``,
one message of a system before them at most. What is malformed is refused, never mended: a row that was
dropped quietly would be a hole in the data, and one that was guessed at a lie.
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
"""Its role and its content."""


def parse(text: bytes | str) -> list[Message]:
    """The messages of a row; `ValueError` says what is wrong with them."""
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    if not isinstance(plain, list) or not plain:
        raise ValueError("must be a list of messages" + (", and is empty" if plain == [] else ""))
    messages = [message(number, one) for number, one in enumerate(plain)]
    turns = [role for role, _ in messages if role != "system"]
    if "system" in [role for role, _ in messages[1:]]:
        raise ValueError("a system speaks after the first message; it may only begin")
    if not turns or turns[0] != "user":
        raise ValueError("must begin with a user's message, after the system's if there is one")
    for one, other in pairwise(turns):
        if one == other:
            raise ValueError(f"the {one} speaks twice in a row")
    if turns[-1] != "assistant":
        raise ValueError("must end with an assistant's message, there is nothing to learn from a question")
    return messages


def message(number: int, plain: Any) -> Message:
    """Of a conversation that one; `ValueError` says what is wrong with it."""
    where = f"message {number}"
    if not isinstance(plain, dict) or not plain.keys() >= {"role", "content"}:
        raise ValueError(f"{where} must have a role and a content")
    role, content = plain["role"], plain["content"]
    if role not in ROLES:
        raise ValueError(f"{where}: role must be one of {', '.join(ROLES)} (got {role!r})")
    if not isinstance(content, str) or not content:
        raise ValueError(f"{where}: content must be text, and not empty")
    return role, content


def opening(messages: Sequence[Message], tokens: Tokens, *, answer: bool = False) -> np.ndarray:
    """Ids of what was said so far, after BOS; with ``answer``, up to where an assistant begins to speak."""
    ids = [np.array([tokens.bos], np.uint16)]
    for role, content in messages:
        said = tokens.encode(content.encode("utf-8", "replace"))[1:-1]
        ids += [np.array([ROLES[role]], np.uint16), said, np.array([TURN], np.uint16)]
    if answer:
        ids.append(np.array([ASSISTANT], np.uint16))
    return np.concatenate(ids)


def ids_of(text: bytes | str, tokens: Tokens) -> np.ndarray:
    """Ids of a row, BOS and EOS around it: (n,) uint16."""
    return np.concatenate([opening(parse(text), tokens), np.array([tokens.eos], np.uint16)])


def plain(text: bytes | str) -> bytes:
    """What is said in a conversation, without who says it."""
    return "\n".join(content for _, content in parse(text)).encode("utf-8", "replace")
