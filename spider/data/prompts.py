"""The prompts of a split's conversations, each with its reference answer.

A prompt is a conversation up to its last answer: BOS, the earlier turns, and the token that begins the
answer. The reference is the text of that answer.
"""

from __future__ import annotations

import numpy as np

from spider.data.shards import Shards
from spider.tokens.turns import ASSISTANT


class Prompts:
    """The conversations of one split, in the order of its shards.

    Raises:
        ValueError: the split does not hold a conversation.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._begins: list[tuple[int, int]] = []
        for file, tokens in enumerate(shards.maps):
            begins = np.append(shards.begins(file), len(tokens)) + int(shards.borders[file])
            self._begins += zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
        if not self._begins:
            raise ValueError(f"{shards.name}: does not hold a conversation; encode some, or hold more out")

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, number: int) -> tuple[np.ndarray, str]:
        """Return a prompt (n,) uint16 and its reference answer.

        Raises:
            ValueError: the document is not a conversation.
        """
        begin, end = self._begins[number]
        ids = self._shards.read(begin, end - begin)
        answers = np.flatnonzero(ids == ASSISTANT)
        if not len(answers):
            where = "{}, token {}".format(*self._shards.locate(begin))
            raise ValueError(f"{where}: this document has no answer; encode the data with format: chat")
        first = int(answers[-1]) + 1
        return ids[:first], self._shards.vocabulary.decode(ids[first:])
