"""Pieces of a SentencePiece model that others have trained, for reading what they wrote in it.

    ids    0 .. 255   byte pieces, `<0x41>`, as the bytes they are   (`spider.tokens.bytes`)
           256 .. 271 the special ids; `<s>`, `</s>` and `<pad>` are BOS, EOS and PAD
           272 ..     pieces of text, in the model's order

A piece stands for its UTF-8 with a blank in the place of each `▁`. Here, text is written in pieces as it is,
to the byte, so that what is scored is what was given: of neighbours that make a piece those of the highest
score are joined, the first of equals, again and again (Kudo and Richardson, "SentencePiece", 2018, its BPE);
what has no piece is written in bytes, and so is a `▁`. The library itself would first normalise the text.
Where that takes something away, newlines or runs of blanks, the model is not ``lossless``: what others wrote
in it reads as what it left.

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

import numpy as np

from spider.files import digest
from spider.tokens.bytes import BYTES
from spider.tokens.texts import TextTokens

BLANK = "▁"

#: What passes pieces by: what is no UTF-8, and the sign of a blank itself.
_APART = re.compile(f"([\udc80-\udcff{BLANK}]+)")
_KEPT_WORDS = 1 << 16

# Of `SentencePiece.Type` and `TrainerSpec.ModelType`.
_NORMAL, _CONTROL, _WHOLE, _UNUSED, _BYTE = 1, 3, 4, 5, 6
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_SPECIALS = {"<s>": BYTES.bos, "</s>": BYTES.eos, "<pad>": BYTES.pad}


class SentencePieceTokens(TextTokens):
    """See `spider.tokens.Tokens`.

    Args:
        pieces: of text, in order, and the score by which each is made of two; None for one that is not made.
        whole: those that are taken out of a text before anything is joined.
        fallback: whether the model writes in bytes what has no piece.
        lossless: whether it keeps a text as it is.

    Raises:
        ValueError: two equal pieces, an empty one, or what `TextTokens` refuses.
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
        self.pieces, self.whole = tuple(pieces), tuple(whole)
        self.fallback, self.lossless = fallback, lossless
        self._ids = {piece: BYTES.size + i for i, (piece, _) in enumerate(pieces)}
        if len(self._ids) < len(pieces) or "" in self._ids:
            raise ValueError("two equal pieces, or an empty one")
        self._scores = {piece: score for piece, score in pieces if score is not None}
        # Nothing is joined across what begins a word, unless a piece has a blank inside: words are looked up.
        inside = any(BLANK in piece.lstrip(BLANK) for piece in self._ids)
        self._words = re.compile("(?s).+" if inside else f"{BLANK}*[^{BLANK}]+|{BLANK}+")
        self._known: dict[str, list[int]] = {}
        self.digest = digest([self.pieces, self.whole, fallback, lossless])

    @cached_property
    def _taken_out(self) -> re.Pattern[str]:
        longest_first = sorted(self.whole, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else r"(?!)()")

    def encode(self, text: str | bytes) -> np.ndarray:
        """`ValueError` for a character that has no piece, of a model without byte pieces."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        ids = [self.bos]
        for i, run in enumerate(_APART.split(raw.decode("utf-8", "surrogateescape"))):
            ids += self._in_bytes(run) if i % 2 else self._of_text(run.replace(" ", BLANK))
        made = np.array([*ids, self.eos], np.uint16)
        assert int(self.bytes_of[made].sum()) == len(raw), "ids stand for exactly the bytes of a text"
        return made

    def _of_text(self, text: str) -> Iterator[int]:
        for i, run in enumerate(self._taken_out.split(text)):
            if i % 2:
                yield self._ids[run]
                continue
            for word in self._words.findall(run):
                if (ids := self._known.get(word)) is None:
                    ids = [id for piece in self._joined(word) for id in self._of_piece(piece)]
                    if len(self._known) < _KEPT_WORDS:
                        self._known[word] = ids
                yield from ids

    def _of_piece(self, piece: str) -> list[int]:
        own = self._ids.get(piece)
        return [own] if own is not None else self._in_bytes(piece.replace(BLANK, " "))

    def _in_bytes(self, text: str) -> list[int]:
        if not self.fallback:
            raise ValueError(
                f"{text[:20]!r} has no piece in this SentencePiece model, which has none of bytes either; "
                "leave it out of the text"
            )
        return list(text.encode("utf-8", "surrogateescape"))

    def _joined(self, word: str) -> list[str]:
        """The characters of a word, joined to pieces."""
        parts, before = list(word), list(range(-1, len(word) - 1))
        after = [*range(1, len(word)), -1]
        found: list[tuple[float, int, int, str]] = []

        def look(left: int, right: int) -> Iterator[tuple[float, int, int, str]]:
            if left >= 0 and right >= 0 and (both := parts[left] + parts[right]) in self._scores:
                yield -self._scores[both], left, right, both

        for i in range(len(word) - 1):
            found += look(i, i + 1)
        heapify(found)
        while found:
            _, left, right, both = heappop(found)
            if parts[left] + parts[right] != both or after[left] != right:
                continue  # one of them has been joined to another
            parts[left], parts[right] = both, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            for pair in (*look(before[left], left), *look(left, after[left])):
                heappush(found, pair)
        return [part for part in parts if part]


# ----------------------------------------------------------------------------------------- the model's file


@dataclass(frozen=True)
class Model:
    """What a ``.model`` holds."""

    tokens: SentencePieceTokens
    names: list[str]
    """Of its pieces, in its own order."""
    ids_P: np.ndarray
    """Our id of each, (P,) int32; -1 for one that stands for nothing here: `<unk>`, other control signs."""


def read_model(path: Path) -> Model:
    """A SentencePiece model, to be read with; `ValueError` where it is missing or damaged, puts a blank
    before every text, is no BPE, or has no `<s>`."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the SentencePiece model of the shards") from None
    try:
        return _model(raw)
    except (ValueError, IndexError, struct.error) as error:
        raise ValueError(f"{path}: not a SentencePiece model that can be read with: {error}") from None


