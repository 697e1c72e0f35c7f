"""``tokenizer.json``: a learned vocabulary, which lies in every folder that holds its tokens, and byte pairs.

The folders are those of shards, checkpoints and exports. The file is plain JSON: the merges, or the pieces
and their scores, and a digest of them. It does not depend on this machine's libraries.

    0 .. 255     the bytes                  (`spider.tokens`)
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel

from spider.common.files import digest, read_json, write_bytes
from spider.common.record import Record
from spider.tokens import BYTES, MAX_TOKEN_BYTES, Tokens

if TYPE_CHECKING:
    from tiktoken import Encoding

    from spider.tokens.sentencepiece import SentencePieceTokens

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
        # Other methods of tiktoken look for special tokens, and take four times as long where there are none.
        ranks = np.array(self._encoding.encode_ordinary(text), np.uint16)
        return ranks + np.uint16(BYTES.size - _BYTE_TOKENS) * (ranks >= _BYTE_TOKENS)

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        # A separator of the split is a run of bytes that are not UTF-8.
        runs = NOT_UTF8.split(raw.decode("utf-8", "surrogateescape"))
        pieces = [
            np.frombuffer(run.encode("utf-8", "surrogateescape"), np.uint8)
            if i % 2
            else self._encode_text(run)
            for i, run in enumerate(runs)
        ]
        ids = np.concatenate([[self.bos], *pieces, [self.eos]], dtype=np.uint16, casting="unsafe")
        assert int(self.bytes_of[ids].sum()) == len(raw), "the tokens stand for exactly the bytes of a text"
        return ids


TOKENIZER = "tokenizer.json"


class LearnedFrom(BaseModel, frozen=True):
    """Size of the text that a tokenizer was learned from."""

    documents: int
    bytes: int


class StoredTokens(Record):
    """``tokenizer.json``. The file has the fields of its kind, in this order."""

    WHAT: ClassVar[str] = "a tokenizer"
    REMEDY: ClassVar[str] = "copy it again from where it was made, or delete it and run {command}"

    kind: Literal["bpe", "sentencepiece"]
    pattern: str = ""
    lossless: bool = True
    fallback: bool = False
    vocab_size: int
    learned_from: LearnedFrom | None = None
    merges: tuple[str, ...] = ()
    """The two token ids of each merge, ``"104 101"``."""
    pieces: tuple[str, ...] = ()
    scores: tuple[float | None, ...] = ()
    whole: tuple[str, ...] = ()
    digest: str

    @classmethod
    def remedy(cls, path: Path) -> str:
        described = path.with_name("metadata.json")  # of a dataset, which is written with a copy
        again = f"delete it and {described}, and run `snakemake datasets/{path.parent.name}`"
        return again if described.exists() else super().remedy(path)

    @classmethod
    def of_merges(cls, tokens: BpeTokens, learned_from: LearnedFrom) -> StoredTokens:
        """Return the file of a vocabulary of merges."""
        return cls(
            format=cls.FORMAT,
            kind="bpe",
            pattern=tokens.pattern,
            vocab_size=tokens.size,
            learned_from=learned_from,
            merges=tuple(f"{left} {right}" for left, right in tokens.merges),
            digest=str(tokens.digest),
        )

    @classmethod
    def of_pieces(cls, tokens: SentencePieceTokens) -> StoredTokens:
        """Return the file of the pieces of a SentencePiece model."""
        return cls(
            format=cls.FORMAT,
            kind="sentencepiece",
            lossless=tokens.lossless,
            fallback=tokens.fallback,
            vocab_size=tokens.size,
            pieces=tuple(piece for piece, _ in tokens.pieces),
            scores=tuple(score for _, score in tokens.pieces),
            whole=tokens.whole,
            digest=str(tokens.digest),
        )

    def plain(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_unset=True)

    def tokens(self) -> BpeTokens | SentencePieceTokens:
        """Return the vocabulary. Raise `ValueError` if there is none of these merges or pieces."""
        if self.kind == "bpe":
            return BpeTokens([_pair(merge) for merge in self.merges], self.pattern)
        from spider.tokens.sentencepiece import SentencePieceTokens

        pieces = list(zip(self.pieces, self.scores, strict=True))
        return SentencePieceTokens(pieces, self.whole, fallback=self.fallback, lossless=self.lossless)


def _pair(merge: str) -> tuple[int, int]:
    left, _, right = merge.partition(" ")
    if not (left.isdecimal() and right.isdecimal()):
        raise ValueError(f"merge {merge!r} is not a pair of token ids")
    return int(left), int(right)


def read_tokens(path: Path) -> BpeTokens | SentencePieceTokens:
    """Read the vocabulary of a ``tokenizer.json``, or of a SentencePiece model, which has another suffix.

    Raises `ValueError` if it is missing, damaged or edited.
    """
    if path.suffix != ".json":
        from spider.tokens.sentencepiece import read_model

        return read_model(path).tokens
    return tokens_of(read_json(path, StoredTokens.remedy(path)), path)


def tokens_of(plain: Any, path: Path) -> BpeTokens | SentencePieceTokens:
    """Return the vocabulary of a mapping that was read from ``path``; `ValueError` as in `read_tokens`."""
    stored = StoredTokens.parse(plain, path)
    try:
        tokens = stored.tokens()
    except ValueError as error:
        raise ValueError(f"{path}: a damaged tokenizer ({error}); {stored.remedy(path)}") from None
    if (tokens.digest, tokens.size) != (stored.digest, stored.vocab_size):
        raise ValueError(f"{path}: edited, its digest does not match; {stored.remedy(path)}")
    return tokens


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Write the vocabulary that `read_tokens` reads as ``tokenizer.json`` into a folder."""
    if path.suffix != ".json":
        from spider.tokens.sentencepiece import read_model

        StoredTokens.of_pieces(read_model(path).tokens).write(folder / TOKENIZER)
    else:
        write_bytes(folder / TOKENIZER, path.read_bytes())


def tokens_in(folder: Path, expected: str | None) -> Tokens:
    """Return the vocabulary of a folder, which must have the ``expected`` digest; None stands for bytes.

    Raises `ValueError` if ``tokenizer.json`` is missing or damaged, or is of another vocabulary.
    """
    if expected is None:
        return BYTES
    tokens = read_tokens(folder / TOKENIZER)
    if tokens.digest != expected:
        raise ValueError(
            f"{folder / TOKENIZER}: its digest is {tokens.digest}, but the tokens of this folder need the "
            f"tokenizer {expected}; copy the whole folder from where it was made, or delete that of a "
            f"dataset and run `snakemake datasets/{folder.name}`"
        )
    return tokens
