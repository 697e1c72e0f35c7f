"""What a run cost, rule by rule: seconds, processor time, memory, and energy where a GPU counted it.

Seconds, processor time and memory are Snakemake's, one benchmark file a job, of the job's last attempt.
Energy is in the tracking record of a job whose GPUs count joules (``system/gpu_energy_joules``); of a
processor nobody measures it, and it is not estimated. Jobs of a dataset are counted in full for each run that
uses it.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spider.results import Results

#: In the order of the flow.
RULES = ("download", "encode", "index", "warmup", "train", "evaluate", "compress")


class RuleCost(NamedTuple):
    """All jobs of one rule that this run needed; None: nothing measured it."""

    rule: str
    jobs: int
    seconds: float
    cpu_seconds: float | None
    peak_mb: float | None
    """Of the largest job."""
    joules: float | None
    """Of the GPUs."""


def costs(
    results: Results, run: str, stages: Sequence[str], datasets: Sequence[str], jobs: list[dict[str, Any]]
) -> list[RuleCost]:
    """One row for each rule that has left a benchmark file; ``datasets`` are those that the run trains on or
    is scored on, ``jobs`` the tracking records of their jobs and of the run's."""
    joules: dict[str, float] = defaultdict(float)
    for job in jobs:
        for metric in job["metrics"]:
            if metric["key"] == "system/gpu_energy_joules":
                joules[job["tags"]["spider.rule"]] += metric["value"]
    table = []
    for rule in RULES:
        patterns = {
            "index": [f"{dataset}.tsv" for dataset in datasets],
            "warmup": [f"{run}/*.tsv"],
            "train": (of_stages := [f"{run}/{stage}.tsv" for stage in stages]),
            "evaluate": of_stages,
        }.get(rule, [f"{dataset}/*.tsv" for dataset in datasets])
        folder = results.root / "benchmarks" / rule
        files = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
        if rows := [row for path in files for row in _rows(path)]:
            cpu, peak = ([row[name] for row in rows if name in row] for name in ("cpu_time", "max_rss"))
            seconds, most = sum(row["s"] for row in rows), max(peak, default=None)
            table.append(
                RuleCost(rule, len(files), seconds, sum(cpu) if cpu else None, most, joules.get(rule))
            )
    return table


def seconds_by_rule(benchmarks: Path) -> dict[str, float]:
    """Wall seconds of all jobs of each rule, most expensive first, from ``{benchmarks}/{rule}/**.tsv``."""
    seconds: dict[str, float] = defaultdict(float)
    for path in sorted(benchmarks.glob("*/**/*.tsv")):
        seconds[path.relative_to(benchmarks).parts[0]] += sum(row["s"] for row in _rows(path))
    return {rule: round(s, 2) for rule, s in sorted(seconds.items(), key=lambda item: -item[1])}


def _rows(path: Path) -> list[dict[str, float]]:
    """What Snakemake measured of each attempt, but for what is NA: a job that ended before it looked."""
    with open(path, encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f, delimiter="\t"))
    try:
        return [
            {name: float(row[name]) for name in ("s", "cpu_time", "max_rss")
             if name == "s" or row.get(name, "NA") not in ("NA", "-", "")}
            for row in rows
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: not a Snakemake benchmark file (no seconds in column s)") from None
