"""Measure general-purpose compressors on a text, alone and primed with a model's training text.

A model's bits per byte are a compression rate. The fair baseline is a compressor at a strong setting, on
*the same bytes* and after *the same text*. Its rate counts the bits that the held-out text adds to a file
which begins with the training text:

    bpb = 8 * (size of compressed(given + text) - size of compressed(given)) / bytes of text.

Two differences remain, and the reports name them. A compressor keeps learning from the held-out text and
pays for its container (some tens of bytes). A model is frozen, may have read its text several times, and its
weights are not counted.

PPMd (Shkarin's order-12 variant H, as in 7-Zip) is both the strongest and the fastest of them. It codes byte
after byte, so the length of its output gives the cost of each piece of the text to within some bytes.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Sequence

import brotli
import pyppmd
import zstandard

#: The command line that each compressor's rate stands for; the strongest first.
COMPRESSORS = {
    "ppmd": "7z PPMd, order 12",
    "xz": "xz -9",
    "zstd": "zstd --ultra -22",
    "brotli": "brotli -q 11",
    "bz2": "bzip2 -9",
    "zlib": "zlib -9",
}
_LIBRARY = {"ppmd": pyppmd, "zstd": zstandard, "brotli": brotli}
_ORDER = 12


def version(name: str) -> str:
    """Return the version of a compressor's library."""
    return str(getattr(_LIBRARY.get(name, zlib), "__version__", "")) or "of Python"


def bits(name: str, given: bytes, texts: Sequence[bytes]) -> list[float]:
    """Return the bits that each text, on its own, adds to a compressed file that begins with ``given``."""
    if name == "ppmd":
        return [sum(Ppmd(given, len(text)).bits([text])) for text in texts]
    size = _SIZE[name]
    before = size(given) if given else 0
    return [8.0 * (size(given + text) - before) for text in texts]


class Ppmd:
    """A PPMd encoder that has read ``given`` and will read ``expected`` more bytes."""

    def __init__(self, given: bytes, expected: int) -> None:
        # Reserve enough: PPMd resets its model when its memory is full.
        memory = min(max(1 << 26, 40 * (len(given) + expected)), 2000 << 20)
        self._encoder = pyppmd.Ppmd7Encoder(_ORDER, memory)
        self._encoder.encode(given)

    def bits(self, pieces: Sequence[bytes]) -> list[float]:
        """Return the bits that each piece adds, one after the other. This ends the stream: call it once."""
        sizes = [len(self._encoder.encode(piece)) for piece in pieces]
        sizes[-1] += len(self._encoder.flush())
        return [8.0 * size for size in sizes]


_SIZE: dict[str, Callable[[bytes], int]] = {
    "xz": lambda text: len(lzma.compress(text, preset=9)),
    # Create a zstd compressor for each text: an old one keeps its memory.
    "zstd": lambda text: len(zstandard.ZstdCompressor(level=22).compress(text)),
    "brotli": lambda text: len(brotli.compress(text, quality=11, lgwin=24)),
    "bz2": lambda text: len(bz2.compress(text, 9)),
    "zlib": lambda text: len(zlib.compress(text, 9)),
}
