"""Measure all questions to a GPU, the most valuable first, until the minutes are over.

    python3 benchmarks/gpu/all.py --minutes 9              begin, or go on where the last call ended
    python3 benchmarks/gpu/all.py --minutes 9 --only training
    python3 benchmarks/gpu/all.py --rehearse               run everything at tiny sizes on a CPU

The script first unpacks build/gpu-bundle if it is there, so any Python that has torch will do. Every row is
kept in one JSON file when it ends, and is not measured again. Exit status: 0 if all rows are there, 75 if
some are missing (call again), 1 if a row failed.

Each script runs in a process of its own. In a rehearsal all run in this process, which is quicker.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import bundle
from questions import MISSING, figures_file

HERE = Path(__file__).parent
#: Scripts with the rows to measure, the most valuable first. Each is asked for all its rows in the end.
ORDER: list[tuple[str, list[str]]] = [
    ("train_throughput", ["gpt-d12, bf16", "gpt-d12, bf16, parts"]),
    ("train_throughput", ["headline, bf16", "headline, bf16, parts"]),
    ("kernel_speed", ["spider-1b, *", "patches, *"]),
    ("train_throughput", ["gpt-d12, *"]),
    ("determinism", ["training, *", "gradients*"]),
    ("determinism", ["*"]),
    ("train_throughput", ["headline, fp8", "headline, bf16, kept"]),
    ("attention", ["*"]),
    ("train_throughput", ["spider-1b*, bf16", "headline, seed", "memory, adamw"]),
    ("fp8_plan", ["*"]),
    ("train_throughput", ["*"]),
    ("kernel_speed", ["*"]),
    ("training", ["*"]),
]
SCRIPTS = tuple(dict.fromkeys(script for script, _ in ORDER))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=1e6, metavar="N", help="end by then")
    options.add_argument("--json", type=Path, metavar="FILE", help="file of the figures")
    options.add_argument(
        "--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME", help=", ".join(SCRIPTS)
    )
    options.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU; figures mean nothing")
    chosen = options.parse_args()
    paths = bundle.unpack()
    statuses = rehearse(chosen, paths) if chosen.rehearse else measure(chosen, paths)
    return summarize(figures_file(chosen), statuses)


def measure(chosen: argparse.Namespace, paths: list[str]) -> list[int]:
    """Run the scripts in order and return their exit statuses."""
    deadline = time.monotonic() + 60 * chosen.minutes
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    statuses = []
    for script, rows in ORDER:
        if script not in chosen.only:
            continue
        left = deadline - time.monotonic()
        if left < 10:
            statuses.append(MISSING)
            continue
        command = [sys.executable, str(HERE / f"{script}.py"), "--json", str(figures_file(chosen))]
        command += ["--minutes", f"{left / 60:.2f}", "--rows", *rows]
        statuses.append(run(command, environment, left))
    return statuses


def rehearse(chosen: argparse.Namespace, paths: list[str]) -> list[int]:
    """Run all rows of the scripts in this process and return the exit statuses."""
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the processes that the scripts start
    sys.path += paths
    options = argparse.Namespace(
        json=figures_file(chosen), rows=None, again=False, minutes=1e6, rehearse=True
    )
    return [importlib.import_module(script).main(options) for script in SCRIPTS if script in chosen.only]


def run(command: list[str], environment: dict[str, str], seconds: float) -> int:
    """Run a script and return its exit status.

    A script that outlasts its time is killed with all that it started; a row is then missing.
    """
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"{Path(command[1]).stem}: killed, its time is over; what it has done is kept", flush=True)
        return MISSING
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def summarize(path: Path, statuses: Sequence[int]) -> int:
    """Print how many rows there are and which failed; return the exit status."""
    questions = json.loads(path.read_text())["questions"] if path.exists() else {}
    failed = [
        f"{script}: {name}"
        for script, rows in questions.items()
        for name, row in rows.items()
        if "error" in row
    ]
    print(f"\n{sum(map(len, questions.values()))} rows in {path}, {len(failed)} of them failed", flush=True)
    for line in failed:
        print(f"    {line}")
    if MISSING in statuses:
        print("Some rows are missing: call it again, it goes on from here.")
    if failed or any(status not in (0, MISSING) for status in statuses):
        return 1
    return MISSING if MISSING in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
