"""Small texts, and what is to be known of them, in plain Python: what the tests of memory compare with."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np

from spider.memory import table
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
    found: dict[bytes, Counter[int]] = defaultdict(Counter)
    for text in texts:
        document = bytes([BEGIN]) + text + bytes([END])
        for i in range(order, len(document)):
            found[document[i - order : i]][document[i]] += 1
    return found


def q(number: int) -> int:
    return round(8 * float(np.log2(1 + number)))


def tables_of(texts: list[bytes], orders: list[int], rare: int, bits: int = 20) -> table.Tables:
    """Tables of a text; ``bits``: so many that hardly two of its contexts share a place in ``last``."""
    text = symbols(texts)
    built = [table.build([count(text, order)], order, 2 if order >= rare else 1)[:2] for order in orders]
    return table.Tables(orders, built, table.last_places(text, bits), text)
