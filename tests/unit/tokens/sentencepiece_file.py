"""A SentencePiece model's file, written byte by byte, and text in its pieces by the simplest of rules."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

NORMAL, UNKNOWN, CONTROL, WHOLE, UNUSED, BYTE = range(1, 7)

SIGNS = [("<pad>", CONTROL), ("<s>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)]
BYTES = [(f"<0x{i:02X}>", BYTE) for i in range(256)]
#: Made of two in this order, then the letters: an inner blank, a character of three bytes, a blank alone.
MADE = ["▁t", "he", "▁the", "of▁", "of▁the", "in", "▁▁", "日本"]
LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!T\n", "日", "本", "é", *"0123456789"]
PIECES = [*SIGNS, *BYTES, *[(piece, NORMAL) for piece in (*MADE, "of", *LETTERS)]]


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def number(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def model_bytes(
    pieces: Sequence[tuple[str, int]] = PIECES,
    *,
    normalizer: str = "identity",
    prefix: bool = False,
    squeeze: bool = False,
    kind: int = 2,
) -> bytes:
    """Pieces of text have falling scores, as `SentencePieceTrainer` gives them."""
    raw = b""
    for rank, (piece, sort) in enumerate(pieces):
        score = b"\x15" + struct.pack("<f", -rank if sort == NORMAL else 0)
        raw += message(1, message(1, piece.encode()) + score + (number(3, sort) if sort != NORMAL else b""))
    raw += message(2, number(3, kind) + number(4, len(pieces)))
    spec = message(1, normalizer.encode()) + number(3, prefix) + number(4, squeeze) + number(5, 1)
    return raw + message(3, spec)


def write_model(path: Path, *args: object, **settings: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model_bytes(*args, **settings))  # type: ignore[arg-type]
    return path


def in_pieces(text: str, pieces: Sequence[tuple[str, int]] = PIECES) -> list[int]:
    """Ids as the model has them, of BPE by its definition: join the best of all neighbours, look again."""
    rank = {piece: i for i, (piece, sort) in enumerate(pieces) if sort == NORMAL}
    places = {piece: i for i, (piece, _) in enumerate(pieces)}
    parts = list(text.replace(" ", "▁"))
    while found := [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]:
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        text = part.replace("▁", " ")
        ids += [places[part]] if part in rank else [places[f"<0x{byte:02X}>"] for byte in text.encode()]
    return ids
