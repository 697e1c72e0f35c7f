"""Small texts, and what is to be known of them, in plain Python: what the tests of memory compare with."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np

from spider.memory import table
from spider.memory.contexts import LONG
from spider.memory.count import count
from spider.memory.symbols import BEGIN, END

WORDS = ["the", "then", "there", "a", "an", "and", "cat", "cats", "sat", "on", "mat", "é", "in", "of", "12"]


def documents(number: int, seed: int, words: int = 30) -> list[bytes]:
    """Texts of few words, so that contexts come again; some are empty, some the same."""
    draw = random.Random(seed)
    made = [" ".join(draw.choices(WORDS, k=draw.randrange(words))).encode() for _ in range(number)]
    return [draw.choice(made) if draw.random() < 0.1 else text for text in made]


def symbols(texts: list[bytes]) -> np.ndarray:
    """Documents back to back, as memory reads them."""
    return np.frombuffer(b"".join(bytes([BEGIN]) + text + bytes([END]) for text in texts), np.uint8).copy()


def followers(texts: list[bytes], order: int) -> dict[bytes, Counter[int]]:
    """What follows each context of so many symbols inside a document, and how often."""
    return _followers(texts, lambda document, i: document[i - order : i] if i >= order else None)


def followers_of_words(texts: list[bytes], words: int) -> dict[tuple[bytes, ...], Counter[int]]:
    """The same of the contexts of so many words."""
    return _followers(texts, lambda document, i: words_before(document[:i], words))


def _followers(texts: list[bytes], context: Callable[[bytes, int], Any]) -> dict[Any, Counter[int]]:
    found: dict[Any, Counter[int]] = defaultdict(Counter)
    for text in texts:
        document = bytes([BEGIN]) + text + bytes([END])
        for i in range(1, len(document)):
            if (known := context(document, i)) is not None:
                found[known][document[i]] += 1
    return found


def words_before(before: bytes, words: int) -> tuple[bytes, ...] | None:
    """What a context of words knows of a document so far: the current word, and others before it."""
    stretches = re.findall(rb"[A-Za-z0-9_\x80-\xfd]+[^A-Za-z0-9_\x80-\xfd]*", before[1:])
    usable = list(takewhile(lambda stretch: len(stretch) <= LONG, reversed(stretches)))
    if len(usable) <= words:
        return None
    current = re.sub(rb"[ \t\n\r]+", b" ", usable[0]).lower()
    earlier = (re.match(rb"[A-Za-z0-9_\x80-\xfd]+", stretch) for stretch in usable[1 : words + 1])
    return current, *(word[0].lower() for word in earlier if word)


def q(number: int) -> int:
    return round(8 * float(np.log2(1 + number)))


def tables_of(texts: list[bytes], orders: list[int], rare: int, bits: int = 20) -> table.Tables:
    """Tables of a text; ``bits``: so many that hardly two of its contexts share a place in ``last``."""
    text = symbols(texts)
    built = [built_of([count(text, order)], order, 2 if order >= rare else 1)[:2] for order in orders]
    return table.Tables(orders, built, table.last_places(text, bits), text)


def built_of(
    runs: list[tuple[np.ndarray, np.ndarray]], kind: int, least: int, size: int = table.SLICE
) -> tuple[np.ndarray, np.ndarray, int]:
    """``first``, rows and the number of contexts left out of the table that runs make."""
    kept: list[np.ndarray] = [np.zeros((0, table.width(kind)), np.uint8)]
    opened = [lambda run=run: run for run in runs]
    first, left_out = table.build(opened, kind, least, lambda rows: kept.append(rows.copy()), size)
    return first, np.concatenate(kept), left_out
