"""Measure the loader beside an iterable dataset that makes two `torch.tensor` for each sample.

Both read the same shard of random bytes in windows of seq_len + 1 and return batches of 64 rows on one core.
The loader per sample does what the original's does: slices of a memory map, a `torch.tensor` for inputs and
one for targets, a mask for PAD, and `DataLoader` without workers. Ours is timed as it feeds a GPU, in uint16
that the device widens, and with inputs and labels widened to int64 on the CPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from common import interleaved, parser, report
from torch.utils.data import DataLoader, IterableDataset

from spider.config import Dataset
from spider.data.loader import Loader
from spider.data.metadata import build_metadata
from spider.data.shards import Shards
from spider.data.writing import writing
from spider.tokens import BYTES

BATCH = 64


class PerSample(IterableDataset):
    def __init__(self, path: Path, seq_len: int) -> None:
        self.path, self.seq_len = path, seq_len

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokens = np.memmap(self.path, dtype="<u2", mode="r")
        for start in range(0, len(tokens) - self.seq_len, self.seq_len + 1):
            window = tokens[start : start + self.seq_len + 1]
            inputs = torch.tensor(window[:-1], dtype=torch.long)
            targets = torch.tensor(window[1:], dtype=torch.long)
            targets[targets == BYTES.pad] = -100
            yield inputs, targets


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    repeats, tokens = (3, 2_000_000) if options.quick else (7, 10_000_000)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    rows, figures = [], {}
    with tempfile.TemporaryDirectory(prefix="loader-") as scratch:
        folder = Path(scratch)
        ids = np.random.default_rng(0).integers(0, 256, tokens).astype("<u2")
        dataset = Dataset.model_validate({"source": {"kind": "pydocs"}})
        with writing(folder, "000", dataset, BYTES) as made:
            made.writers["train"].write(ids, np.zeros(0, np.int64))
        build_metadata(folder, "ids", dataset, source={}, parts=["000"])
        shards, path = Shards(folder, "train"), folder / "train/000.bin"
        for seq_len in (256, 2048):
            rate = measure(shards, path, seq_len, 10 if options.quick else 40, repeats)
            times = {name: value / rate["torch.tensor per sample"] for name, value in rate.items()}
            figures[f"seq_len {seq_len}"] = {"rows_per_s": rate, "times": times}
            for name, value in rate.items():
                rows.append([str(seq_len), name, f"{value:,.0f}", f"{times[name]:.1f}x"])
    report(
        f"Loading batches of {BATCH} rows",
        ["seq_len", "way", "rows/s", "against the original's"],
        rows,
        figures,
        options,
        ["numpy", "torch"],
    )


def measure(shards: Shards, path: Path, seq_len: int, batches: int, repeats: int) -> dict[str, float]:
    """Return the rows per second of each way, from iterators that have begun."""

    def ours() -> Iterator[np.ndarray]:
        for batch in Loader(shards, seq_len=seq_len, rows=BATCH, seed=0):
            yield batch.rows_BT1

    def widened() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rows in ours():
            tokens = torch.from_numpy(rows).long()
            labels = tokens[:, 1:]
            yield tokens[:, :-1], labels.masked_fill(labels == BYTES.pad, -100)

    def per_sample() -> Iterator[object]:
        while True:
            yield from DataLoader(PerSample(path, seq_len), batch_size=BATCH, drop_last=True)

    def timed(iterator: Iterator[object], count: int) -> Callable[[], None]:
        next(iterator)

        def way() -> None:
            for _ in islice(iterator, count):
                pass

        return way

    counts = {
        "torch.tensor per sample": batches,
        "ours, int64 on the CPU": 10 * batches,
        "ours, uint16": 10 * batches,
    }
    iterators = (per_sample(), widened(), ours())
    ways = {name: timed(it, counts[name]) for name, it in zip(counts, iterators, strict=True)}
    seconds, _ = interleaved(ways, repeats)
    return {name: counts[name] * BATCH / value for name, value in seconds.items()}


if __name__ == "__main__":
    main()
