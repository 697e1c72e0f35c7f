"""Digests of the blocks of a file: a reader sees damage of what it reads, without reading the whole file.

Encoding writes the XXH3-64 of each 64 KiB of ``.bin`` and ``.idx`` into the part's record, 1/4096 of their
size. A reader compares a block before it first uses any of it. That is once in a process: a damaged disk or
copy is noticed, memory that fails later is not.

The size of a block: where a page of a mapped file is not in memory, Linux reads the 128 KiB around it. The
64 KiB block of the page is among them, so random windows read hardly more of the disk than before. A row in a
new block takes the loader's thread 8 us, 1% of what a GPU needs for a row of a small
model. CRC-32 of zlib takes 5 times as long, and would cost a sixth of the speed of encoding bytes; XXH3 costs
half of that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from xxhash import xxh3_64, xxh3_64_hexdigest

from spider.errors import DamagedShard
from spider.files import read_json

logger = logging.getLogger(__name__)
_tell = cache(logger.info)

SIZE = 1 << 16
"""Bytes of a block; the last one of a file may be shorter."""
DIGITS = 16
"""Hexadecimal digits of a digest."""
KEY = "xxh3_64"
"""Key of the digests in the record of a part: those of ``bin`` and of ``idx``, one after the other."""


class BlockWriter:
    """Write values to a file, and keep the digests of its blocks, in hexadecimal."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digests: list[str] = []
        self._hash = xxh3_64()
        self._filled = 0

    def write(self, values_N: np.ndarray) -> None:
        """Append the bytes of values (N,)."""
        data = values_N.view(np.uint8).data
        self.file.write(data)
        while len(data):
            if not self._filled:
                self._hash.reset()
                self.digests.append("")
            piece, data = data[: SIZE - self._filled], data[SIZE - self._filled :]
            self._hash.update(piece)
            self.digests[-1] = self._hash.hexdigest()
            self._filled = (self._filled + len(piece)) % SIZE


class Blocks:
    """The blocks of a ``.bin`` or ``.idx``, compared with the digests in the part's record.

    Digests that differ from a file that is ``intact`` are not used, and a warning says so. A file may have
    none, because another tool or an earlier Spider made it; the log says so once. Several threads may use
    this.
    """

    def __init__(self, file: Path, values_N: np.ndarray, intact: Callable[[], bool]) -> None:
        self._file = file
        self._bytes = values_N.view(np.uint8).data
        self._intact = intact

    def check(self, begin: int, end: int) -> None:
        """Compare the blocks of the bytes ``begin`` to ``end``, except those that were equal before.

        Raises `DamagedShard`.
        """
        block, last = begin // SIZE, -(-end // SIZE)
        while (block := self._unread.find(1, block, last)) >= 0:
            digest = xxh3_64_hexdigest(self._bytes[block * SIZE : (block + 1) * SIZE])
            if digest != self._digests[block * DIGITS : (block + 1) * DIGITS]:
                if not self._intact():
                    raise damaged(self._file, f"block {block} of {SIZE} bytes")
                logger.warning("%s: intact, but its record has other digests; they are not used", self._file)
                self._unread = bytearray(len(self._unread))
            self._unread[block] = 0

    @cached_property
    def _unread(self) -> bytearray:
        """A byte for each block, 1 until it is compared."""
        count = -(-len(self._bytes) // SIZE)
        known = len(self._digests) == count * DIGITS
        if not known:
            _tell("%s: no digests of the blocks of its shards, so damage is not noticed", self._file.parent)
        return bytearray([known]) * count

    @cached_property
    def _digests(self) -> str:
        try:
            return str(read_json(self._file.with_suffix(".json"))[KEY][self._file.suffix[1:]])
        except (ValueError, LookupError, TypeError):
            return ""


def encode_again(shard: Path) -> str:
    """Return the remedy for a damaged file of a part. Snakemake makes the part if both files are lost."""
    folder = shard.parents[1]
    lost = f"{folder / 'metadata.json'} and {folder / 'train' / shard.stem}.json"
    return f"delete {lost}, and run `snakemake datasets/{folder.name}`, which encodes the part again"


def damaged(shard: Path, place: str, problem: str = "differs from what was encoded") -> DamagedShard:
    """Return the error of a shard that is damaged at a place."""
    remedy = f"{encode_again(shard)}. Then run again (`spider data verify` finds other damage)"
    return DamagedShard(f"{shard}, {place}: {problem}, the shard is damaged; {remedy}")
