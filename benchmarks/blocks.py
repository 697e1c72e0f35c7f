"""Measure what comparing the blocks of shards takes from a training's loader, as a share of a step.

    python benchmarks/blocks.py [--quick] [--json FILE] [--folder FOLDER]

A shard of random text, which is in memory, is read in shuffled windows, with the digests of its blocks and
without. A step of the GPT of `config.yaml`, the quickest step of the default run, is timed in the same
rounds. Times are processor seconds of one thread, and figures are medians of the rounds.

Columns:
    first time      Most rows lie in a block that was not compared before, as in a training that reads a small
                    part of large shards. A training that reads all of them compares 16 to 128 times less.

    again           The same rows once more.

    disk            What the process reads from the disk for a row, after the shard left the memory.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import yaml
from common import ROOT, parser, report

from spider.config import load_config
from spider.data.blocks import KEY
from spider.data.loader import Loader
from spider.data.packing import PackedRows, pack
from spider.data.shards import Shards
from spider.files import read_json, write_json
from spider.model import build_model
from spider.training.optim import build_optimizer

sys.path.append(str(ROOT))
from tests.unit.small_datasets import shards_of_ids

WAYS = ("first time", "again")
NAMES = ("without", "with")
#: Largest share of a step.
GOAL = 0.01
#: Tokens of a document.
DOCUMENT = 700


def write(folder: Path, tokens: int) -> None:
    """Write a dataset of documents of random letters, and the same one without digests."""
    ids = np.random.default_rng(0).integers(97, 123, (tokens // DOCUMENT, DOCUMENT), "<u2")
    ids[:, 0], ids[:, -1] = 257, 258
    shards_of_ids(folder / "with", [ids.ravel()], [np.arange(len(ids)) * DOCUMENT])
    shutil.copytree(folder / "with", folder / "without", copy_function=os.link)
    record = folder / "without/train/000.json"
    write_json(record, {key: value for key, value in read_json(record).items() if key != KEY})


def opened(folder: Path, seq_len: int, packed: bool) -> Loader:
    shards = Shards(folder, "train")
    plan = PackedRows.open(folder, shards, seq_len) if packed else None
    return Loader(shards, packed=plan, seq_len=seq_len, seed=0, rows=1)


def seconds(call: Callable[..., object], *arguments: object) -> float:
    began = time.process_time()
    call(*arguments)
    return time.process_time() - began


def stepper(seq_len: int) -> Callable[[], None]:
    """Return a step of the GPT on one row."""
    raw = yaml.safe_load((ROOT / "config.yaml").read_text())
    spec = load_config({**raw, "runs": {"gpt": raw["runs"]["gpt"]}}).stage("gpt", "main")
    torch.manual_seed(0)
    model = build_model(spec.model).train()
    optimizer = build_optimizer(model, spec.optimizer, spec.settings.lr, torch.float32)
    ids = torch.randint(32, 127, (1, seq_len + 1))

    def step() -> None:
        model(ids[:, :-1], ids[:, 1:]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def disk(folder: Path, seq_len: int, rows: int) -> float:
    """Return the bytes that are read from the disk for a row, of so many rows."""
    with open(folder / "train/000.bin", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    loader = opened(folder, seq_len, packed=False)
    before = read_bytes()
    loader.read(np.arange(rows))
    return (read_bytes() - before) / rows


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    rounds, tokens, rows = (2, 1 << 21, 32) if options.quick else (9, 1 << 26, 512)
    table, figures = [], {}
    with tempfile.TemporaryDirectory(prefix="blocks-", dir=options.folder) as scratch:
        folder = Path(scratch)
        write(folder, tokens)
        for seq_len in (256, 2048):
            for name in ("with", "without"):
                pack(folder / name, seq_len)
            step = stepper(seq_len)
            disks = [disk(folder / name, seq_len, rows) for name in NAMES]
            for packed in (False, True):
                found: list[dict[str, float]] = []
                for number in range(rounds):
                    samples = np.arange(number * rows, (number + 1) * rows)
                    opened(folder / "with", seq_len, packed).read(samples)  # into memory
                    one = {"step": seconds(step)}
                    for name in NAMES:
                        loader = opened(folder / name, seq_len, packed)
                        one |= {f"{way}, {name}": seconds(loader.read, samples) / rows for way in WAYS}
                    for way in WAYS:
                        one[way] = (one[f"{way}, with"] - one[f"{way}, without"]) / one["step"]
                    found.append(one)
                name = f"{'packed' if packed else 'windows'}, {seq_len:,}"
                one = {key: median(each[key] for each in found) for key in found[0]}
                figures[name] = {**one, "disk": [] if packed else disks}
                times = [" and ".join(f"{1e6 * one[f'{way}, {n}']:.1f}" for n in NAMES) for way in WAYS]
                read = " and ".join(f"{each / 1024:.0f}" for each in figures[name]["disk"])
                shares = [f"{one[way]:+.3%}" for way in WAYS]
                table.append([name, f"{1e3 * one['step']:.1f} ms", *times, *shares, read])
                if not options.quick and max(one[way] for way in WAYS) >= GOAL:
                    print(f"MISSED, {name}: {one['first time']:.3%} of a step, goal {GOAL:.0%}")
    columns = ["rows", "step, a row", *(f"{way}, us" for way in WAYS), *(f"{way}, of a step" for way in WAYS)]
    title = "The loader's thread, a row, without and with digests"
    report(title, [*columns, "disk, KiB"], table, figures, options, ["torch", "xxhash"])


if __name__ == "__main__":
    main()
