"""The symbols of a text, and the bytes that describe the candidates of a position.

`spider.data.ngram.candidates` writes these bytes, and `spider.model.ngram_head` reads them.

A text is a sequence of symbols: its bytes, and one symbol each for the beginning and the end of a document.
In malformed text that contains these two values, documents begin or end there.

Shapes: N positions, O kinds of contexts in the index and behind them orders of document counts, P kinds of
document matches and the index match as the last, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Self

import numpy as np

from spider.config.model import NgramConfig
from spider.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor

#: Symbols for the beginning and the end of a document, two bytes that never occur in UTF-8.
BEGIN, END = 0xFE, 0xFF
#: Latest positions that are kept for each kind of document matches.
POSITIONS = 4


def symbols_of(vocabulary: Tokens) -> np.ndarray:
    """Return the symbol of each token, (V,) uint8. Special tokens except EOS have the symbol of BOS.

    Raises:
        ValueError: A token stands for several bytes.
    """
    if int(vocabulary.bytes_of.max()) > 1:
        raise ValueError("an n-gram index needs the byte vocabulary; this one has tokens of several bytes")
    symbols = np.full(vocabulary.size, BEGIN, np.uint8)
    for i in np.flatnonzero(vocabulary.bytes_of).tolist():
        symbols[i] = vocabulary.raw([i])[0]
    symbols[vocabulary.eos] = END
    return symbols


def ids_of(vocabulary: Tokens) -> np.ndarray:
    """Return the token id of each symbol, (256,) int64: the inverse of `symbols_of`."""
    symbols = symbols_of(vocabulary)
    ids = np.zeros(1 + END, np.int64)
    ids[symbols] = np.arange(len(symbols))
    ids[BEGIN] = vocabulary.bos
    ids[END] = vocabulary.eos
    return ids


@dataclass(frozen=True)
class Layout:
    """The layout of the bytes that describe the candidates of a position."""

    contexts: int
    """O"""
    match_orders: int
    """P + 1, with the index match as the last"""
    candidates: int = 16
    """C"""

    @cached_property
    def parts(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """First byte and shape of each part.

        ``number`` is the number of candidates, and ``symbols`` are the candidates. ``totals`` are q(T) and
        q(D) of each context; D of document counts is the number of candidates that followed. ``matches`` has
        the number and the distance of the matches of each kind. ``counts`` has q(count) of each candidate
        and context. ``bits`` has a bit for each position of a kind that was followed by the candidate.
        """
        shapes = {
            "number": (1,),
            "symbols": (self.candidates,),
            "totals": (self.contexts, 2),
            "matches": (self.match_orders, 2),
            "counts": (self.candidates, self.contexts),
            "bits": (self.candidates, self.match_orders),
        }
        offsets = accumulate((prod(shape) for shape in shapes.values()), initial=0)
        return {name: (at, shape) for (name, shape), at in zip(shapes.items(), offsets, strict=False)}

    @property
    def width(self) -> int:
        """Number of bytes of a position."""
        at, shape = self.parts["bits"]
        return at + prod(shape)

    def views(self, bytes_NW: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return views of the parts of N positions."""
        return tuple(
            bytes_NW[:, at : at + prod(shape)].reshape(-1, *shape) for at, shape in self.parts.values()
        )

    def split(self, bytes_W: Tensor) -> list[Tensor]:
        """Return the parts of a tensor with any leading axes."""
        return [bytes_W[..., at : at + prod(shape)].unflatten(-1, shape) for at, shape in self.parts.values()]

    @classmethod
    def of(cls, config: NgramConfig) -> Self:
        return cls(len(config.contexts) + len(config.counts), len(config.matches) + 1)
