"""What every benchmark shares: its two options, the machine it ran on, a table, a JSON file."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from spider.files import write_json


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark: ``--quick`` and ``--json FILE``."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="small inputs, for a look and for tests")
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write machine, settings and figures there"
    )
    return options


def arguments(description: str) -> argparse.Namespace:
    """Parse those options and no others."""
    return parser(description).parse_args()


def machine(packages: Sequence[str] = ()) -> dict[str, str]:
    """Processor, cores, memory, system, Python and the versions of ``packages``."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": date.today().isoformat(),
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def network_alone(raw: dict[str, Any]) -> dict[str, Any]:
    """A configuration of one run whose model reads no memory, and is trained on all that is not held out, in
    windows of 256: for what is measured of the network alone."""
    (run,) = raw["runs"].values()
    model = {"preset": run["model"]} if isinstance(run["model"], str) else run["model"]
    datasets = {name: {**dataset, "memory": 0.0} for name, dataset in raw["datasets"].items()}
    (name,) = raw["runs"]
    run = {**run, "model": {**model, "memory": None}}
    run["defaults"] = {**run["defaults"], "seq_len": 256, "micro_batch": 16}
    return {**raw, "datasets": datasets, "runs": {name: run}}


def interleaved(
    ways: Mapping[str, Callable[[], Any]], repeats: int, prepare: Callable[[], None] | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each way by the clock, and of this process's processor time.

    The ways take turns, so that a slow minute of the machine hits all alike; ``prepare`` runs, untimed,
    before each, so that all find the same disk and memory.
    """
    clock: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            if prepare is not None:
                prepare()
            began, used = time.perf_counter(), time.process_time()
            way()
            clock[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - used)
    medians = [{name: median(values) for name, values in times.items()} for times in (clock, processor)]
    return medians[0], medians[1]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def show_goals(title: str, goals: Sequence[Mapping[str, Any]], quick: bool) -> None:
    """Print what was aimed at and how it came out; of ``--quick``, that it says nothing about speed."""
    if quick:
        print("Small inputs: these figures say that the benchmark works, and nothing about speed.")
        return
    print(f"{title}:")
    for goal in goals:
        print(f"  {goal['goal']}: {goal['outcome']}")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: dict[str, Any],
    options: argparse.Namespace,
    packages: Sequence[str] = (),
) -> None:
    """Print the machine and a table; write ``figures`` where ``--json`` asks for them."""
    where = machine(packages)
    _console().print(
        "  ".join(f"{key}: {value}" for key, value in where.items()), highlight=False, style="dim"
    )
    show(title, columns, rows)
    if options.json is not None:
        command = " ".join(["python", *sys.argv])
        write_json(options.json, {"machine": where, "command": command, "title": title, "figures": figures})
