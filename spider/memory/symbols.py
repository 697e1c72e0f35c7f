"""The symbols that memory is made of: bytes, and the beginning and the end of a document.

A text is a sequence of symbols, a byte each: its bytes, and for the beginning and the end of a document the
two values that UTF-8 never has. (Malformed text that holds them is read as if documents ended there.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spider.memory.arrays import Reader
from spider.tokens import Tokens

#: Symbols that are no bytes of a text.
BEGIN, END = 0xFE, 0xFF


def symbols_of(alphabet: Tokens) -> np.ndarray:
    """The symbol of each id: (ids,) uint8; of a special one but EOS that of BOS, which no memory proposes.

    Raises:
        ValueError: ids that stand for several bytes.
    """
    if int(alphabet.bytes_of.max()) > 1:
        raise ValueError("a memory is of bytes; this alphabet has ids that stand for several")
    symbols = np.full(alphabet.size, BEGIN, np.uint8)
    for i in np.flatnonzero(alphabet.bytes_of).tolist():
        symbols[i] = alphabet.raw([i])[0]
    symbols[alphabet.eos] = END
    return symbols


def ids_of(alphabet: Tokens) -> np.ndarray:
    """The id of each symbol: (256,) int64, the inverse of `symbols_of`."""
    symbols = symbols_of(alphabet)
    ids = np.zeros(1 + END, np.int64)
    ids[symbols] = np.arange(len(symbols))
    ids[BEGIN], ids[END] = alphabet.bos, alphabet.eos
    return ids


class Stretch(NamedTuple):
    """Consecutive symbols of a text, with some of those that stand before them."""

    text: np.ndarray
    before: int
    """How many of these symbols stand before the stretch."""
    at: int
    """Number of the first symbol of the stretch in the whole text."""


def stretches(text: Path, back: int, size: int) -> Iterator[Stretch]:
    """Cut a stored text, from the first beginning of a document on, into stretches of ``size`` symbols.

    Each comes with the ``back`` symbols before it, or as many as there are. So the length of a document does
    not matter for what is held.
    """
    with Reader(text) as stored:
        first = _first_begin(stored, size)
        for at in range(first, stored.length, size):
            start = max(first, at - back)
            yield Stretch(stored.read(start, at + size), at - start, at)


def _first_begin(stored: Reader, size: int) -> int:
    """Return where the first document of a text begins, or the text's length."""
    for at in range(0, stored.length, size):
        begins = np.flatnonzero(stored.read(at, at + size) == BEGIN)
        if len(begins):
            return at + int(begins[0])
    return stored.length
