"""What general-purpose compressors make of the text a model is scored on.

A byte-level model's bits per byte can be read as a compression rate, so the fair yardstick is a compressor at
a strong setting on *the same bytes*. The same token array that is scored comes in here, and its special ids
are dropped: no second reading of the data, hence no way to compare different texts. A compressor pays for its
container (some tens of bytes) and needs no decoder of megabytes as a model does; neither is corrected for.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable

import numpy as np
import zstandard

#: The command line each figure stands for.
SETTINGS: dict[str, str] = {
    "zlib": "zlib -9",
    "bz2": "bzip2 -9",
    "xz": "xz -9",
    "zstd": "zstd --ultra -22",
}

_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "zlib": lambda text: zlib.compress(text, 9),
    "bz2": lambda text: bz2.compress(text, 9),
    "xz": lambda text: lzma.compress(text, format=lzma.FORMAT_XZ, preset=9),
    "zstd": lambda text: zstandard.ZstdCompressor(level=22).compress(text),
}


def text_bytes(tokens_N: np.ndarray) -> bytes:
    """The raw bytes of a token stream: every id below 256, in order; special ids are dropped."""
    return tokens_N[tokens_N < 256].astype(np.uint8).tobytes()


def bits_per_byte(tokens_N: np.ndarray) -> dict[str, float]:
    """Compressed bits for each byte of the stream's text, by compressor, in the order of `SETTINGS`.

    Raises:
        ValueError: the stream holds no bytes.
    """
    text = text_bytes(tokens_N)
    if not text:
        raise ValueError("there is no text to compress: the token stream holds special ids only")
    return {name: 8 * len(compress(text)) / len(text) for name, compress in _COMPRESS.items()}
