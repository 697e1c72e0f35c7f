"""Candidates of windows of one giant document: peak memory and speed.

A loader looks up `PROPOSED` ids at once, in windows of 256. They lie at random places of the document, in a
row at its end, or at random places of small documents of the same made-up text. Each has its own process,
and the peak memory is that of the process: the difference to small documents is what the giant one costs.

    python benchmarks/giant_document.py [--megabytes 200] [--quick] [--json FILE]
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import parser, report

from spider.config import Dataset, MockSource
from spider.config.memory import MemoryConfig
from spider.data.encode import encode_part
from spider.data.loader import PROPOSED
from spider.data.metadata import build_metadata
from spider.data.mock import WORDS, make_mock_data
from spider.data.shards import Shards
from spider.memory.proposer import Proposer
from spider.memory.store import make_memories, open_memory
from spider.model.spider.config import PRESETS
from spider.tokens import BYTES

CONFIG = MemoryConfig.model_validate(PRESETS["slim"]["memory"])
LENGTH = 256


def make(folder: Path, megabytes: int) -> None:
    """Write small documents with an n-gram index of them, and a giant document."""
    make_mock_data(folder / "small", 0.5)
    make_memories(folder / "small", CONFIG, folder / "memory", folder / "folded")
    draw = random.Random(0)
    blocks = [" ".join(draw.choices(WORDS, k=200_000))[:1_000_000] for _ in range(megabytes)]
    table = pa.table({"text": ["".join(blocks)], "id": ["giant"]})
    pq.write_table(table, folder / "giant.parquet")
    source = MockSource(kind="mock")
    dataset = Dataset(source=source, validation=0.0)
    encode_part(folder / "giant.parquet", folder / "giant", "giant", dataset)
    build_metadata(folder / "giant", "giant", dataset, source=source.described(), parts=["giant"])


def measure(
    folder: Path, data: str, spread: bool, blocks: int, pipe: multiprocessing.connection.Connection
) -> None:
    """Send the ids looked up in a second of processor time, and the process's peak memory in MB."""
    view = Shards(folder / data, "train")
    proposer = Proposer(open_memory(folder / "memory"), CONFIG, BYTES)
    proposer.windows(Shards(folder / "small", "train"), np.array([0]), LENGTH)  # compiles
    rng, count = np.random.default_rng(0), PROPOSED // LENGTH
    windows = view.tokens // LENGTH
    began = time.process_time()
    for block in range(blocks):
        last = windows - (block + 1) * count + np.arange(count)
        starts = rng.integers(0, windows, count) if spread else last
        proposer.windows(view, starts * LENGTH, LENGTH)
    seconds = time.process_time() - began
    pipe.send((blocks * count * LENGTH / seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--megabytes", type=int, default=200, help="size of the document")
    asked = options.parse_args()
    megabytes, blocks = (2, 1) if asked.quick else (asked.megabytes, 2)
    spawn, rows, figures = multiprocessing.get_context("spawn"), [], {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        maker = spawn.Process(target=make, args=(folder, megabytes))
        maker.start()
        maker.join()
        ways = {
            "small documents": ("small", True),
            f"a document of {megabytes} MB, at random places": ("giant", True),
            f"a document of {megabytes} MB, its last windows": ("giant", False),
        }
        for name, (data, spread) in ways.items():
            here, there = spawn.Pipe()
            process = spawn.Process(target=measure, args=(folder, data, spread, blocks, there))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{name}: the process ended with exit code {process.exitcode}")
            speed, peak = here.recv()
            rows.append([name, f"{speed / 1e3:.0f}", f"{peak:,.0f}"])
            figures[name] = {"ids_per_second": speed, "peak_mb": peak}
    columns = ["windows of", "kB a processor second", "peak memory, MB"]
    report("Candidates of windows", columns, rows, figures, asked, ["numpy", "numba"])


if __name__ == "__main__":
    main()
