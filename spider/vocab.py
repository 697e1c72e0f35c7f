"""The byte vocabulary: 272 ids, the first 256 of which are the raw bytes themselves.

A document is ``[BOS] + utf-8 bytes + [EOS]``. Nothing is learned and nothing is looked up: a byte is its own
id, so encoding a document is a copy. Ids above 255 are named here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

VOCAB_SIZE = 272

PAD = 256
BOS = 257
EOS = 258

#: Every special id by name. Ids from 259 on are reserved for later formats and never occur in text shards.
SPECIAL_IDS: dict[str, int] = {
    "PAD": PAD,
    "BOS": BOS,
    "EOS": EOS,
    "IMG_START": 259,
    "IMG_END": 260,
    "IMG_PATCH": 261,
    "IMG_NEWLINE": 262,
    "BOUNDARY": 263,
    "LOOP_START": 264,
    "LOOP_END": 265,
    **{f"RESERVED_{i}": 266 + i for i in range(6)},
}


def encode(text: str) -> list[int]:
    """Ids of one document: BOS, its UTF-8 bytes, EOS."""
    return [BOS, *text.encode("utf-8"), EOS]


def decode(ids: Iterable[int]) -> str:
    """Text of a sequence of ids. Special ids are dropped, malformed UTF-8 becomes U+FFFD."""
    return bytes(i for i in ids if 0 <= i <= 255).decode("utf-8", errors="replace")
