"""``tokenizer.json``: a learned vocabulary, which lies in every folder that holds its tokens.

The folders are those of shards, checkpoints and exports. The file is plain JSON: the merges, or the pieces
and their scores, and a digest of them. It does not depend on this machine's libraries.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel

from spider.common.files import read_json, write_bytes
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
