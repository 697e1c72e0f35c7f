"""Vocabularies: what an id stands for, which ids are special, how text becomes ids. Nothing else knows.

    bytes           every byte its own id
    bpe             the same, and an id for each of the pairs of bytes that were learned from a text
    sentencepiece   the same, and an id for each of the pieces of text of a model that others have trained
    stored          the file in which a learned one lies beside what is written in it

Ask whatever has an vocabulary: a model (``model.tokens``), a dataset
(`spider.data.shards.Shards.vocabulary`). So "targets that are bytes" is ``tokens.bytes_of[labels].sum()``, in
any vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from spider.tokens.bytes import BYTES

__all__ = ["BYTES", "IGNORED", "Tokens"]

#: A label that does not count.
IGNORED = -100


class Tokens(Protocol):
    """An vocabulary. A document is BOS, its ids, EOS; ids are stored as uint16."""

    @property
    def size(self) -> int:
        """V: ids are 0 to V - 1."""
        ...

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids that stand for no text, by name."""
        ...

    @property
    def pad(self) -> int: ...

    @property
    def bos(self) -> int: ...

    @property
    def eos(self) -> int: ...

    @property
    def digest(self) -> str | None:
        """Of what was learned; None: nothing, these are bytes."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether what is written in it elsewhere reads as it was; what is encoded here always does."""
        ...

    @property
    def bytes_of(self) -> np.ndarray:
        """(V,) uint8: how many bytes of text each id stands for, 0 for a special one."""
        ...

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of a document, BOS and EOS around it: (n,) uint16."""
        ...

    def raw(self, ids: Iterable[int]) -> bytes:
        """The bytes that ids stand for, in order; special ids stand for none."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The same as text, malformed UTF-8 as U+FFFD."""
        ...
