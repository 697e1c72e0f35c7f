"""The symbols that memory is made of: bytes, and the beginning and the end of a document.

A text is a sequence of symbols, a byte each: its bytes, and for the beginning and the end of a document the
two values that UTF-8 never has. (Malformed text that holds them is read as if documents ended there.)
"""

from __future__ import annotations

import numpy as np

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
