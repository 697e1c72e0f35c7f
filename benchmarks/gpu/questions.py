"""What the questions here share: rows that are measured once, and kept as each of them ends.

All answers go into one JSON file, by question and row. It is written after every row, so a kill costs the row
in progress; the next call finds what is there and goes on behind it. A row that failed is tried again once
the code has changed, any row where ``--again`` asks for it. A row is not begun that would not end in the
minutes that are left; exit status 75 says that some are missing.

Figures of two devices, or of a rehearsal and a device, never share a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bundle import FOLDER, ROOT

sys.path.append(str(ROOT / "benchmarks"))  # common.py, device_time.py, steps.py

MISSING = 75
"""Exit status where rows are missing: call again."""

Goals = Callable[[Mapping[str, Mapping[str, Any]]], Sequence[Mapping[str, Any]]]


# What torch and Triton compile is kept in an ignored folder, where the next call finds it.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(FOLDER / "compiled/inductor"))
os.environ.setdefault("TRITON_CACHE_DIR", str(FOLDER / "compiled/triton"))
if "--rehearse" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch first looks for devices
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several would mostly wait for each other


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every question."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("--json", type=Path, metavar="FILE", help="where figures are kept")
    options.add_argument("--rows", nargs="+", metavar="NAME", help="these alone; * stands for anything")
    options.add_argument("--again", action="store_true", help="measure what is there once more")
    options.add_argument("--minutes", type=float, default=1e9, metavar="N", help="begin no longer row")
    options.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU: figures mean nothing")
    return options


class Question:
    """One script's rows.

    Args:
        name: the script's, under which they are kept.
        goals: what they are to reach: of all rows each ``goal``, its ``figure`` and ``outcome``.
    """

    def __init__(self, name: str, chosen: argparse.Namespace, goals: Goals | None = None) -> None:
        self.chosen, self._goals = chosen, goals
        self._path: Path = chosen.json or FOLDER / ("rehearsal.json" if chosen.rehearse else "figures.json")
        self._deadline = time.monotonic() + 60 * chosen.minutes
        self._left: list[str] = []
        self._told: set[str] = set()
        self._where = device(chosen.rehearse)
        self._kept = self._read()
        self.rows: dict[str, dict[str, Any]] = self._kept["questions"].setdefault(name, {})
        print(f"== {name}, {self._where['device']}, torch {self._where['torch']}", flush=True)
        if chosen.rehearse:
            print("REHEARSAL: tiny sizes on a CPU. These figures mean nothing.", flush=True)

    def _read(self) -> dict[str, Any]:
        path = self._path
        if not path.exists():
            return {"machine": self._where, "questions": {}}
        kept = json.loads(path.read_text())
        if kept["machine"]["device"] != self._where["device"]:
            sys.exit(
                f"{path}: holds figures of {kept['machine']['device']}, this is {self._where['device']}; "
                "move it away or name another file with --json"
            )
        return kept

    def measure(
        self,
        name: str,
        seconds: float,
        call: Callable[[], dict[str, Any]],
        say: Callable[[dict[str, Any]], str],
    ) -> dict[str, Any] | None:
        """The figures of a row, measured now or before; None where it failed, was not asked for, or is left
        for another call because ``seconds`` (what it takes at most on a GPU) are not left."""
        if self.chosen.rows and not any(fnmatch(name, asked) for asked in self.chosen.rows):
            return None
        there, code = self.rows.get(name), code_digest()
        stale = there is None or ("error" in there and there["code"] != code)
        if not (stale or self.chosen.again):
            assert there is not None, "it is stale"
            other = "" if there["code"] == code else ", of other code"
            print(f"{name}: there already{other}: {_said(there, say)}", flush=True)
            return None if "error" in there else there
        if not self.chosen.rehearse and time.monotonic() + seconds > self._deadline:
            self.leave(name, f"it takes up to {seconds:.0f} s")
            return None
        began = time.perf_counter()
        try:
            found = call()
        except Exception as error:  # whatever one row dies of, the others are measured
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            found = {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"[:400]}
        self.rows[name] = {**found, "took": round(time.perf_counter() - began, 1), "code": code}
        self._write()
        print(f"{name}: {_said(self.rows[name], say)} ({self.rows[name]['took']} s)", flush=True)
        self._tell_goals()
        return None if "error" in found else self.rows[name]

    @property
    def minutes_left(self) -> float:
        return (self._deadline - time.monotonic()) / 60

    def leave(self, name: str, why: str) -> None:
        """Leave a row for another call."""
        print(f"{name}: left for another call, {why}", flush=True)
        self._left.append(name)

    def _write(self) -> None:
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(self._kept, indent=1) + "\n")
        beside.replace(path)

    def _tell_goals(self) -> None:
        """Those that more is known of than before, beside their figures."""
        for goal in self._goals(self._good()) if self._goals and not self.chosen.rehearse else ():
            said = f"    goal: {goal['goal']}: {goal['outcome']}"
            if goal["figure"] is not None and said not in self._told:
                self._told.add(said)
                print(said, flush=True)

    def _good(self) -> dict[str, dict[str, Any]]:
        return {name: row for name, row in self.rows.items() if "error" not in row}

    def end(self) -> None:
        """Leave with the status that says whether rows are missing."""
        self._tell_goals()
        sys.exit(MISSING if self._left else 0)


def _said(row: dict[str, Any], say: Callable[[dict[str, Any]], str]) -> str:
    return f"FAILED, {row['error']}" if "error" in row else say(row)


def goal(aim: str, figure: float | None, met: Callable[[float], bool]) -> dict[str, Any]:
    """What was aimed at, the figure, and in words whether it is met, missed, or not measured."""
    outcome = "not measured"
    if figure is not None:
        outcome = f"{'met' if met(figure) else 'missed'} ({figure:,.4g})"
    return {"goal": aim, "figure": figure, "outcome": outcome}


def device(rehearse: bool) -> dict[str, Any]:
    """The device, torch and date; leaves, in words, where there is none that can be used."""
    import torch
    from common import machine

    where = {**machine(["torch"]), "device": "cpu"}
    if rehearse:
        return where
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        sys.exit(f"torch {torch.__version__} finds no GPU: {reason} (--rehearse runs the same on a CPU)")
    free, total = torch.cuda.mem_get_info()
    if free < 0.9 * total:
        print(
            f"{(total - free) / 1e9:.1f} of the GPU's {total / 1e9:.1f} GB are taken by other processes: "
            "figures of memory and speed are not those of a free one (nvidia-smi lists them)",
            flush=True,
        )
    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"])
    return {**where, "device": torch.cuda.get_device_name(), "memory": total, "driver": driver}


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, IndexError):
        return "unknown"


def code_digest() -> str:
    """Of all that figures depend on in this tree."""
    import hashlib

    of = hashlib.sha256()
    for folder in ("spider", "kernels", "benchmarks/gpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            of.update(path.read_bytes())
    return of.hexdigest()[:12]
