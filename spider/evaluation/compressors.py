"""Measure general-purpose compressors on a text, after they have read a model's training text.

A model's bits per byte are a compression rate. The fair baseline is a compressor at a strong setting, on
*the same bytes* and after *the same text*. A compressor that codes a stream first reads the training text,
``given``. Copies of its state then code texts, and no copy learns from another. The bits of a text are

    8 * (bytes that a copy outputs for the text and its end - bytes that a copy outputs for its end alone).

One copy codes the whole held-out text: the figure *with what came before*. Further copies code one document
each: the figure of *each document alone*. A copy is a fork of the process, because no library copies its
state. So a process of its own does this work: it has one thread and does not import torch.

A model reads for free where a document begins. So a byte that no text has stands between documents, and its
bits are subtracted. PPMd codes byte after byte, so the length of its output gives the cost of each piece of
the text to within some bytes, and the bits of the boundaries are measured. The others output blocks: theirs
are estimated as `boundary_bits`, what the places cost without the text. That favours the compressor, because
the text tells where it may end: PPMd needs fewer.

zpaq, a mixer of context models, is the strongest. Its library compresses whole buffers, so it is not measured
on each document alone. The bits of a text are 8 * (size of compressed(given + text) - size of
compressed(given)).

PPMd (Shkarin's variant H of order 24, as in 7-Zip) is the strongest of the others, and the fastest.
"""

from __future__ import annotations

import bz2
import lzma
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import NamedTuple

import brotli
import pyppmd
import zstandard

#: The command line that each compressor's rate stands for; the strongest first.
COMPRESSORS = {
    "ppmd": "7z PPMd, order 24",
    "xz": "xz -9",
    "zstd": "zstd --ultra -22",
    "brotli": "brotli -q 11",
    "bz2": "bzip2 -9",
    "zlib": "zlib -9",
    "zpaq": "zpaq -m511 (cannot be reset)",
}
_PACKAGES = {"ppmd": "pyppmd", "zstd": "zstandard", "brotli": "brotli", "zpaq": "zpaq"}
_ORDER = 24
_PPMD_MEMORY = 2000 << 20
#: Bytes of prose that fit PPMd's largest memory, at 35 bytes a byte. When it is full, PPMd begins anew.
PPMD_HOLDS = _PPMD_MEMORY // 35
#: Bytes that a compressor is given at a time. xz codes them when it gets the next ones, so each copy does.
_PIECE = 1 << 12
#: Niceness of a compressor, so that a training that runs beside an evaluation keeps its core.
_NICE = 5
#: Strongest level in one block of up to 2 GB; text, as zpaq detects it by itself in the default run.
_ZPAQ = f"""
import os, sys, zpaq
os.nice({_NICE})
text = sys.stdin.buffer.read()
print(len(zpaq.compress(text, method="511,128,1", threads=1)))
"""


def version(name: str) -> str | None:
    """Return the version of a compressor's library; None if it is not installed."""
    if name not in _PACKAGES:
        return "of Python"
    try:
        return version_of(_PACKAGES[name])
    except PackageNotFoundError:
        return None


def bits(name: str, given: bytes, texts: Sequence[Sequence[bytes]]) -> list[list[float]]:
    """Return the bits of each text, which a copy of a compressor codes that has read ``given``.

    Args:
        name: A compressor, but not zpaq.
        texts: Each text in pieces.

    Returns:
        The bits of each piece of each text. Only their sum is exact, unless the compressor is PPMd.
    """
    request = pickle.dumps((name, given, texts))
    return pickle.loads(_output([sys.executable, "-m", __name__], request))


def zpaq_size(text: bytes) -> int:
    """Return the size in bytes of a text that zpaq has compressed."""
    return int(_output([sys.executable, "-c", _ZPAQ], text))


