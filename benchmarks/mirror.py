"""The cost of a mirror to a training, whose copier runs and is stopped in turns.

    python benchmarks/mirror.py [--steps 600] [--every 30] [--url URL] [--json FILE]

A shared machine may be twice as fast in one minute as in another. So one training runs, on all cores, and its
copier is stopped for every other `PHASE`. A step while the copier may run is compared with one of the
phases beside it. The copier catches up with what it misses, so it works twice as hard while it runs. Half of
the difference is what it costs. Checkpoints are frequent, to see the cost at all.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from bisect import bisect
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import psutil
import yaml
from common import ROOT, parser, report, workflow

from spider.checkpoints.metrics import read_rows

RUN, STAGE = "smoke", "main"
#: Seconds in which the copier runs, or is stopped.
PHASE = 10.0


def configuration(steps: int, every: int) -> dict:
    """Return the smoke preset with one stage, a larger model, and a checkpoint after so many steps."""
    config = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())
    run = config["runs"][RUN]
    run["model"] |= {"hidden": 192, "ffn_hidden": 512}
    run["defaults"] |= {"seq_len": 256, "log_every": 2, "ckpt_every": every}
    run["stages"] = [{"name": STAGE, "max_steps": steps, "schedule": "constant", "warmup_steps": 5}]
    run["resources"] = {"threads": os.cpu_count()}
    return config | {"tracking": {"enabled": False}}


class Phases:
    """Stop the copier of a workflow for every other phase, from the first step on.

    Attributes:
        times: when each phase began. The copier runs in the first one and in every other one after it.
        seconds: processor seconds of the copier.
    """

    def __init__(self, folder: Path, metrics: Path) -> None:
        self.folder, self.metrics = folder, metrics
        self.times: list[float] = []
        self.seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._alternate)

    def __enter__(self) -> Phases:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _alternate(self) -> None:
        while not self._ended.wait(PHASE if self.times else 0.1):
            if not self.metrics.exists():
                continue
            if self.times and (copier := self._copier()):
                copier.send_signal(signal.SIGSTOP if len(self.times) % 2 else signal.SIGCONT)
                used = copier.cpu_times()
                self.seconds = used.user + used.system
            self.times.append(time.time())
        if copier := self._copier():
            copier.send_signal(signal.SIGCONT)

    def _copier(self) -> psutil.Process | None:
        for one in psutil.process_iter(["cmdline", "cwd"]):
            is_copier = (one.info["cmdline"] or [])[-3:] == ["mirror", "push", "--follow"]
            if is_copier and one.info["cwd"] == str(self.folder):
                return one
        return None


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=600)
    options.add_argument("--every", type=int, default=30, help="steps between two checkpoints")
    options.add_argument("--url", help="address to mirror to (default: a folder)")
    options = options.parse_args()
    config = configuration(60 if options.quick else options.steps, options.every)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve() / "work"
        config["mirror"] = (options.url or f"{made}/mirror") + f"/{time.time_ns()}"
        stage = folder / f"results/runs/{RUN}/{STAGE}"
        with Phases(folder, stage / "metrics.jsonl") as phases:
            workflow(config, folder / "results", stage / "train.json")
        steps: list[list[float]] = [[] for _ in phases.times]
        rows = read_rows(stage / "metrics.jsonl")
        for before, row in pairwise(rows):
            phase = bisect(phases.times, row.time) - 1
            if phase >= 0 and before.time > phases.times[phase]:
                steps[phase].append(row.metrics["train/step_seconds"])
        saved = sum(file.stat().st_size for file in (stage / "checkpoints").rglob("*")) / 1e6
        kept = len([*(stage / "checkpoints").glob("step-*")])
    seconds = rows[-1].time - rows[0].time
    while not steps[-1]:
        steps.pop()
    means = [mean(one) for one in steps]
    # A phase beside the mean of its neighbours, so that a drift of the machine's speed counts for neither.
    ratios = [2 * b / (a + c) for a, b, c in zip(means, means[1:], means[2:], strict=False)]
    ratios = [1 / ratio if at % 2 == 0 else ratio for at, ratio in enumerate(ratios)]
    more = (median(ratios) - 1) / 2
    between = seconds * options.every / rows[-1].step
    table = [
        ["slower by a mirror", f"{more:.1%}"],
        ["middle half of the phases", " to ".join(f"{(q - 1) / 2:.1%}" for q in _quartiles(ratios))],
        ["phases", str(len(means))],
        ["seconds between two checkpoints", f"{between:.0f}"],
        ["seconds of training for a checkpoint that is copied", f"{more * between:.2f}"],
        ["slower, with a checkpoint in ten minutes", f"{more * between / 600:.2%}"],
        ["MB of a checkpoint", f"{saved / max(1, kept):.0f}"],
        ["processor time of the copier, of one core", f"{phases.seconds / seconds:.1%}"],
    ]
    figures = {"more": more, "ratios": ratios, "copier": phases.seconds, "seconds": seconds}
    report("The cost of a mirror to a training on all cores", ["", ""], table, figures, options, ["torch"])


def _quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


if __name__ == "__main__":
    main()
