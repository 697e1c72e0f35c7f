"""What a bad tracking store costs training: one that takes 5 s a call, and one that goes away in the middle.

The default run's model (its smoke preset with ``--quick``) is trained by the real engine, in turn untracked,
tracked into a local SQLite store, into a real MLflow server behind a line that holds each request back for
5 s, and into the same with the line cut half-way. Every step is timed by the clock, as in overhead.py, and so
is the processor time of the sender, a process of its own, in the second half of the training. A step is told
to be slowed by the ratio of the median plain step to the untracked one of the same round; the sender's
processor time over that of all cores is what it can take where every core is busy, and less noisy.

At the end all is sent to the server directly, and the points of every curve are counted there.

    python benchmarks/slow_store.py [--quick] [--json FILE] [--threads N] [--precision bf16|fp32]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from common import parser, report
from overhead import Trained, spec_of, training
from variants import ROOT, prepare_data

from spider.tracking import sync
from spider.training.allocator import keep_freed_memory

sys.path.append(str(ROOT))
from tests.servers import BadLine, mlflow_server

DELAY = 5.0
GOAL = 0.01
WAYS = ("untracked", "SQLite", f"{DELAY:.0f} s a call", "gone half-way")


def train(
    options: argparse.Namespace, way: str, number: int, results: Path, shards: Path, server: str, steps: int
) -> Trained:
    spec = spec_of(options, f"{way.replace(' ', '-')}-{number}", steps, ckpt_every=steps)
    line = BadLine(int(server.rsplit(":", 1)[1]))
    line.delay = DELAY
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    if way in WAYS[2:]:
        os.environ["MLFLOW_TRACKING_URI"] = line.uri
    found = training(
        spec, results, shards, tracked=way != "untracked", at_half=line.cut if way == WAYS[3] else None
    )
    if way != WAYS[3]:
        line.cut()
    return found


def arrived(results: Path, server: str) -> tuple[int, int]:
    """Points of ``train/loss`` that the server holds, and that were logged."""
    from mlflow import MlflowClient

    os.environ["MLFLOW_TRACKING_URI"] = server
    sent = sync(results)
    if sent.pending:
        sys.exit(f"not everything arrived: {sent}")
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("Training")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    there = sum(len(client.get_metric_history(run.info.run_id, "train/loss")) for run in runs)
    names = [run.info.run_name for run in runs]
    logged = sum(
        len((results / "runs" / name / "only/metrics.jsonl").read_text().splitlines()) for name in names
    )
    return there, logged


def main() -> None:
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--threads", type=int, help="of training (default: torch's)")
    options_parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    options = options_parser.parse_args()
    rounds, steps = (1, 30) if options.quick else (3, 60)
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    ways: dict[str, list[Trained]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="slow-store-", ignore_cleanup_errors=True) as made:
        results = Path(made)
        shards = prepare_data(results)
        sync(results)  # the local store is made once, and not by these runs
        with mlflow_server(results, f"sqlite:///{results}/server.db") as server:
            for number in range(rounds):
                for way, runs in ways.items():
                    runs.append(train(options, way, number, results, shards, server, steps))
            there, logged = arrived(results, server)
    rows, figures = [], {"points": {"arrived": there, "logged": logged}}
    for way, runs in ways.items():
        pairs = zip(runs, ways["untracked"], strict=True)
        ratios = sorted(median(run.plain) / median(base.plain) for run, base in pairs)
        share = median(run.sender for run in runs) / (os.cpu_count() or 1)
        step = median(median(run.plain) for run in runs)
        verdict = "" if options.quick or way == "untracked" else "met" if share < GOAL else "MISSED"
        spread = f"{median(ratios):.3f}x ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        rows.append([way, f"{step * 1e3:.0f} ms", spread, f"{share:.3%}", verdict])
        figures[way] = {"step_seconds": step, "to_untracked": ratios, "sender_share": share}
    rows.append(["points that arrived in the end", f"{there} of {logged}", "", "", ""])
    head = ["store", "step", "to untracked", "sender, of all cores", f"< {GOAL:.0%}"]
    report("what a bad store costs training", head, rows, figures, options, ["torch", "mlflow"])


if __name__ == "__main__":
    main()
