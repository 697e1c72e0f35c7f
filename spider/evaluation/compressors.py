"""What general-purpose compressors make of the text a model is scored on.

A model's bits per byte can be read as a compression rate, so the fair yardstick is a compressor at a strong
setting on *the same bytes*: those of the very array that is scored, special ids dropped. A compressor pays
for its container (some tens of bytes) and needs no decoder of megabytes as a model does; neither is corrected
for.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from functools import partial

import zstandard

#: The command line each figure stands for.
SETTINGS = {"zlib": "zlib -9", "bz2": "bzip2 -9", "xz": "xz -9", "zstd": "zstd --ultra -22"}
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "zlib": partial(zlib.compress, level=9),
    "bz2": bz2.compress,  # at its strongest, 9
    "xz": partial(lzma.compress, preset=9),
    "zstd": partial(zstandard.compress, level=22),
}


def bits_per_byte(text: bytes) -> dict[str, float]:
    """Compressed bits for each byte, by compressor, in the order of `SETTINGS`; `ValueError` without text."""
    if not text:
        raise ValueError("there is no text to compress: the token stream holds special ids only")
    return {name: 8 * len(compress(text)) / len(text) for name, compress in _COMPRESS.items()}
