"""Vocabulary of a SentencePiece model that others trained, to read the tokens that they published.

    0 .. 255     byte pieces, `<0x41>`              (`spider.tokens`)
    256 .. 271   special tokens; `<s>`, `</s>` and `<pad>` are BOS, EOS and PAD
    272 ..       pieces of text, in the model's order

A piece stands for its UTF-8, with a blank for each `▁`. Spider encodes text without normalizing it, so that
the scored text is exactly the given one. Of all adjacent parts that form a piece, those of the highest score
are joined, the first of equals, repeatedly (Kudo and Richardson, "SentencePiece", 2018, its BPE). Characters
without a piece, and `▁` itself, are encoded as bytes.

The library normalizes text first. If that removes newlines or runs of blanks, the model is not ``lossless``:
the tokens that others published stand for the normalized text.

The file is a protocol buffer, `ModelProto` of `sentencepiece_model.proto`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from spider.common.files import digest
from spider.tokens import BYTES, Tokens

BLANK = "▁"

#: Text that is always encoded as bytes: what is not UTF-8, and the character that stands for a blank.
_AS_BYTES = re.compile(f"([\udc80-\udcff{BLANK}]+)")
_CACHED_WORDS = 1 << 16

# Values of `SentencePiece.Type` and `TrainerSpec.ModelType`.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_SPECIALS = {"<s>": BYTES.bos, "</s>": BYTES.eos, "<pad>": BYTES.pad}


class SentencePieceTokens(Tokens):
    """The byte vocabulary and pieces.

    Args:
        pieces: Pieces of text in order, each with the score of joining two parts to it; None for a piece that
            is not made by joining.
        whole: User-defined pieces, which are split off before parts are joined.
        fallback: Whether the model has byte pieces, for text without a piece.
        lossless: Whether the library's normalization keeps a text as it is.

    Raises:
        ValueError: Two pieces are equal, one is empty, or `Tokens` raises.
    """

    kind = "sentencepiece"

    def __init__(
        self,
        pieces: Sequence[tuple[str, float | None]],
        whole: Sequence[str] = (),
        *,
        fallback: bool,
        lossless: bool,
    ) -> None:
        super().__init__([piece.replace(BLANK, " ").encode() for piece, _ in pieces])
        self.pieces = tuple(pieces)
        self.whole = tuple(whole)
        self.fallback = fallback
        self.lossless = lossless
        self._ids = {piece: BYTES.size + i for i, (piece, _) in enumerate(pieces)}
        if len(self._ids) < len(pieces) or "" in self._ids:
            raise ValueError("two equal pieces, or an empty one")
        self._scores = {piece: score for piece, score in pieces if score is not None}
        # If no piece has a blank inside, parts are never joined across words, and words can be cached.
        inside = any(BLANK in piece.lstrip(BLANK) for piece in self._ids)
        self._words = re.compile("(?s).+" if inside else f"{BLANK}*[^{BLANK}]+|{BLANK}+")
        self._cache: dict[str, list[int]] = {}
        self.digest = digest([self.pieces, self.whole, fallback, lossless])

    @cached_property
    def _user_defined(self) -> re.Pattern[str]:
        longest_first = sorted(self.whole, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else r"(?!)()")

    def encode(self, text: str | bytes) -> np.ndarray:
        """Encode a text; `ValueError` for a character without a piece in a model without byte pieces."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        plain = [self.bos]
        for i, run in enumerate(_AS_BYTES.split(raw.decode("utf-8", "surrogateescape"))):
            plain += self._encode_bytes(run) if i % 2 else self._encode_text(run.replace(" ", BLANK))
        ids = np.array([*plain, self.eos], np.uint16)
        assert int(self.bytes_of[ids].sum()) == len(raw), "the tokens stand for exactly the bytes of a text"
        return ids

    def _encode_text(self, text: str) -> Iterator[int]:
        for i, run in enumerate(self._user_defined.split(text)):
            if i % 2:
                yield self._ids[run]
                continue
            for word in self._words.findall(run):
                ids = self._cache.get(word)
                if ids is None:
                    ids = [id for part in self._join(word) for id in self._encode_part(part)]
                    if len(self._cache) < _CACHED_WORDS:
                        self._cache[word] = ids
                yield from ids

    def _encode_part(self, part: str) -> list[int]:
        id = self._ids.get(part)
        return [id] if id is not None else self._encode_bytes(part.replace(BLANK, " "))

    def _encode_bytes(self, text: str) -> list[int]:
        if not self.fallback:
            raise ValueError(
                f"{text[:20]!r} has no piece in this SentencePiece model, which has no byte pieces either; "
                "leave it out of the text"
            )
        return list(text.encode("utf-8", "surrogateescape"))

    def _join(self, word: str) -> list[str]:
        """Join the characters of a word to pieces, the pair of the highest score first.

        ``before`` and ``after`` link each part to its neighbours; a part that was joined to its left
        neighbour is empty.
        """
        parts = list(word)
        before = list(range(-1, len(word) - 1))
        after = [*range(1, len(word)), -1]
        queue: list[tuple[float, int, int, str]] = []

        def candidates(left: int, right: int) -> Iterator[tuple[float, int, int, str]]:
            if left >= 0 and right >= 0:
                both = parts[left] + parts[right]
                if both in self._scores:
                    yield -self._scores[both], left, right, both

        for i in range(len(word) - 1):
            queue += candidates(i, i + 1)
        heapify(queue)
        while queue:
            _, left, right, both = heappop(queue)
            if parts[left] + parts[right] != both or after[left] != right:
                continue  # one of them was joined to another part since
            parts[left] = both
            parts[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            for pair in (*candidates(before[left], left), *candidates(left, after[left])):
                heappush(queue, pair)
        return [part for part in parts if part]


# ----------------------------------------------------------------------------------------- the model's file


@dataclass(frozen=True)
class Model:
    """The content of a ``.model`` file."""

    tokens: SentencePieceTokens
    names: list[str]
    """Names of the model's pieces, in the model's order."""
    ids_P: np.ndarray
    """Our token id of each piece, (P,) int32; -1 for `<unk>` and other control pieces."""


def read_model(path: Path) -> Model:
    """Read a SentencePiece model.

    Raises `ValueError` if it is missing or damaged, adds a blank before every text, is not BPE, or lacks
    `<s>`.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the SentencePiece model of the shards") from None
    try:
        return _model(raw)
    except (ValueError, TypeError, DecodeError) as error:
        raise ValueError(f"{path}: this SentencePiece model cannot be used: {error}") from None


def _model(raw: bytes) -> Model:
    parts: dict[int, list[dict[int, Any]]] = {1: [], 2: [], 3: []}
    for number, value in _fields(raw):
        if number in parts:
            parts[number].append(dict(_fields(value)))
    trainer, normalizer = ({key: one[key] for one in parts[number] for key in one} for number in (2, 3))
    entries = []
    for piece in parts[1]:
        (score,) = struct.unpack("<f", piece.get(2, 0).to_bytes(4, "little"))
        entries.append((piece.get(1, b"").decode(), score, piece.get(3, _NORMAL)))
    if not entries:
        raise ValueError("it holds no pieces")
    model_type = trainer.get(3, 1)
    if model_type != 2:
        raise ValueError(f"it is of type {_MODEL_TYPES.get(model_type, model_type)}, only bpe is supported")
    if normalizer.get(3, 1):
        raise ValueError("it adds a blank before every text; export it with add_dummy_prefix=False")
    ids: list[int] = []
    pieces: list[tuple[str, float | None]] = []
    whole: list[str] = []
    for name, score, piece_type in entries:
        id = -1
        if piece_type == _CONTROL:
            id = _SPECIALS.get(name, -1)
        elif piece_type == _BYTE and re.fullmatch("<0x[0-9A-F]{2}>", name):
            id = bytes.fromhex(name[3:5])[0]
        elif piece_type in (_NORMAL, _USER_DEFINED, _UNUSED):
            id = BYTES.size + len(pieces)
            pieces.append((name, score if piece_type == _NORMAL else None))
            if piece_type == _USER_DEFINED:
                whole.append(name)
        ids.append(id)
    if BYTES.bos not in ids:
        raise ValueError("it has no <s>, with which documents begin")
    tokens = SentencePieceTokens(
        pieces,
        whole,
        fallback=any(piece_type == _BYTE for *_, piece_type in entries),
        lossless=not normalizer.get(4, 1) and normalizer.get(1) == b"identity",
    )
    return Model(tokens, [name for name, *_ in entries], np.array(ids, np.int32))


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message: an integer, or bytes."""
    for field in UnknownFieldSet(Empty.FromString(raw)):
        yield field.field_number, field.data
