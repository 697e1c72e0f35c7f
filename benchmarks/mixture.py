"""Time the loader of a mixture of 35 datasets beside that of one dataset.

    python benchmarks/mixture.py [--quick] [--json FILE]

The weights go from 0.3 to 1e-8. A batch of 64 rows is read by the loader's thread and made into inputs and
targets, as in training, but without a model, so nothing hides a slow loader. Both loaders take turns for 256
batches, so a change of the machine's speed affects both. The share is the median of the rounds. Opening is
timed with the caps of ten datasets, whose switches are found then.

The time of the thread alone is shown as well: that of one row of a block, of one dataset and of the mixture.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from common import ROOT, parser, report

from spider.data.loader import DEPTH, Loader, MixedLoader
from spider.data.mixture import with_caps
from spider.data.packing import PackedRows, pack
from spider.data.shards import Shards

sys.path.append(str(ROOT))
from tests.unit.small_datasets import shards_of_ids

SOURCES = 35
WEIGHTS = np.array([0.3, 0.2, *np.geomspace(0.1, 1e-8, SOURCES - 2)])
ROWS, BATCHES = 64, 256
#: Bytes of a document. Most rows hold several.
DOCUMENT = 700


def write(folder: Path, documents: int, seq_len: int, seed: int) -> None:
    """Write a dataset of documents of random letters, and pack it."""
    ids = np.random.default_rng(seed).integers(97, 123, (documents, DOCUMENT)).astype("<u2")
    ids[:, 0], ids[:, -1] = 257, 258
    shards_of_ids(folder, [ids.ravel()], [np.arange(documents) * DOCUMENT])
    pack(folder, seq_len)


def opened(folder: Path, seq_len: int, packed: bool) -> Loader:
    """Open one dataset."""
    shards = Shards(folder, "train")
    rows = PackedRows.open(folder, shards, seq_len) if packed else None
    return Loader(shards, packed=rows, seq_len=seq_len, seed=0, rows=ROWS)


def batch_seconds(loader: Loader) -> float:
    """Return the seconds between two batches at full speed, after the blocks that were read ahead."""
    for _ in range((DEPTH + 2) * loader._steps):
        next(loader)
    began = time.perf_counter()
    for _ in range(BATCHES):
        torch.from_numpy(next(loader).rows_BT1).long()
    return (time.perf_counter() - began) / BATCHES


def row_seconds(loader: Loader) -> float:
    """Return the seconds that the loader's thread takes for a row."""
    rows = loader._steps * ROWS
    began = time.perf_counter()
    loader.read(np.arange(9 * rows, 10 * rows))
    return (time.perf_counter() - began) / rows


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rounds, documents = (3, 2_000) if options.quick else (9, 6_000)
    names = [f"s{i:02}" for i in range(SOURCES)]
    weights = dict(zip(names, (WEIGHTS / WEIGHTS.sum()).tolist(), strict=True))
    table, figures = [], {}
    for seq_len in (256, 2048):
        with tempfile.TemporaryDirectory(prefix="mixture-") as scratch:
            root = Path(scratch)
            write(root / "one", documents, seq_len, 0)
            for i, name in enumerate(names):
                write(root / name, documents, seq_len, i)
            for packed in (False, True):
                one = opened(root / "one", seq_len, packed)
                gc.collect()  # closes the files of the pass before
                threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
                began = time.perf_counter()
                sources = {name: opened(root / name, seq_len, packed) for name in names}
                mixes, _ = with_caps([(0, weights)], {name: 2 * sources[name].windows for name in names[:10]})
                mixed = MixedLoader(sources, mixes[0][1], mixes[1:], rows=ROWS)
                opening = time.perf_counter() - began
                next(mixed)
                threads, files = threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - files
                pairs = [(batch_seconds(one), batch_seconds(mixed)) for _ in range(rounds)]
                one.close()
                mixed.close()
                batch, share = median(a for a, _ in pairs), median(m / a - 1 for a, m in pairs)
                rows = [median(row_seconds(loader) for _ in range(9)) for loader in (one, mixed)]
                way = f"{'packed' if packed else 'windows'}, {seq_len:,}"
                table.append([way, f"{1e6 * batch:.0f} us", f"{share:+.1%}"])
                table[-1] += [" and ".join(f"{1e6 * each:.2f}" for each in rows) + " us"]
                table[-1] += [f"{opening:.3f} s", str(threads), str(files)]
                figures[way] = {"share": share, "batch": batch, "rows": rows, "opening": opening}
                figures[way] |= {"threads": threads, "files": files}
    columns = [
        "rows",
        "one dataset, a batch",
        "a mixture takes",
        "thread, a row",
        "opening",
        "threads",
        "files",
    ]
    report(
        "A mixture of 35 datasets beside one dataset", columns, table, figures, options, ["numpy", "torch"]
    )


if __name__ == "__main__":
    main()
