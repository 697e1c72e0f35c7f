"""What training does besides training: waiting for data, saving checkpoints, logging, tracking.

The default run's model and settings (its smoke preset with ``--quick``) are trained by the real engine on the
real corpus, shortened, tracked into a real SQLite store and not tracked, in turn. Every step is timed by the
clock. A step is *disturbed* if it ended with a save or began before the save was on disk, else *plain*; the
shares are of plain steps, so that it does not matter that there are more saves here than in earnest:

- data: the share of a step that the loader kept it waiting.
- a save stops training while the state is copied (*stall*), and then slows it while the copy is hashed and
  written (*beside*: steps against plain ones). Both are given as shares of the default interval.
- logging: running sums at every step, and at every log step the row, its line on the disk and its line in the
  log, each by itself, many times.
- tracking: the sender is a process of its own at low priority. Its processor time over that of all cores is
  what it can take from training where every core is busy; its start (importing mlflow) is told apart, as it
  happens once. The ratio of plain steps with it and without is the check on both.

Times by the clock want an idle machine. ``--quick`` shows that it works and judges nothing: it ends before
the sender has begun.

    python benchmarks/overhead.py [--quick] [--json FILE] [--threads N] [--precision bf16|fp32]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch
import yaml
from common import interleaved, network_alone, parser, report
from variants import DATASET, ROOT, prepare_data

from spider import tracking
from spider.checkpoints.save import Saver
from spider.config import StageSettings, StageSpec, load_config
from spider.model import build_model
from spider.model.weights import model_tensors
from spider.results import Results
from spider.tracking.sync import sync
from spider.training.allocator import keep_freed_memory
from spider.training.metrics import MetricsLog
from spider.training.optim import build_optimizer
from spider.training.stage import data_digest, train
from spider.training.state import Means
from spider.training.telemetry import Telemetry, Window, progress_bar, show
from tests.unit.records import saved

DEFAULT_INTERVAL: int = StageSettings.model_fields["ckpt_every"].default


def spec_of(options: argparse.Namespace, name: str, steps: int, ckpt_every: int) -> StageSpec:
    path = ROOT / ("presets/smoke.yaml" if options.quick else "config.yaml")
    raw = network_alone(yaml.safe_load(path.read_text()))
    (run,) = raw["runs"].values()
    run["defaults"] |= {"ckpt_every": ckpt_every, "schedule": "constant", "warmup_steps": 0}
    raw["runs"] = {
        name: run | {"precision": options.precision, "stages": [{"name": "only", "max_steps": steps}]}
    }
    return load_config(raw).stage(name, "only")


@dataclass
class Trained:
    """What the clock said of one training."""

    plain: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    saves: int = 0
    stall: float = 0.0
    """Seconds that training stood still for those saves."""
    waits: list[float] = field(default_factory=list)
    """Share of each log interval that went by waiting for data."""
    row: dict[str, float] = field(default_factory=dict)
    late: list[float] = field(default_factory=list)
    """The plain steps of the second half, when the sender has long begun."""
    sender_start: float = 0.0
    sender: float = 0.0
    """Processor seconds of the sender in the first half, and in the second a second of training."""


def training(
    spec: StageSpec,
    results: Path,
    shards: Path,
    *,
    tracked: bool,
    at_half: Callable[[], None] | None = None,
) -> Trained:
    """Train, timed step by step; ``at_half`` is called half-way."""
    folder = results / "runs" / spec.run / spec.stage
    found = Trained()
    every, end = spec.settings.ckpt_every, spec.settings.max_steps
    half = end // 2
    saving: Path | None = None
    began = half_began = sender_before = 0.0

    def on_step(step: int) -> None:
        nonlocal began, saving, half_began, sender_before
        took = time.perf_counter() - began
        if step > 2 and step < end:  # the first ones fill memory; the last one waits for its save
            if step % every == 0:
                found.saves += 1
            elif saving is not None:
                found.beside.append(took)
            else:
                found.plain.append(took)
                if step > half:
                    found.late.append(took)
        if step % every == 0:
            saving = folder / f"checkpoints/step-{step:08d}"
        if saving is not None and saving.exists():
            saving = None
        if step == half:
            if at_half is not None:
                at_half()
            found.sender_start = sender_before = children_seconds()
            half_began = time.perf_counter()
        if step == end - 1:
            found.sender = (children_seconds() - sender_before) / (time.perf_counter() - half_began)
        began = time.perf_counter()

    os.environ["SPIDER_TRACKING"] = "on" if tracked else "off"
    card = (spec.data, data_digest(spec, shards), str(shards))
    with tracking.training(results, spec, dataset=card):
        began = time.perf_counter()
        receipt = train(spec, folder, shards, on_step=on_step)
    found.stall = receipt.checkpoint_seconds
    rows = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder / "checkpoints")
    found.waits, found.row = [row["train/data_wait_share"] for row in rows[1:]], rows[-1]
    return found


def children_seconds() -> float:
    """Processor seconds of the processes that this one started and that still run."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent = child.cpu_times()
            total += spent.user + spent.system
    return total


