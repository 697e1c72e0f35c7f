"""Measure what training does beside training: waiting for data, saving checkpoints and tracking.

The real engine trains the default run's model on the real corpus, without its n-gram index. It does so in
turn untracked, tracked into a local SQLite store, and tracked into an MLflow server that takes 5 s for each
call. Every step is timed by the clock.

    python benchmarks/overhead.py [--quick] [--json FILE] [--threads N]

Shares:
    data wait    The part of a step that waits for the loader.

    save         The time that a save stops training, over the default interval between saves.

    sender       Processor time of the process that sends records, over that of all cores in the second half
                 of a training. The sender can take so much if every core is busy.

Steps during or beside a save do not count. At the end all records are sent to the server directly, and the
points of the curves that arrived are counted. Times need an idle machine. ``--quick`` uses the smoke preset
and ends before the sender has begun.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import yaml
from common import ROOT, parser, report, workflow

from spider import tracking
from spider.cli.session import keep_freed_memory
from spider.config import StageSettings, StageSpec, load_config
from spider.results import Results
from spider.tracking.sync import sync
from spider.training.metrics import read_rows
from spider.training.stage import data_digest, train

sys.path.append(str(ROOT))
from tests.servers import SlowConnection, mlflow_server

DELAY = 5.0
WAYS = ("untracked", "SQLite", "slow server")
#: Largest share of each.
GOALS = {"data wait": 0.01, "save": 0.01, "sender": 0.01}
INTERVAL: int = StageSettings.model_fields["ckpt_every"].default


@dataclass
class Trained:
    """Figures of one training."""

    steps: list[float] = field(default_factory=list)
    """Seconds of each step that no save disturbs."""
    waits: list[float] = field(default_factory=list)
    """Share of each log interval that waits for data."""
    stall: float = 0.0
    """Seconds that one save stops training."""
    sender: float = 0.0
    """Processor seconds of the sender for each second of the second half."""


def specs(raw: dict[str, Any], rounds: int) -> dict[tuple[str, int], StageSpec]:
    """Return a training for each way and round."""
    (base,) = raw["runs"].values()
    runs = {f"{way.replace(' ', '-')}-{number}": base for way in WAYS for number in range(rounds)}
    config = load_config({**raw, "runs": runs})
    return {
        (way, number): config.stage(f"{way.replace(' ', '-')}-{number}", "only")
        for number in range(rounds)
        for way in WAYS
    }


def configuration(options: argparse.Namespace, steps: int, every: int) -> dict[str, Any]:
    """Return the configuration of one run of a single stage, without an n-gram index."""
    path = ROOT / ("presets/smoke.yaml" if options.quick else "config.yaml")
    raw = yaml.safe_load(path.read_text())
    (run,) = raw["runs"].values()
    model = {"preset": run["model"]} if isinstance(run["model"], str) else run["model"]
    run |= {"model": {**model, "ngram": None}, "precision": "bf16"}
    run["defaults"] |= {"seq_len": 256, "micro_batch": 16, "ckpt_every": every}
    run["stages"] = [{"name": "only", "max_steps": steps, "schedule": "constant", "warmup_steps": 0}]
    data = {**raw["datasets"][run["data"]], "ngram": 0.0}
    return {**raw, "datasets": {run["data"]: data}, "runs": {"only": run}}


def training(spec: StageSpec, results: Results, way: str, server: str) -> Trained:
    """Train, and time each step."""
    stage, shards = results.stage(spec.run, spec.stage), results.shards(spec.data)
    every, end = spec.settings.ckpt_every, spec.settings.max_steps
    found = Trained()
    saving: Path | None = None
    began = half_began = sender_before = 0.0

    def on_step(step: int) -> None:
        nonlocal began, saving, half_began, sender_before
        seconds = time.perf_counter() - began
        if 2 < step < end and step % every and saving is None:  # the first steps allocate memory
            found.steps.append(seconds)
        if step % every == 0:
            saving = stage.checkpoints / f"step-{step:08d}"
        if saving is not None and saving.exists():
            saving = None
        if step == end // 2:
            sender_before, half_began = children_seconds(), time.perf_counter()
        if step == end - 1:
            found.sender = (children_seconds() - sender_before) / (time.perf_counter() - half_began)
        began = time.perf_counter()

    os.environ["SPIDER_TRACKING"] = "off" if way == "untracked" else "on"
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    line = SlowConnection(int(server.rsplit(":", 1)[1]))
    line.delay = DELAY
    if way == "slow server":
        os.environ["MLFLOW_TRACKING_URI"] = line.uri
    dataset = (spec.data, data_digest(spec, shards), str(shards))
    with tracking.training(results.root, spec, dataset=dataset):
        began = time.perf_counter()
        receipt = train(spec, stage.path, shards, on_step=on_step)
    line.cut()
    found.stall = receipt.checkpoint_seconds / (end // every)
    found.waits = [row.metrics["train/data_wait_share"] for row in read_rows(stage.metrics)][1:]
    shutil.rmtree(stage.checkpoints)
    return found


def children_seconds() -> float:
    """Return the processor seconds of this process's children that still run."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def arrived(results: Results, server: str) -> tuple[int, int]:
    """Return how many points of ``train/loss`` the server holds, and how many its runs logged."""
    from mlflow import MlflowClient

    os.environ["MLFLOW_TRACKING_URI"] = server
    sent = sync(results.root)
    if sent.pending:
        sys.exit(f"some records did not arrive: {sent}")
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("Training")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    held = sum(len(client.get_metric_history(run.info.run_id, "train/loss")) for run in runs)
    logged = sum(len(list(read_rows(results.stage(run.info.run_name, "only").metrics))) for run in runs)
    return held, logged


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--threads", type=int, help="threads of training (default: torch's)")
    options = arguments.parse_args()
    rounds, steps, every = (1, 30, 10) if options.quick else (3, 100, 30)
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    raw = configuration(options, steps, every)
    found: dict[str, list[Trained]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as scratch:
        results = Results(Path(scratch) / "results")
        (name,) = raw["datasets"]
        workflow({**raw, "tracking": {"enabled": False}}, results.root, f"datasets/{name}")
        sync(results.root)  # makes the store before any training needs it
        with mlflow_server(Path(scratch), f"sqlite:///{scratch}/server.db") as server:
            for (way, _), spec in specs(raw, rounds).items():
                found[way].append(training(spec, results, way, server))
            held, logged = arrived(results, server)

    base = median(median(run.steps) for run in found["untracked"])
    rows, figures = [], {"points": {"arrived": held, "logged": logged}}
    for way, runs in found.items():
        step = median(median(run.steps) for run in runs)
        stall = median(run.stall for run in runs)
        shares = {
            "data wait": median(wait for run in runs for wait in run.waits),
            "save": stall / (INTERVAL * step + stall),
            "sender": median(run.sender for run in runs) / (os.cpu_count() or 1),
        }
        rows.append(
            [way, f"{1000 * step:.0f} ms", f"{step / base:.3f}x", *(f"{x:.3%}" for x in shares.values())]
        )
        figures[way] = {"step_seconds": step, "stall_seconds": stall, "shares": shares}
        for name, goal in GOALS.items():
            if not options.quick and shares[name] >= goal:
                print(f"MISSED, {way}: {name} {shares[name]:.3%}, goal {goal:.0%}")
    rows.append(["points that arrived", f"{held} of {logged}", "", "", "", ""])
    columns = ["store", "step", "to untracked", *GOALS]
    title = f"Shares of training, a save every {INTERVAL} steps"
    report(title, columns, rows, figures, options, ["torch", "mlflow"])


if __name__ == "__main__":
    main()
