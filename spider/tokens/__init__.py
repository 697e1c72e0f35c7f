"""Vocabularies: the bytes that a token stands for, special tokens, and the encoding of text.

    bytes           the base class of vocabularies, and the one with a token for each byte
    bpe             the same, and a token for each pair of bytes that was learned from a text
    sentencepiece   the same, and a token for each piece of a SentencePiece model
    stored          `tokenizer.json`, which lies in every folder that holds its tokens
    turns           special tokens of conversations

A model (``model.tokens``) and a dataset (`spider.data.shards.Shards.vocabulary`) have a vocabulary. So the
number of bytes of the targets is ``tokens.bytes_of[labels].sum()``, in any vocabulary. Only this package
defines which token ids are bytes and which are special.
"""

from __future__ import annotations

from spider.tokens.bytes import BYTES, Tokens

__all__ = ["BYTES", "IGNORED", "Tokens"]

#: A label that does not count.
IGNORED = -100
