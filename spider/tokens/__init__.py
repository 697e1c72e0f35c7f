"""Alphabets: what an id stands for. Nothing else in Spider knows.

Tokens   what there is to know of an alphabet
BYTES    the bytes themselves (`spider.tokens.bytes`)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from spider.tokens.bytes import BYTES

__all__ = ["BYTES", "Tokens"]


class Tokens(Protocol):
    """An alphabet of ``size`` ids. A document is BOS, its ids, EOS; ids are stored as uint16."""

    size: int
    specials: Mapping[str, int]
    """Ids that stand for no text, by name."""
    pad: int
    bos: int
    eos: int
    bytes_of: np.ndarray
    """(V,) uint8: how many bytes of text each id stands for, 0 for a special one."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of a document, BOS and EOS around it: (n,) uint16."""
        ...

    def raw(self, ids: Iterable[int]) -> bytes:
        """The bytes that ids stand for, in order; special ids stand for none."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The same as text, malformed UTF-8 as U+FFFD."""
        ...
