"""Vocabularies: the bytes that a token stands for, special tokens, and the encoding of text.

    bytes           a token for each byte; the base class of the other vocabularies
    bpe             the same, and a token for each pair of bytes that was learned from a text
    sentencepiece   the same, and a token for each piece of a SentencePiece model
    stored          `tokenizer.json`, which lies in every folder that holds its tokens
    turns           special tokens of conversations

A model (``model.tokens``) and a dataset (`spider.data.shards.Shards.vocabulary`) have a vocabulary. So the
number of bytes of the targets is ``tokens.bytes_of[labels].sum()``, in any vocabulary. Only this package
knows which token ids are bytes and which are special.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from spider.tokens.bytes import BYTES

__all__ = ["BYTES", "IGNORED", "Tokens"]

#: A label that does not count.
IGNORED = -100


class Tokens(Protocol):
    """A vocabulary. A document is BOS, its tokens, EOS; token ids are stored as uint16."""

    @property
    def size(self) -> int:
        """Number of token ids, V: 0 to V - 1."""
        ...

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids of the tokens that stand for no text, by name."""
        ...

    @property
    def pad(self) -> int: ...

    @property
    def bos(self) -> int: ...

    @property
    def eos(self) -> int: ...

    @property
    def digest(self) -> str | None:
        """Digest of the merges or pieces; None for bytes."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether published tokens keep their text. Tokens that are encoded here always keep it."""
        ...

    @property
    def bytes_of(self) -> np.ndarray:
        """Bytes of text that each token stands for, (V,) uint8; 0 for a special token."""
        ...

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the token ids of a document, with BOS and EOS: (n,) uint16."""
        ...

    def raw(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that token ids stand for; special tokens stand for none."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the same as text, with U+FFFD for malformed UTF-8."""
        ...