def saving(spec: StageSpec, folder: Path, repeats: int) -> dict[str, float]:
    """Seconds that training waits for a save: until it is on disk, and until it is copied. And its bytes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(spec.model).to(device)
    optimizer = build_optimizer(model, spec.optimizer, spec.settings.lr)
    state = {f"optimizer.{name}": tensor for name, tensor in optimizer.tensors(model).items()}
    tensors = {**model_tensors(model), **state}
    saver = Saver(folder, spec.settings, None)
    steps = iter(range(10**8))

    def asynchronous() -> None:
        number = next(steps)
        saver.start(tensors, saved(number))

    def synchronous() -> None:
        asynchronous()
        saver.settle()

    clock, _ = interleaved(
        {"synchronous": synchronous, "asynchronous": asynchronous}, repeats, prepare=saver.settle
    )
    saver.close()
    return clock | {"bytes": sum(t.numel() * t.element_size() for t in tensors.values())}


def logging_seconds(row: dict[str, float], folder: Path, repeats: int) -> dict[str, float]:
    """Seconds of summing a step's figures, and of telling those of an interval."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = {
        "bpb",
        "lr",
        "muon_lr",
        "skipped_steps",
        "bytes_per_second",
        "data_wait_share",
        "eta_seconds",
        "mfu",
    }
    names = [name.removeprefix("train/") for name in row if name.startswith("train/")]
    measured = {name: torch.ones((), device=device) for name in names if name not in known}
    telemetry, log = Telemetry(device, "cpu", "bf16", 1e6), MetricsLog(folder / "metrics.jsonl")
    means, window, steps = Means(), Window(steps=10, tokens=1000, seconds=1.0, waited=0.1), iter(range(10**8))

    def tell() -> None:
        told = telemetry.row(means.read(), window, 100, {"lr": 1e-3, "muon_lr": 1e-3}, 0)
        log.write(next(steps), told)
        show(told, 1, 2, bar, {})

    with progress_bar(0, 1) as bar:
        clock, _ = interleaved({"step": lambda: means.add(measured), "interval": tell}, repeats)
    return clock


