"""Count what a training step asks of a GPU, without a GPU: launches, copies, waits, the host's time.

    python benchmarks/gpu/count.py headline                     a preset's name, or: headline, gpt-d12
    python benchmarks/gpu/count.py headline --changes '{defaults: {micro_batch: 224, grad_accum: 2}}'
    python benchmarks/gpu/count.py spider-150m --kernels 40     the work that is done most often

It needs torch for CUDA and a C compiler, and no device (`nodevice`). The real trainer runs, and all that the
host does is real; the milliseconds of a GPU are a model (`model.py`). The first count of a shape compiles for
minutes. Host time is CPU time of the whole process, so other work on the machine disturbs it little; the time
of the driver (2 to 5 us a launch) is missing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from typing import Any

import bundle
import nodevice
from bundle import FOLDER

PLACE = FOLDER / "nodevice"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", help="name of a preset, headline, or gpt-d12")
    options.add_argument(
        "--steps", type=int, default=3, metavar="N", help="timed, before the one that is counted"
    )
    options.add_argument("--changes", default="{}", metavar="YAML", help="of the run")
    options.add_argument("--kernels", type=int, default=0, metavar="N", help="list so much work")
    chosen = options.parse_args()
    if not nodevice.ACTIVE:
        environment = {**os.environ, **bundle.caches(PLACE / "compiled"), **nodevice.environment(PLACE)}
        environment["PYTHONPATH"] = os.pathsep.join(bundle.unpack())
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    import yaml
    from train_throughput import measure

    for row in measure(chosen.what, yaml.safe_load(chosen.changes), steps=chosen.steps):
        print(row["line"], flush=True)
    print(report(row, chosen.kernels))


class Counted:
    """Counts what a step asks of the runtime without a device, and models its time."""

    def __init__(self) -> None:
        from model import Recorder

        self.library = ctypes.CDLL(os.environ["NODEVICE"])
        self.recorder = Recorder(PLACE / "kernels", self.library)

    def __enter__(self) -> None:
        self.library.nodevice_reset()
        self.recorder.reset()

    def __exit__(self, *_: object) -> None:
        self.library.nodevice_dump(bytes(PLACE / "counts.txt"))
        self.sums, self.work = nodevice.read((PLACE / "counts.txt").read_text())
        self.sums["waits"] -= 1  # that after the step

    def figures(self) -> dict[str, Any]:
        parts, unknown = self.recorder.seconds(self.work)
        if unknown:
            print(f"{unknown} calls of graphs compiled before are missing in the model: remove {PLACE} first")
        launches = sum(of.called for of in self.work if of.kind in ("kernel", "product"))
        seconds = {"parts": parts, "kernel_seconds": sum(parts.values()), "launches": launches}
        return {**seconds, "sums": self.sums, "work": self.work}


def report(row: dict[str, Any], kernels: int = 0) -> str:
    """Return the lines that say what a step asks of the host and of the device.

    Args:
        row: ``sums``, ``work`` and ``parts`` of `Counted`.
        kernels: how much work to list.
    """
    lines = [f"{number:10,}  {name}" for name, number in row["sums"].items()]
    lines.append(f"{'by the host':>16}{'in graphs':>16}")
    for kind in ("kernel", "product", "copy", "memory set"):
        called, replayed = (sum(of[i] for of in row["work"] if of.kind == kind) for i in (0, 1))
        lines.append(f"{called:16,}{replayed:16,}  {kind}")
    for kind, seconds in sorted(row["parts"].items(), key=lambda item: -item[1]):
        lines.append(f"{1000 * seconds:12,.2f} ms  {kind}")
    for of in sorted(row["work"], key=lambda of: -of.times)[:kernels]:
        lines.append(f"{of.called:8,}{of.replayed:8,}  {of.grid:>14} of {of.block:4}  {of.name[:90]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
