"""What vocabularies beyond bytes share: an id stands for the bytes that a list has in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from spider.tokens.bytes import BYTES

#: Bytes of the longest id.
LONGEST = 255
#: Ids that fit into a shard.
MOST = 1 << 16


class TextTokens:
    """See `spider.tokens.Tokens`; what encodes, and the digest, are a subclass's.

    Args:
        texts: what each id after the bytes' and the special ones stands for.

    Raises:
        ValueError: more ids than `MOST`, or one of more than `LONGEST` bytes.
    """

    pad, bos, eos = BYTES.pad, BYTES.bos, BYTES.eos
    specials: Mapping[str, int] = BYTES.specials
    digest: str | None
    lossless = True

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = [BYTES.raw([i]) for i in range(BYTES.size)] + list(texts)
        self.size = len(self.texts)
        if self.size > MOST:
            raise ValueError(f"{self.size:,} ids, and shards hold {MOST:,} (uint16)")
        if long := next((text for text in texts if len(text) > LONGEST), b""):
            raise ValueError(f"an id of {long[:20]!r} and so on, of {len(long):,} bytes; {LONGEST} at most")
        self.bytes_of = np.array([len(text) for text in self.texts], np.uint8)
        self.bytes_of.flags.writeable = False

    def raw(self, ids: Iterable[int]) -> bytes:
        plain = ids.tolist() if isinstance(ids, np.ndarray) else ids
        return b"".join([self.texts[i] for i in plain if 0 <= i < self.size])

    def decode(self, ids: Iterable[int]) -> str:
        return self.raw(ids).decode("utf-8", errors="replace")
