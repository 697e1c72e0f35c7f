"""The symbols of a text, and the bytes that describe a place: `spider.ngram.candidates` writes these, and
`spider.model.ngram_head` reads them.

A text is a sequence of symbols: its bytes, and one symbol each for the beginning and the end of a document.
Malformed text that holds these two values reads as if documents ended there.

Shapes: N places, O kinds of contexts, P orders of matches and the match as the last, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Self

import numpy as np

from spider.config.ngram import NgramConfig
from spider.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor

#: Symbols for the beginning and the end of a document; UTF-8 has no such bytes.
BEGIN, END = 0xFE, 0xFF


def symbols_of(vocabulary: Tokens) -> np.ndarray:
    """Return the symbol of each id: (ids,) uint8. Special ids except EOS have the symbol of BOS.

    Raises:
        ValueError: an id stands for several bytes.
    """
    if int(vocabulary.bytes_of.max()) > 1:
        raise ValueError("an n-gram index is of bytes; this vocabulary has ids that stand for several")
    symbols = np.full(vocabulary.size, BEGIN, np.uint8)
    for i in np.flatnonzero(vocabulary.bytes_of).tolist():
        symbols[i] = vocabulary.raw([i])[0]
    symbols[vocabulary.eos] = END
    return symbols


def ids_of(vocabulary: Tokens) -> np.ndarray:
    """Return the id of each symbol: (256,) int64, the inverse of `symbols_of`."""
    symbols = symbols_of(vocabulary)
    ids = np.zeros(1 + END, np.int64)
    ids[symbols] = np.arange(len(symbols))
    ids[BEGIN], ids[END] = vocabulary.bos, vocabulary.eos
    return ids


#: Number of latest places that an order of matches keeps.
PLACES = 4


@dataclass(frozen=True)
class Layout:
    """The layout of the bytes of a place's candidate."""

    contexts: int
    """O"""
    match_orders: int
    """P + 1, with the match as the last"""
    candidates: int
    """C"""

    @cached_property
    def parts(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return the first byte and the shape of each part.

        ``there`` is the number of candidates, ``symbols`` are the candidates, and ``totals`` are q(T) and
        q(D) of each context. ``seen`` has the number and the distance of the matches of each order, and
        ``counts`` has q(count) of each candidate and context. ``places`` has a bit for each place of an order
        that was followed by the candidate.
        """
        shapes = {
            "there": (1,),
            "symbols": (self.candidates,),
            "totals": (self.contexts, 2),
            "seen": (self.match_orders, 2),
            "counts": (self.candidates, self.contexts),
            "places": (self.candidates, self.match_orders),
        }
        offsets = accumulate((prod(shape) for shape in shapes.values()), initial=0)
        return {name: (at, shape) for (name, shape), at in zip(shapes.items(), offsets, strict=False)}

    @property
    def width(self) -> int:
        """Return the number of bytes of a place."""
        at, shape = self.parts["places"]
        return at + prod(shape)

    def views(self, bytes_NW: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the parts of N places."""
        return tuple(
            bytes_NW[:, at : at + prod(shape)].reshape(-1, *shape) for at, shape in self.parts.values()
        )

    def split(self, bytes_W: Tensor) -> list[Tensor]:
        """Return the parts of a tensor with any leading axes."""
        return [bytes_W[..., at : at + prod(shape)].unflatten(-1, shape) for at, shape in self.parts.values()]

    @classmethod
    def of(cls, config: NgramConfig) -> Self:
        return cls(len(config.contexts), len(config.match_orders) + 1, config.candidates)
