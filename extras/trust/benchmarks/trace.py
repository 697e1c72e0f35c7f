"""Measure the index of a training text: its speed and size, and the time of a search.

    python -m extras.trust.benchmarks.trace

It indexes the default text (`make run`) in a temporary folder, and searches 2,000 texts of 20 to 200 bytes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from spider_trust.text_index import build, open_index, stretches

from benchmarks.common import ROOT, show
from spider.data.shards import Shards, load_metadata

LEAST = 20


def measure_trace(count: int = 1000) -> None:
    """Print the speed, the size, and what searches in and outside of the text find."""
    folder = ROOT / "results/shards/pydocs"
    parts = [shard.part for shard in load_metadata(folder).splits["train"].shards]
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch) / f"{part}.json" for part in parts]
        build(folder, parts[0], paths[0])  # compile
        began = time.perf_counter()
        built = [build(folder, part, path) for part, path in zip(parts, paths, strict=True)]
        seconds = time.perf_counter() - began
        size = sum(piece.bytes for one in built for piece in one.pieces)
        pieces = [piece for path in paths for piece in open_index(path, folder)]
        view, draw = Shards(folder, "train"), np.random.default_rng(0)
        inside, outside, took = 0, 0, 0.0
        for number in range(2 * count):
            length = int(draw.integers(LEAST, 200))
            text = b""
            while len(text) < length:  # a stretch of one document
                ids = view.read(int(draw.integers(view.tokens - length)), length)
                text = view.vocabulary.raw(ids) if (ids < 256).all() else b""
            if number % 2:
                text = bytes(draw.permutation(np.frombuffer(text, np.uint8)))
            began = time.perf_counter()
            found = [*stretches(pieces, text, LEAST)]
            took += time.perf_counter() - began
            inside += not number % 2 and found == [(0, length)]
            outside += number % 2 and not found
        columns = ["what", "measured", "goal"]
        rows = [
            ["index, MB/s", f"{size / seconds / 1e6:.1f}", "8"],
            ["bytes of the index for a byte of text", f"{sum(one.size for one in built) / size:.2f}", "5"],
            ["texts of the corpus found whole", f"{inside} of {count}", f"{count}"],
            ["shuffled texts not found", f"{outside} of {count}", f"{count}"],
            ["search, ms", f"{1000 * took / count / 2:.2f}", "5"],
        ]
        show("spider trace", columns, rows)


if __name__ == "__main__":
    measure_trace()
