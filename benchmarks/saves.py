"""Seconds and memory of a save by several processes, together and as before: gathered on the first one.

    python -m benchmarks.saves [--megabytes 200] [--turns 5] [--json FILE]

Each process holds a slice of every tensor, as with ``parallel: fsdp``, and exchanges by gloo. Seconds run
from the start of a save to its end on the first process, and those that a training waits are a part of them.
The memory is that of the first process beyond what it held before its first save, without mapped files.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import parser, report
from spider.checkpoints.load import not_finite
from spider.checkpoints.save import Saver, save
from spider.processes.parallel import full_tensor
from spider.processes.world import World, join
from tests.unit.processes.test_saving_together import run_together
from tests.unit.records import saved


class Gathering(Saver):
    """Save as before: every process gathers all tensors, and the first one copies and writes them."""

    def start(self, tensors: Any, record: dict[str, Any]) -> None:
        assert not not_finite(self._gather(tensors))
        if self._world.first:
            write = partial(save, self.root, dict(self._copies), record)
            self._pending = self._thread.submit(self._save, write, time.perf_counter())

    def _gather(self, tensors: Any) -> Any:
        for name, tensor in tensors.items():
            gathered = full_tensor(tensor)
            if self._world.first:
                self._copies.setdefault(name, torch.empty_like(gathered)).copy_(gathered)
            yield name, gathered


def state(world: World, megabytes: int) -> dict[str, torch.Tensor]:
    """Return matrices of 4 MB in three equal kinds. Each process holds its rows of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world.size,)) if world.size > 1 else None
    tensors = {}
    for i in range(megabytes // 12):
        for name in (f"model.{i}", f"optimizer.{i}.first", f"optimizer.{i}.second"):
            own = torch.randn(1024 // world.size, 1024)
            tensors[name] = DTensor.from_local(own, mesh, [Shard(0)]) if mesh else own
    return tensors


def resident() -> float:
    """Return the megabytes of this process that are not those of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1000


def measure(folder: Path, kind: type[Saver], megabytes: int, turns: int, found: Any) -> None:
    """Save in one of several processes; the first one puts seconds, those that training waits, and MB."""
    with join() as world:
        tensors = state(world, megabytes)
        saver = kind(folder, None, world)
        held = [resident()]
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.005):
                held.append(resident())

        watching = threading.Thread(target=watch)
        watching.start()
        times = []
        for turn in range(turns + 1):
            world.highest(turn)  # all begin together
            began = time.perf_counter()
            saver.start(tensors, saved(turn))
            waited = time.perf_counter() - began
            saver.settle()
            times.append((time.perf_counter() - began, waited))
        ended.set()
        watching.join()
        if world.first:  # the first save allocates the memory
            found.put((*map(median, zip(*times[1:], strict=True)), max(held) - held[0]))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, default=200, help="size of the state")
    options.add_argument("--turns", type=int, default=5)
    options = options.parse_args()
    megabytes, turns = (24, 1) if options.quick else (options.megabytes, options.turns)
    rows, figures = [], {}
    for processes in (1, 2, 4, 8):
        measured = []
        for kind in (Gathering, Saver):
            found = multiprocessing.get_context("forkserver").SimpleQueue()
            with tempfile.TemporaryDirectory() as folder:
                given = (Path(folder), kind, megabytes, turns, found)
                assert run_together(processes, measure, *given) == [0] * processes
            measured.append(found.get())
        figures[processes] = list(zip(*measured, strict=True))
        shown = (f"{old:.2f} {new:.2f} {new / old:.2f}" for old, new in figures[processes])
        rows.append([str(processes), *shown])
    columns = ["processes", "seconds", "of them, training waits", "MB of the first process"]
    title = f"A save of {megabytes} MB: gathered, together, ratio"
    report(title, columns, rows, figures, options, ["torch", "safetensors"])


if __name__ == "__main__":
    main()
