"""Measure what saving a checkpoint takes from the training beside it: interpreter, memory, processor time.

`spider.checkpoints.save.Saver` saves the weights and two moments of a training, as AdamW has them. The main
thread ticks each millisecond meanwhile, as a training queues kernels. Each of two ways runs in a process of
its own. The first makes one bytes object of each file (``safetensors.torch.save``), the second is Spider's.
Both give the same files, which is checked.

    python benchmarks/saver.py [--quick] [--json FILE] [--folder FOLDER]

Columns:
    longest gap     The longest time between two ticks while the checkpoint is written.

    memory          The peak of the process beside the training's tensors, as a multiple of their size. The
                    copy that the training continues beside is 1.

    processor       Processor seconds for each GiB, of all threads, with the copy, the hashes and the check
                    that all numbers are finite.

Figures are the best of several saves: another program on the machine can only add to them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from common import ROOT, parser, report

from spider.checkpoints import save
from spider.config import StageSettings
from spider.sealed import SealedFile

sys.path.append(str(ROOT))
from tests.unit.records import saved

WAYS = ("one bytes object", "now")
#: Longest gap that a training may see, in seconds.
GOAL = 0.05


def one_bytes_object(path: Path, tensors: Mapping[str, torch.Tensor]) -> SealedFile:
    """Write a file as Spider did before, and read it again for its hash."""
    path.write_bytes(safetensors.torch.save(dict(tensors)))
    return SealedFile.of(path)


def peak() -> int:
    """Return the largest resident size of this process since `forget_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(way: str, folder: str, mib: int, rounds: int) -> dict[str, Any]:
    """Save several times and return the best figures of one save, and a digest of the files."""
    torch.set_num_threads(1)
    if way == WAYS[0]:
        save._write_file = one_bytes_object
    generator = torch.Generator().manual_seed(0)
    names = ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq")
    values = (mib << 20) // 4 // len(names) // 8
    tensors = {name.format(i): torch.randn(values, generator=generator) for name in names for i in "abcdefgh"}
    size = sum(tensor.nbytes for tensor in tensors.values())
    found = []
    for number in range(1, rounds + 1):
        saver = save.Saver(Path(folder) / f"{way}-{number}", StageSettings(data="text", max_steps=1), None)
        forget_peak()
        before, cpu, gap = peak(), time.process_time(), 0.0
        saver.start(tensors, saved(1))
        last = time.perf_counter()
        while saver.newest is None:
            time.sleep(0.001)
            now = time.perf_counter()
            gap, last = max(gap, now - last), now
            saver.settle(wait=False)
        cpu = (time.process_time() - cpu) * 2**30 / size
        found.append((gap, (peak() - before) / size, cpu))
        files = saver.newest.manifest.files
        saver.close()
    digest = hashlib.sha256(json.dumps({n: f.sha256 for n, f in files.items()}).encode()).hexdigest()
    gap, memory, cpu = (min(column) for column in zip(*found, strict=True))
    return {"gap_seconds": gap, "memory": memory, "processor_seconds": cpu, "files": digest}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    options = arguments.parse_args()
    mib, rounds = (24, 1) if options.quick else (1024, 3)
    os.environ["OMP_NUM_THREADS"] = "1"
    figures: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="saver-", dir=options.folder) as scratch:
        for way in WAYS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                figures[way] = one = pool.apply(measure, (way, scratch, mib, rounds))
            gap = f"{1000 * one['gap_seconds']:.0f} ms"
            rows.append([way, gap, f"{one['memory']:.2f}x", f"{one['processor_seconds']:.2f} s"])
    if len({one["files"] for one in figures.values()}) > 1:
        sys.exit("the two ways wrote other files")
    if not options.quick and figures["now"]["gap_seconds"] >= GOAL:
        print(f"MISSED: longest gap {figures['now']['gap_seconds']:.3f} s, goal {GOAL} s")
    columns = ["way", "longest gap", "memory", "processor, a GiB"]
    report(f"A checkpoint of {mib} MiB", columns, rows, figures, options, ["torch", "safetensors"])


if __name__ == "__main__":
    main()