def main() -> None:
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--threads", type=int, help="of training (default: torch's)")
    options_parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    options = options_parser.parse_args()
    rounds, steps, ckpt_every, repeats = (1, 30, 10, 10) if options.quick else (4, 100, 30, 200)
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as folder:
        measure(options, Path(folder), rounds, steps, ckpt_every, repeats)


def measure(
    options: argparse.Namespace, results: Path, rounds: int, steps: int, ckpt_every: int, repeats: int
) -> None:
    # As `spider` does by itself, but the lines go into a file: they are not what is looked at here.
    logging.basicConfig(level=logging.WARNING, filename=results / "train.log")
    logging.getLogger("spider").setLevel(logging.INFO)
    prepare_data(results, memory=False)
    shards = Results(results).shards(DATASET)
    sync(results)  # the store is made once, and not by these runs

    ways: dict[bool, list[Trained]] = {False: [], True: []}
    for number in range(rounds):
        for tracked, runs in ways.items():
            spec = spec_of(options, f"{'tracked' if tracked else 'untracked'}-{number}", steps, ckpt_every)
            runs.append(training(spec, results, shards, tracked=tracked))
    found = [run for runs in ways.values() for run in runs]
    plain = median(t for run in found for t in run.plain)
    beside = [t for run in found for t in run.beside]
    saves = sum(run.saves for run in found)
    stall = median(run.stall / run.saves for run in found)
    slowed = max(0.0, sum(beside) - plain * len(beside)) / saves
    waits = median(w for run in found for w in run.waits)
    sender = median(run.sender for run in ways[True])
    start = median(run.sender_start for run in ways[True])
    pairs = zip(ways[True], ways[False], strict=True)
    ratios = sorted(mean(tracked.late) / mean(untracked.late) for tracked, untracked in pairs)
    saved = saving(spec, results / "saves", 3 if options.quick else 9)
    said = logging_seconds(found[0].row, results, repeats)

    every = spec.settings.log_every
    interval = DEFAULT_INTERVAL * plain
    log_share = (every * said["step"] + said["interval"]) / (every * plain)
    sender_share = sender / (os.cpu_count() or 1)
    shares: dict[str, tuple[float, float | None]] = {
        "data wait": (waits, 0.01),
        "checkpoint stall": (stall / (interval + stall), 0.01),
        "checkpoints, slower steps included": ((stall + slowed) / (interval + stall + slowed), None),
        "logging": (log_share, None),
        "tracking": (sender_share, None),
        "logging and tracking": (log_share + sender_share, 0.005),
    }
    rows = []
    for name, (share, goal) in shares.items():
        verdict = ["", ""]
        if goal is not None and not options.quick:
            verdict = [f"< {goal:.1%}", "met" if share < goal else "MISSED"]
        rows.append([name, f"{share:.3%}", *verdict])
    details = {
        "a plain step": f"{plain * 1e3:.0f} ms",
        "a save, on disk before going on": f"{saved['synchronous'] * 1e3:.0f} ms",
        "a save, copied before going on": f"{saved['asynchronous'] * 1e3:.0f} ms",
        "  in training": f"{stall * 1e3:.0f} ms",
        "  bytes": f"{saved['bytes'] / 1e6:.0f} MB",
        "steps beside a save": f"{len(beside) / saves:.1f}",
        "  against plain ones": f"{(mean(beside) if beside else plain) / plain:.2f}x",
        "summing a step's figures": f"{said['step'] * 1e6:.0f} us",
        "a log line and its row": f"{said['interval'] * 1e6:.0f} us",
        "the sender's start, once": f"{start:.1f} s of a core",
        "plain steps, tracked against not": f"{median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
    }
    rows += [[name, value, "", ""] for name, value in details.items()]
    figures: dict[str, Any] = {
        "shares": {name: {"share": share, "goal": goal} for name, (share, goal) in shares.items()},
        "step_seconds": plain,
        "save_seconds": saved,
        "stall_seconds": stall,
        "slowed_seconds": slowed,
        "beside": beside,
        "logging_seconds": said,
        "sender_start_seconds": start,
        "tracked_to_untracked": ratios,
        "threads": torch.get_num_threads(),
        "interval": DEFAULT_INTERVAL,
    }
    title = f"shares of training, a checkpoint every {DEFAULT_INTERVAL} steps, a log line every {every}"
    report(title, ["", "measured", "goal", ""], rows, figures, options, ["torch", "mlflow"])


if __name__ == "__main__":
    main()
