"""Measure what the order of PPMd and the boundaries between documents are worth to compressors.

    python benchmarks/compressors.py SHARDS [--quick] [--json FILE]

SHARDS is the folder of a dataset of bytes, such as ``results/shards/pydocs`` after ``make run``. PPMd codes
the held-out text after all training text, with documents run together, at several orders. Then PPMd and xz
code documents of about 50 bytes that begin alike, run together and with free boundaries. Seconds are
processor time, and memory is that of a process of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from pathlib import Path

import numpy as np
import pyppmd
from common import parser, report

from spider.data.shards import Shards
from spider.evaluation import compressors
from spider.evaluation.text import Text, validation_stream
from spider.tokens import BYTES

ORDERS = (12, 16, 24, 32)


def documents(folder: Path, quick: bool) -> tuple[bytes, bytes]:
    """Return all training text and the held-out text, with documents run together."""
    held_out, _ = validation_stream(folder, 300_000, BYTES, 0.1)
    given = []
    for split in ("ngram", "train"):
        if any((folder / split).glob("*.bin")):
            shards = Shards(folder, split)
            tokens = min(shards.tokens, 2_000_000) if quick else shards.tokens
            given += Text.of(np.asarray(shards.read(0, tokens)), BYTES).documents()
    return b"".join(given), b"".join(Text.of(held_out, BYTES).documents())


def ppmd(order: int, given: bytes, text: bytes) -> tuple[float, float, float]:
    """Return bits per byte of a text after another one, processor seconds, and the largest memory in MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    encoder = pyppmd.Ppmd7Encoder(order, 64 * (len(given) + len(text)) + (1 << 28))
    for at in range(0, len(given), 4096):
        encoder.encode(given[at : at + 4096])
    size = len(encoder.encode(text)) + len(encoder.flush())
    seconds = time.process_time() - began
    return 8 * size / len(text), seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def short_documents(number: int) -> list[bytes]:
    """Return documents of about 50 bytes that begin alike, as lines of a log do."""
    words = np.random.default_rng(0).integers(0, 500, (number, 5))
    return [
        f"event {i}: user ".encode() + b" ".join(b"word%d" % one for one in row)
        for i, row in enumerate(words)
    ]


def boundary_gain(name: str, pieces: list[bytes]) -> float:
    """Return by how much free boundaries change the bits of documents."""
    together = b"".join(pieces)
    boundary = compressors.absent_byte(together)
    ((*_, alone),) = compressors.bits(name, b"", [[together]])
    apart = [part for one in pieces for part in (boundary, one)][1:]
    (bits,) = compressors.bits(name, b"", [apart])
    free = sum(bits[1::2]) if name == "ppmd" else compressors.boundary_bits(len(b"".join(apart)), len(pieces))
    return (sum(bits) - free) / alone - 1


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("shards", type=Path)
    options = arguments.parse_args()
    given, text = documents(options.shards, options.quick)
    figures: dict[str, float] = {}
    rows = []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for order in ORDERS:
            bits, seconds, memory = pool.apply(ppmd, (order, given, text))
            figures |= {f"bits_{order}": bits, f"seconds_{order}": seconds, f"megabytes_{order}": memory}
            rows.append([f"PPMd, order {order}", f"{bits:.4f}", f"{seconds:.1f} s", f"{memory:,.0f} MB"])
    for name in ("ppmd", "xz"):
        for number in (60, 120):
            figures[f"{name}_{number}"] = gain = boundary_gain(name, short_documents(number))
            rows.append([f"{name}, boundaries of {number} short documents", f"{gain:+.1%}", "", ""])
    title = f"Compressors, given {len(given) / 1e6:.1f} MB"
    report(title, ["", "bits per byte", "time", "memory"], rows, figures, options, ["pyppmd"])


if __name__ == "__main__":
    main()
