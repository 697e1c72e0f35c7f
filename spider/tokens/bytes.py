"""The byte vocabulary: 272 ids, the first 256 of which are the raw bytes themselves.

Nothing is learned and nothing is looked up: a byte is its own id, so encoding a document is a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

_RAW = 256


class ByteTokens:
    """See `spider.tokens.Tokens`. Ids from 259 on are reserved for later formats and never occur in text."""

    size = 272
    digest: str | None = None
    lossless = True
    pad, bos, eos = 256, 257, 258
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

    def __init__(self) -> None:
        self.bytes_of = np.zeros(self.size, np.uint8)
        self.bytes_of[:_RAW] = 1
        self.bytes_of.flags.writeable = False

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        ids = np.empty(len(raw) + 2, np.uint16)
        ids[0], ids[-1] = self.bos, self.eos
        ids[1:-1] = np.frombuffer(raw, np.uint8)
        return ids

    def splice(self, joined: np.ndarray, offsets: np.ndarray, room: np.ndarray) -> Iterator[np.ndarray]:
        """`encode` of many documents, one after the other, at the speed of a memory copy.

        ``joined`` are their bytes (uint8), with one to be overwritten before and after each, and ``offsets``
        (documents + 1,) where each begins, and the end. They are widened a piece at a time into ``room``
        (uint16): what is yielded lies there until the next.
        """
        first, last, total = offsets[:-1], offsets[1:] - 1, int(offsets[-1])
        for start in range(0, total, len(room)):
            end = min(start + len(room), total)
            piece = room[: end - start]
            piece[:] = joined[start:end]
            for special, places in ((self.bos, first), (self.eos, last)):
                low, high = np.searchsorted(places, (start, end))
                piece[places[low:high] - start] = special
            yield piece

    def raw(self, ids: Iterable[int]) -> bytes:
        ids_N = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        return ids_N[(ids_N >= 0) & (ids_N < _RAW)].astype(np.uint8).tobytes()

    def decode(self, ids: Iterable[int]) -> str:
        return self.raw(ids).decode("utf-8", errors="replace")


BYTES = ByteTokens()