def same_tables(given: int, text: int) -> bool:
    """Return whether zpaq codes ``given`` bytes, and these and ``text`` more, with tables of one size.

    Otherwise the difference of both sizes is not the cost of the text. The size of the tables is a power of
    two that depends on the size of the block, up to 2 GB (libzpaq, ``compressBlock``).
    """
    before = (given + 4095).bit_length()
    after = (given + text + 4095).bit_length()
    return not given or max(20, before) == max(20, after) <= 31


def absent_byte(text: bytes) -> bytes:
    """Return the largest byte that a text does not have, 0xFF for UTF-8; no byte if it has all 256."""
    every = (bytes([value]) for value in range(255, -1, -1))
    return next((byte for byte in every if byte not in text), b"")


def boundary_bits(size: int, documents: int) -> float:
    """Return log2 C(size - 1, documents - 1): the bits that name where documents begin in ``size`` bytes."""
    nats = math.lgamma(size) - math.lgamma(documents) - math.lgamma(size - documents + 1)
    return nats / math.log(2)


def _output(command: list[str], text: bytes) -> bytes:
    """Run a command on a text and return what it prints."""
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"a compressor ended with status {done.returncode}: {reason}")
    return done.stdout


# ------------------------------------------------------------------------------- in a process of its own


class _Stream(NamedTuple):
    """A compressor."""

    code: Callable[[bytes], bytes]
    """Codes further bytes and returns new output."""
    end: Callable[[], bytes]
    """Ends the stream and returns the rest of the output."""
    flush: Callable[[], bytes] = bytes
    """Codes what is still buffered; without it, each copy of brotli or zstd codes up to 16 MB again."""


def _open(name: str, size: int) -> _Stream:
    """Start a compressor on a stream of at most ``size`` bytes."""
    match name:
        case "ppmd":
            ppmd = pyppmd.Ppmd7Encoder(_ORDER, min(max(1 << 28, 64 * size), _PPMD_MEMORY))
            return _Stream(ppmd.encode, ppmd.flush)
        case "xz":
            xz = lzma.LZMACompressor(preset=9)
            return _Stream(xz.compress, xz.flush)
        case "zstd":
            parameters = zstandard.ZstdCompressionParameters.from_level(22, source_size=size)
            zstd = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
            return _Stream(zstd.compress, zstd.flush, lambda: zstd.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        case "brotli":
            window = brotli.Compressor(quality=11, lgwin=24)
            return _Stream(window.process, window.finish, window.flush)
        case "bz2":
            blocks = bz2.BZ2Compressor(9)
            return _Stream(blocks.compress, blocks.flush)
        case _:
            deflate = zlib.compressobj(9)
            return _Stream(deflate.compress, deflate.flush, lambda: deflate.flush(zlib.Z_SYNC_FLUSH))


def _sizes(stream: _Stream, pieces: Sequence[bytes], sender: Connection) -> None:
    """Send the bytes of output before each piece, after the last one, and after the end of the stream."""
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(stream.code(piece)))
    sender.send([*ends, ends[-1] + len(stream.end())])


def _serve() -> None:
    """Answer one request of `bits`."""
    os.nice(_NICE)
    name, given, texts = pickle.load(sys.stdin.buffer)
    context = multiprocessing.get_context("fork")
    stream = _open(name, len(given) + max(sum(map(len, pieces)) for pieces in texts))
    if given:
        for at in range(0, len(given), _PIECE):
            stream.code(given[at : at + _PIECE])
        stream.flush()
    answers = []
    for pieces in [[], *texts]:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_sizes, args=(stream, pieces, sender))
        child.start()
        sender.close()
        answers.append(receiver.recv())
        child.join()
    (_, end_alone), *found = answers
    for sizes in found:
        sizes[-2:] = [sizes[-1] - end_alone]
    pickle.dump([[8.0 * (b - a) for a, b in pairwise(sizes)] for sizes in found], sys.stdout.buffer)


if __name__ == "__main__":
    _serve()
