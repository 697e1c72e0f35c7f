"""Write the file of a SentencePiece model byte by byte, and encode text by the definition of its BPE."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPECIAL = [("<pad>", CONTROL), ("<s>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)]
BYTES = [(f"<0x{i:02X}>", BYTE) for i in range(256)]
#: Pieces joined from two others, in the order of their scores; then single characters. They include inner
#: blanks, characters of three bytes and a single blank.
JOINED = ["▁t", "he", "▁the", "of▁", "of▁the", "in", "▁▁", "日本"]
LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!T\n", "日", "本", "é", *"0123456789"]
PIECES = [*SPECIAL, *BYTES, *[(piece, NORMAL) for piece in (*JOINED, "of", *LETTERS)]]


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
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
    """Return a model whose pieces of text have falling scores, like those of `SentencePieceTrainer`."""
    raw = b""
    for rank, (piece, piece_type) in enumerate(pieces):
        score = b"\x15" + struct.pack("<f", -rank if piece_type == NORMAL else 0)
        raw += message(
            1, message(1, piece.encode()) + score + (number(3, piece_type) if piece_type != NORMAL else b"")
        )
    raw += message(2, number(3, kind) + number(4, len(pieces)))
    spec = message(1, normalizer.encode()) + number(3, prefix) + number(4, squeeze) + number(5, 1)
    return raw + message(3, spec)


def write_model(path: Path, *args: object, **settings: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model_bytes(*args, **settings))  # type: ignore[arg-type]
    return path


def in_pieces(text: str, pieces: Sequence[tuple[str, int]] = PIECES) -> list[int]:
    """Return the positions of a text's pieces: join the best of all adjacent pairs, then look again."""
    rank = {piece: i for i, (piece, piece_type) in enumerate(pieces) if piece_type == NORMAL}
    position = {piece: i for i, (piece, _) in enumerate(pieces)}
    parts = list(text.replace(" ", "▁"))
    while found := [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]:
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        text = part.replace("▁", " ")
        ids += [position[part]] if part in rank else [position[f"<0x{byte:02X}>"] for byte in text.encode()]
    return ids
