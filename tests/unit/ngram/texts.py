"""Small texts, and reference counts in plain Python for the tests of the n-gram index."""

from __future__ import annotations

import random
import re
import tempfile
from collections import Counter, defaultdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from spider.config.model import name_of
from spider.data.ngram import table
from spider.data.ngram.contexts import MAX_LINE, MAX_WORD
from spider.data.ngram.layout import BEGIN, END
from spider.data.ngram.table import count, runs_of

WORDS = ["the", "then", "there", "a", "an", "and", "cat", "cats", "sat", "on", "mat", "é", "in", "of", "12"]


def documents(number: int, seed: int, words: int = 30) -> list[bytes]:
    """Make texts of few words, so that contexts repeat. Some are empty, some equal."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randrange(words))).encode() for _ in range(number)]
    return [rng.choice(texts) if rng.random() < 0.1 else text for text in texts]


def symbols(texts: list[bytes]) -> np.ndarray:
    """Return the symbols of documents back to back, as the n-gram index reads them."""
    return np.frombuffer(b"".join(bytes([BEGIN]) + text + bytes([END]) for text in texts), np.uint8).copy()


def followers(texts: list[bytes], order: int) -> dict[bytes, Counter[int]]:
    """Count what follows each context of so many symbols inside a document."""

    found: dict[bytes, Counter[int]] = defaultdict(Counter)
    for text in texts:
        document = bytes([BEGIN]) + text + bytes([END])
        for i in range(order, len(document)):
            found[document[i - order : i]][document[i]] += 1
    return found


def words_before(before: bytes, words: int) -> tuple[bytes, ...] | None:
    """Return the context of words after a document so far: the current word, then those before it."""
    stretches = re.findall(rb"[A-Za-z0-9_\x80-\xfd]+[^A-Za-z0-9_\x80-\xfd]*", before[1:])
    usable = list(takewhile(lambda stretch: len(stretch) <= MAX_WORD, reversed(stretches)))
    if len(usable) <= words:
        return None
    current = re.sub(rb"[ \t\n\r]+", b" ", usable[0]).lower()
    earlier = (re.match(rb"[A-Za-z0-9_\x80-\xfd]+", stretch) for stretch in usable[1 : words + 1])
    return current, *(word[0].lower() for word in earlier if word)


def context_before(before: bytes, name: int | str) -> Any:
    """Return the context of this kind after a document so far, which begins with `BEGIN`; None for none."""
    i = len(before)
    name = str(name)
    if name.isdecimal():
        return before[i - int(name) :] if i >= int(name) else None
    if name.startswith("words"):
        return words_before(before, int(name.removeprefix("words")))
    *_, above, line = [None, None, *(before[1:] + b"|").split(b"\n")]
    line = line[:-1]
    if len(line) > MAX_LINE:
        return None
    column = len(line)
    above = b"" if above is None or len(above) + 1 > MAX_LINE else above
    upper = (above + b"\n\n")[column : column + 2] if column <= len(above) else b"\n\n"
    if name == "column":
        return column, upper[:1], before[-1:]
    last_two = (b"\n" + before)[-2:] if i == 1 else before[-2:]
    if name == "above":
        return upper, last_two
    text = line.lstrip(b" ")
    return len(line) - len(text), text[:1], last_two


def q(number: int) -> int:
    return round(8 * float(np.log2(1 + number)))


def tables_of(texts: list[bytes], orders: list[int], rare: int, bits: int = 20) -> table.Tables:
    """Build the tables of a text; with so many ``bits``, contexts hardly ever share an entry of ``last``."""
    text = symbols(texts)
    built = [built_of([count(text, order)], order, 2 if order >= rare else 1)[:2] for order in orders]
    return table.Tables(orders, built, last_of(text, bits), text)


def last_of(text: np.ndarray, bits: int, **sizes: int) -> np.ndarray:
    """Return ``last`` of a text, built from the text on disk."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "text.npy", text)
        return np.concatenate(list(table.last_positions(Path(folder) / "text.npy", bits, **sizes)))


def built_of(
    runs: list[tuple[np.ndarray, np.ndarray]], kind: int, least: int, **sizes: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Build a table from runs; return ``first``, the rows and the number of contexts that were left out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (keys, counts) in enumerate(runs):
            np.save(folder / f"{name_of(kind)}.{number:03d}.keys.npy", keys)
            np.save(folder / f"{name_of(kind)}.{number:03d}.counts.npy", counts)
        contexts, left_out = table.build(runs_of(folder, kind), kind, least, folder, **sizes)
        first, rows = (np.load(folder / f"{name_of(kind)}.{array}.npy") for array in ("first", "rows"))
        assert contexts == len(rows) == first[-1]
        return first, rows, left_out
