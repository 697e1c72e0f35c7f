"""``tokenizer.json``: a learned vocabulary, which lies in every folder that holds its tokens.

The folders are those of shards, checkpoints and exports. The file is plain JSON: the merges, or the pieces
and their scores, and a digest of them. It does not depend on this machine's libraries.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel

from spider.common.files import read_json, replacing
from spider.common.record import Record
from spider.tokens import BYTES, Tokens
from spider.tokens.bpe import BpeTokens

if TYPE_CHECKING:  # reading a tokenizer of merges does not import it
    from spider.tokens.sentencepiece import SentencePieceTokens

TOKENIZER = "tokenizer.json"


class LearnedFrom(BaseModel, frozen=True):
    """Size of the text that a tokenizer was learned from."""

    documents: int
    bytes: int


class _Stored(Record):
    WHAT: ClassVar[str] = "a tokenizer"
    REMEDY: ClassVar[str] = "copy it again from where it was made, or delete it and run {command}"

    @classmethod
    def remedy(cls, path: Path) -> str:
        described = path.with_name("metadata.json")  # of a dataset, which is written with a copy
        again = f"delete it and {described}, and run `snakemake datasets/{path.parent.name}`"
        return again if described.exists() else super().remedy(path)


class StoredTokens(_Stored):
    """A tokenizer of merges."""

    kind: Literal["bpe"]
    pattern: str
    vocab_size: int
    learned_from: LearnedFrom
    merges: list[str]
    """The two token ids of each merge, ``"104 101"``."""
    digest: str

    @classmethod
    def of(cls, tokens: BpeTokens, learned_from: LearnedFrom) -> StoredTokens:
        return cls(
            format=cls.FORMAT,
            kind="bpe",
            pattern=tokens.pattern,
            vocab_size=tokens.size,
            learned_from=learned_from,
            merges=[f"{left} {right}" for left, right in tokens.merges],
            digest=str(tokens.digest),
        )

    def tokens(self) -> BpeTokens:
        return BpeTokens([_pair(merge) for merge in self.merges], self.pattern)


class StoredPieces(_Stored):
    """The pieces of a SentencePiece model."""

    kind: Literal["sentencepiece"]
    lossless: bool
    fallback: bool
    vocab_size: int
    pieces: list[str]
    scores: list[float | None]
    whole: list[str]
    digest: str

    @classmethod
    def of(cls, tokens: SentencePieceTokens) -> StoredPieces:
        return cls(
            format=cls.FORMAT,
            kind="sentencepiece",
            lossless=tokens.lossless,
            fallback=tokens.fallback,
            vocab_size=tokens.size,
            pieces=[piece for piece, _ in tokens.pieces],
            scores=[score for _, score in tokens.pieces],
            whole=list(tokens.whole),
            digest=str(tokens.digest),
        )

    def tokens(self) -> SentencePieceTokens:
        from spider.tokens.sentencepiece import SentencePieceTokens

        pieces = list(zip(self.pieces, self.scores, strict=True))
        return SentencePieceTokens(pieces, self.whole, fallback=self.fallback, lossless=self.lossless)


def read_tokens(path: Path) -> BpeTokens | SentencePieceTokens:
    """Read the vocabulary of a ``tokenizer.json``, or of a SentencePiece model, which has another suffix.

    Raises `ValueError` if it is missing, damaged or edited.
    """
    if path.suffix != ".json":
        from spider.tokens.sentencepiece import read_model

        return read_model(path).tokens
    return tokens_of(read_json(path, _Stored.remedy(path)), path)


def tokens_of(plain: Any, path: Path) -> BpeTokens | SentencePieceTokens:
    """Return the vocabulary of a mapping that was read from ``path``; `ValueError` as in `read_tokens`."""
    pieces = isinstance(plain, dict) and plain.get("kind") == "sentencepiece"
    stored = (StoredPieces if pieces else StoredTokens).parse(plain, path)
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

        StoredPieces.of(read_model(path).tokens).write(folder / TOKENIZER)
        return
    with replacing(folder / TOKENIZER) as temporary:
        shutil.copyfile(path, temporary)


def _pair(merge: str) -> tuple[int, int]:
    left, _, right = merge.partition(" ")
    if not (left.isdecimal() and right.isdecimal()):
        raise ValueError(f"merge {merge!r} is not a pair of token ids")
    return int(left), int(right)


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
