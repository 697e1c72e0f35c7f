"""``tokenizer.json``: an alphabet that was learned, as it lies beside whatever is written in it.

It goes where its ids go: into the folder of the shards, of every checkpoint and of every export. It holds no
code and nothing that this machine's libraries decide, only the pairs that were merged, and a digest of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel

from spider.artifacts import Artifact
from spider.tokens import BYTES, Tokens
from spider.tokens.bpe import BpeTokens

TOKENIZER = "tokenizer.json"


class LearnedFrom(BaseModel, frozen=True):
    """The documents that it was learned from."""

    documents: int
    bytes: int


class StoredTokens(Artifact):
    WHAT: ClassVar[str] = "a tokenizer"
    REMEDY: ClassVar[str] = "copy it again from where it was made, or delete it and run the workflow again"

    kind: Literal["bpe"]
    pattern: str
    vocab_size: int
    learned_from: LearnedFrom
    merges: list[str]
    """Each as the two ids that it joins, ``"104 101"``."""
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


def read_tokens(path: Path) -> BpeTokens:
    """The alphabet in a ``tokenizer.json``; `ValueError` where that is missing, damaged or edited."""
    return tokens_of(StoredTokens.read(path), path)


def tokens_of(stored: StoredTokens, path: Path) -> BpeTokens:
    """The alphabet that was read from ``path``; `ValueError` where it is damaged or edited."""
    try:
        tokens = BpeTokens([_pair(merge) for merge in stored.merges], stored.pattern)
    except ValueError as error:
        raise ValueError(f"{path}: {StoredTokens.WHAT} that is damaged ({error}); {stored.REMEDY}") from None
    if (tokens.digest, tokens.size) != (stored.digest, stored.vocab_size):
        raise ValueError(f"{path}: edited since it was written, its digest does not match; {stored.REMEDY}")
    return tokens


def _pair(merge: str) -> tuple[int, int]:
    left, _, right = merge.partition(" ")
    if not (left.isdecimal() and right.isdecimal()):
        raise ValueError(f"merge {merge!r} is not two ids")
    return int(left), int(right)


def tokens_in(folder: Path, expected: str | None) -> Tokens:
    """The alphabet of what lies in a folder: bytes where no digest is ``expected``. `ValueError` where its
    ``tokenizer.json`` is missing, damaged, or another."""
    if expected is None:
        return BYTES
    tokens = read_tokens(folder / TOKENIZER)
    if tokens.digest != expected:
        remedy = "copy the whole folder from where it was made, or delete it and run the workflow again"
        raise ValueError(
            f"{folder / TOKENIZER}: another tokenizer ({tokens.digest}) than what lies here was written with "
            f"({expected}); {remedy}"
        )
    return tokens
