"""Byte pair encoding: the byte vocabulary, and a token for each merge of two tokens.

    0 .. 255     the bytes                  (`spider.tokens.bytes`)
    256 .. 271   special tokens
    272 ..       merges, in the order of learning

A merge joins two earlier tokens of text and stands for the bytes of both. So every byte string can be
encoded, the tokens of a text stand for exactly its bytes, and a vocabulary without merges is that of bytes.

A text is first split into words (`PATTERN`). In each word the earliest learned pair is merged, repeatedly
(Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016). tiktoken
does that. It accepts only text, so bytes that are not UTF-8 are encoded here, as themselves. It is given no
special tokens, so no text can produce one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from spider.common.files import digest
from spider.tokens.bytes import BYTES, MAX_TOKEN_BYTES, Tokens

if TYPE_CHECKING:
    from tiktoken import Encoding

#: Split of a text into words, after GPT-4's pattern: contractions; letters, with one other character before
#: them; digits in pairs; other characters; whitespace. Runs of whitespace are bounded, because the libraries'
#: regular expressions fail on a million of them.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s{0,255}[\r\n]|\s{1,255}(?!\S)|\s{1,255}"
)

_BYTE_TOKENS = int(np.count_nonzero(BYTES.bytes_of))
NOT_UTF8 = re.compile("([\udc80-\udcff]+)")


class BpeTokens(Tokens):
    """The byte vocabulary and merges.

    Args:
        merges: The two token ids of each merge.
        pattern: Regular expression of words.

    Raises:
        ValueError: A merge is of special or later tokens, has more than `MAX_TOKEN_BYTES` bytes, or has the
            same bytes as another token; or there are more tokens than shards hold.
    """

    def __init__(self, merges: Sequence[tuple[int, int]], pattern: str = PATTERN) -> None:
        self.pattern = pattern
        texts = [BYTES.raw([i]) for i in range(BYTES.size)]
        known = set(texts)
        for number, (left, right) in enumerate(merges):
            merge = f"merge {number:,}, of {left} and {right}"
            if not all(0 <= i < len(texts) and texts[i] for i in (left, right)):
                raise ValueError(f"{merge}: both must be earlier tokens of text")
            text = texts[left] + texts[right]
            if len(text) > MAX_TOKEN_BYTES:
                raise ValueError(f"{merge}: {text[:20]!r}... has more than {MAX_TOKEN_BYTES} bytes")
            if text in known:
                raise ValueError(f"{merge}: another token has the same bytes, {text[:20]!r}")
            known.add(text)
            texts.append(text)
        super().__init__(texts[BYTES.size :])
        self.merges = tuple((int(left), int(right)) for left, right in merges)
        self.digest = digest([pattern, self.merges])

    @cached_property
    def _encoding(self) -> Encoding:
        from tiktoken import Encoding

        texts = [text for text in self.texts if text]
        ranks = {text: rank for rank, text in enumerate(texts)}
        return Encoding("bpe", pat_str=self.pattern, mergeable_ranks=ranks, special_tokens={})

    def _encode_text(self, text: str) -> np.ndarray:
        ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ranks.astype(np.uint16) + np.uint16(BYTES.size - _BYTE_TOKENS) * (ranks >= _BYTE_TOKENS)

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        pieces = [np.array([self.bos])]
        for i, run in enumerate(NOT_UTF8.split(raw.decode("utf-8", "surrogateescape"))):
            if i % 2:  # a separator of the split: bytes that are not UTF-8
                pieces.append(np.frombuffer(run.encode("utf-8", "surrogateescape"), np.uint8))
            else:
                pieces.append(self._encode_text(run))
        ids = np.concatenate([*pieces, [self.eos]]).astype(np.uint16)
        assert int(self.bytes_of[ids].sum()) == len(raw), "the tokens stand for exactly the bytes of a text"
        return ids