def _model(raw: bytes) -> Model:
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    read = []
    for number, value in _fields(raw):
        if number in (1, 2, 3):
            fields = dict(_fields(_bytes(value)))
            if number == 1:
                score = struct.unpack("<f", _bytes(fields.get(2, bytes(4))))[0]
                read.append((_bytes(fields.get(1, b"")).decode(), score, fields.get(3, _NORMAL)))
            else:
                (trainer if number == 2 else normalizer).update(fields)
    if not read:
        raise ValueError("it holds no pieces")
    if (kind := trainer.get(3, 1)) != 2:
        raise ValueError(f"it is of type {_KINDS.get(int(kind), kind)}, and only bpe is known here")
    if normalizer.get(3, 1):
        raise ValueError("it puts a blank before every text; export it with add_dummy_prefix=False")
    keeps = not normalizer.get(4, 1) and normalizer.get(1) == b"identity"
    ids: list[int] = []
    pieces: list[tuple[str, float | None]] = []
    whole: list[str] = []
    for name, score, sort in read:
        ids.append(_SPECIALS.get(name, -1) if sort == _CONTROL else -1)
        if sort == _BYTE:
            ids[-1] = bytes.fromhex(name[3:5])[0] if re.fullmatch("<0x[0-9A-F]{2}>", name) else -1
        elif sort in (_NORMAL, _WHOLE, _UNUSED):
            ids[-1] = BYTES.size + len(pieces)
            pieces.append((name, score if sort == _NORMAL else None))
            whole += [name] if sort == _WHOLE else []
    if BYTES.bos not in ids:
        raise ValueError("it has no <s>, with which documents begin")
    tokens = SentencePieceTokens(
        pieces, whole, fallback=any(sort == _BYTE for *_, sort in read), lossless=keeps
    )
    return Model(tokens, [name for name, *_ in read], np.array(ids, np.int32))


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message, in order: a varint as it is, all else as its bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (raw[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if not raw[at - 1] & 0x80:
                return value

    while at < len(raw):
        key = varint()
        if (wire := key & 7) == 0:
            yield key >> 3, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"no protocol buffer, at byte {at}")
        size = {1: 8, 5: 4}.get(wire) or varint()
        if at + size > len(raw):
            raise ValueError(f"it ends in the middle, at byte {len(raw)}")
        yield key >> 3, raw[at : at + size]
        at += size


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("no such message")
    return value
