"""Measure on a GPU what only a GPU can tell, the most valuable first, until the minutes are over.

    python3 benchmarks/gpu/all.py --minutes 5                 begin, or go on where the last call ended
    python3 benchmarks/gpu/all.py --minutes 5 --other ../old  train with another checkout too, side by side
    python3 benchmarks/gpu/all.py --rows 'headline*' --again
    python3 benchmarks/gpu/all.py --nodevice                  rehearse, on the runtime without a device

The script first unpacks build/gpu-bundle if it is there, so any Python that has torch will do. Each row runs
in a process of its own, with nothing beside it, and is killed with all that it started when its time is over.
Its figures are kept in one JSON file as they come, so a kill costs only what is not measured yet. They have
the machine's state when the row began: CPU, load, and other processes on the GPU. A row that is there is not
measured again; one that failed is, once the code has changed. Figures of two devices never share a file.

Exit status: 0 if all rows are there, 75 if some are missing (call again), 1 if a row failed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import bundle
import nodevice
from bundle import FOLDER, ROOT
from rows import OTHER, ROWS, goals_of

MISSING = 75
"""Exit status if rows are missing: call again."""
MARK = "FIGURES "
"""Begins a line of a row's output that holds figures."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=1e4, metavar="N", help="end by then")
    options.add_argument("--json", type=Path, metavar="FILE", help="file of the figures")
    options.add_argument("--rows", nargs="+", default=["*"], metavar="NAME", help="only these; * matches all")
    options.add_argument("--again", action="store_true", help="measure again what is there")
    options.add_argument("--other", type=Path, metavar="CHECKOUT", help="run some rows with this tree too")
    options.add_argument("--nodevice", action="store_true", help="rehearse on the runtime without a device")
    options.add_argument("--row", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.row:
        row = ROWS[chosen.row]
        for figures in importlib.import_module(row.module).measure(**row.arguments):
            print(MARK + json.dumps(figures), flush=True)
        return 0
    deadline = time.monotonic() + 60 * chosen.minutes
    folder = FOLDER / "nodevice" if chosen.nodevice else FOLDER
    machine = {"device": None, "memory": 150.8e9} if chosen.nodevice else device()
    kept = Kept(chosen.json or folder / "figures.json", {"cpu": processor(), **machine})
    environment = {**os.environ, **bundle.caches(folder / "compiled"), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(bundle.unpack(device=machine["device"]))
    if chosen.nodevice:
        environment |= nodevice.environment(folder)
    missing = False
    for name, own, tree in sides(chosen):
        row, code, left = ROWS[own], code_digest(tree), deadline - time.monotonic()
        if kept.has(name, code) and not chosen.again:
            print(f"{name}: there already: {kept.line(name)}", flush=True)
        elif row.gigabytes > machine["memory"] / 1e9:
            print(f"{name}: left out, it needs {row.gigabytes:.0f} GB", flush=True)
        elif left < row.seconds / 3:
            print(f"{name}: left for another call, it takes up to {row.seconds:.0f} s", flush=True)
            missing = True
        else:
            kept.rows[name] = {"code": code, **state()}
            path = f"{tree}{os.pathsep}{environment['PYTHONPATH']}"
            limit = left if chosen.nodevice else min(row.seconds, left)
            run(name, own, {**environment, "GPU_TREE": str(tree), "PYTHONPATH": path}, limit, kept)
    return kept.summarize(missing)


def sides(chosen: argparse.Namespace) -> Iterator[tuple[str, str, Path]]:
    """Yield each row that is asked for: its name, that in the table, and the tree that it runs."""
    for own, row in ROWS.items():
        both = [(own, ROOT)]
        if chosen.other and row.beside:
            both.append((own + OTHER, chosen.other.resolve()))
        for name, tree in both if not (chosen.nodevice and row.real) else ():
            if any(fnmatch(name, pattern) for pattern in chosen.rows):
                yield name, own, tree


def run(name: str, own: str, environment: Mapping[str, str], seconds: float, kept: Kept) -> None:
    """Run a row's process and keep its figures as they come; after its time kill it with all that it started.

    A row that has figures when it is killed keeps them. If this process dies, the row's does too.
    """
    log = FOLDER / f"logs/{name.replace(' ', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began, tail, text, running = time.monotonic(), [], "", True
    with log.open("w") as out, log.open(errors="replace") as written:
        process = subprocess.Popen(
            [sys.executable, __file__, "--row", own],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # when the parent dies
        )
        while running:
            time.sleep(0.1)
            running = process.poll() is None and time.monotonic() < began + seconds
            *lines, text = (text + written.read()).split("\n")
            for line in lines:
                if line.startswith(MARK):
                    kept.add(name, json.loads(line.removeprefix(MARK)))
                elif line.strip():
                    tail = [*tail[-20:], line.strip()]
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.wait() and "line" not in kept.rows[name]:
        ended = f"ended with status {process.returncode} after {time.monotonic() - began:.0f} s"
        kept.add(name, {"error": tail[-1] if tail and process.returncode > 0 else ended, "tail": tail})
    kept.add(name, {"took": round(time.monotonic() - began, 1)})
    print(f"{name}: {kept.line(name)} ({kept.rows[name]['took']} s)", flush=True)
    kept.print_goals()


class Kept:
    """The figures so far, in one file that is written after every change.

    Raises:
        SystemExit: the file holds figures of another device.
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        before = json.loads(path.read_text()) if path.exists() else {"machine": machine, "rows": {}}
        if before["machine"]["device"] != machine["device"]:
            sys.exit(
                f"{path}: holds figures of {before['machine']['device']}, this is {machine['device']}; "
                "move it away or name another file with --json"
            )
        self.path, self.machine = path, machine
        self.rows: dict[str, dict[str, Any]] = before["rows"]
        self._printed: set[str] = set()
        print(f"== {machine['device']}, {machine['cpu']}", flush=True)

    def has(self, name: str, code: str) -> bool:
        """Tell whether a row need not be measured: it has figures, or failed with this code."""
        row = self.rows.get(name, {})
        return row["code"] == code if "error" in row else "line" in row

    def add(self, name: str, figures: Mapping[str, Any]) -> None:
        """Add figures to a row and write the file."""
        self.rows[name].update(figures)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps({"machine": self.machine, "rows": self.rows}, indent=1) + "\n")
        beside.replace(self.path)

    def line(self, name: str) -> str:
        row = self.rows[name]
        return f"FAILED, {row['error']}" if "error" in row else str(row.get("line"))

    def print_goals(self) -> None:
        """Print the goals whose figure is new."""
        for line in goals_of(self.rows) if self.machine["device"] else ():
            if line not in self._printed:
                self._printed.add(line)
                print(f"    goal: {line}", flush=True)

    def summarize(self, missing: bool) -> int:
        """Print how many rows there are and which failed; return the exit status."""
        failed = [name for name, row in self.rows.items() if "error" in row]
        print(f"\n{len(self.rows)} rows in {self.path}, failed: {', '.join(failed) or 'none'}")
        if missing:
            print("Some rows are missing: call it again, it goes on from here.")
        return 1 if failed else MISSING if missing else 0


def device() -> dict[str, Any]:
    """Return the device; exit with the reason if there is no GPU."""
    told = nvidia_smi("--query-gpu=name,memory.total,driver_version")
    if not told:
        sys.exit("finds no GPU: nvidia-smi names none (--nodevice rehearses without one)")
    name, memory, driver = told[0].split(", ")
    return {"device": name, "memory": 2**20 * int(memory), "driver": driver}


def nvidia_smi(query: str) -> list[str]:
    """Return the lines of a query, none if there is no GPU."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def state() -> dict[str, Any]:
    """Return processor, load, and the processes on the GPU."""
    beside = nvidia_smi("--query-compute-apps=pid,name,used_memory")
    if beside:
        print(f"    beside other processes on the GPU: {'; '.join(beside)}", flush=True)
    return {"cpu": processor(), "load": os.getloadavg(), "gpu_processes": beside}


def processor() -> str:
    """Return the name of the processor and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"


def code_digest(tree: Path) -> str:
    """Return a digest of all code that a tree's figures depend on."""
    code = hashlib.sha256()
    for folder in (tree / "spider", tree / "kernels", ROOT / "benchmarks/gpu"):
        for path in sorted(folder.rglob("*.py")):
            code.update(path.read_bytes())
    return code.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
