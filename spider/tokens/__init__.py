"""Vocabularies: the bytes that a token stands for, special tokens, and the encoding of text.

    0 .. 255     the bytes
    256 .. 271   special tokens, the same in every vocabulary
    272 ..       tokens that stand for longer texts

This module has the base class of vocabularies, and the one with a token for each byte. Others are read from
`tokenizer.json` (`stored`, with merges of byte pairs) or from a SentencePiece model (`sentencepiece`).
`turns` has the special tokens of conversations.

A model (``model.tokens``) and a dataset (`spider.data.shards.Shards.vocabulary`) have a vocabulary. So the
number of bytes of the targets is ``tokens.bytes_of[labels].sum()``, in any vocabulary. Only this package
defines which token ids are bytes and which are special.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

#: A label that does not count.
IGNORED = -100


_BYTES = 256
_SPECIALS = 16
#: Bytes of the longest token.
MAX_TOKEN_BYTES = 255
#: Token ids that fit into a shard (uint16).
MAX_TOKENS = 1 << 16


class Tokens:
    """A vocabulary. A document is BOS, its tokens, EOS; token ids are stored as uint16.

    Args:
        texts: Bytes of each token after the special ones.

    Raises:
        ValueError: There are more than `MAX_TOKENS` tokens, or one has more than `MAX_TOKEN_BYTES` bytes.
    """

    pad, bos, eos = 256, 257, 258
    #: Ids of the tokens that stand for no text, by name. Those from 259 on are reserved for later formats.
    specials: Mapping[str, int] = {
        "PAD": pad,
        "BOS": bos,
        "EOS": eos,
        "IMG_START": 259,
        "IMG_END": 260,
        "IMG_PATCH": 261,
        "IMG_NEWLINE": 262,
        "BOUNDARY": 263,
        "LOOP_START": 264,
        "LOOP_END": 265,
        **{f"RESERVED_{i}": 266 + i for i in range(6)},
    }
    #: Digest of the merges or pieces; None for bytes.
    digest: str | None = None
    #: Whether published tokens keep their text. Tokens that are encoded here always keep it.
    lossless = True

    def __init__(self, texts: Sequence[bytes] = ()) -> None:
        self.texts = [*(bytes([i]) for i in range(_BYTES)), *[b""] * _SPECIALS, *texts]
        #: Number of token ids, V: 0 to V - 1.
        self.size = len(self.texts)
        if self.size > MAX_TOKENS:
            raise ValueError(f"{self.size:,} tokens; shards hold at most {MAX_TOKENS:,} (uint16)")
        longest = max(texts, key=len, default=b"")
        if len(longest) > MAX_TOKEN_BYTES:
            raise ValueError(
                f"a token that begins with {longest[:20]!r} has {len(longest):,} bytes; the most is "
                f"{MAX_TOKEN_BYTES}"
            )
        #: Bytes of text that each token stands for, (V,) uint8; 0 for a special token.
        self.bytes_of = np.array([len(text) for text in self.texts], np.uint8)
        self.bytes_of.flags.writeable = False

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the token ids of a document, with BOS and EOS: (n,) uint16."""
        raise NotImplementedError

    def raw(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that token ids stand for; special tokens stand for none."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else ids
        return b"".join([self.texts[i] for i in plain if 0 <= i < self.size])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the same as text, with U+FFFD for malformed UTF-8."""
        return self.raw(ids).decode("utf-8", errors="replace")


class ByteTokens(Tokens):
    """The bytes and the special tokens."""

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        ids = np.empty(len(raw) + 2, np.uint16)
        ids[0] = self.bos
        ids[1:-1] = np.frombuffer(raw, np.uint8)
        ids[-1] = self.eos
        return ids

    def splice(
        self, text_N: np.ndarray, begin_D: np.ndarray, end_D: np.ndarray, buffer: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode D documents, each a slice of uint8, at the speed of a memory copy.

        Args:
            buffer: Memory for the ids (uint16), which is used if it is large enough.

        Returns:
            The ids, back to back, and where each document begins.
        """
        size_D = end_D - begin_D + 2
        after_D = np.cumsum(size_D)
        first_D = after_D - size_D
        total = int(after_D[-1])
        ids_N = buffer[:total] if total <= len(buffer) else np.empty(total, np.uint16)
        for at, begin, end in zip((first_D + 1).tolist(), begin_D.tolist(), end_D.tolist(), strict=True):
            ids_N[at : at + end - begin] = text_N[begin:end]
        ids_N[first_D], ids_N[after_D - 1] = self.bos, self.eos
        return ids_N, first_D

    def raw(self, ids: Iterable[int]) -> bytes:
        ids_N = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        return ids_N[(ids_N >= 0) & (ids_N < _BYTES)].astype(np.uint8).tobytes()


BYTES = ByteTokens()
