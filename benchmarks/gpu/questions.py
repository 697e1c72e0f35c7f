"""Measure the rows of a question once each, and keep every row when it ends.

All answers go into one JSON file, by question and row. It is written after every row, so a kill costs only
the row in progress, and the next call goes on behind it. A row that failed is tried again after the code has
changed; ``--again`` measures any row again. A row does not begin if it could outlast the minutes that are
left. Exit status 75 means that some rows are missing.

Figures of two devices never share a file, and neither do those of a rehearsal and a device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bundle import FOLDER, ROOT

sys.path.append(str(ROOT / "benchmarks"))  # common.py

MISSING = 75
"""Exit status if rows are missing: call again."""

Row = Mapping[str, Any]
Goals = Callable[[Mapping[str, Row]], Sequence[dict[str, Any]]]

# What torch and Triton compile goes to a folder that git ignores, so the next call finds it.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(FOLDER / "compiled/inductor"))
os.environ.setdefault("TRITON_CACHE_DIR", str(FOLDER / "compiled/triton"))
if "--rehearse" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch reads this when it first looks for devices
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads would mostly wait for each other

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["spider.training.stage", "spider.training.warmup", "torch.fx.experimental.symbolic_shapes"]
)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that every question has."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("--json", type=Path, metavar="FILE", help="file of the figures")
    options.add_argument("--rows", nargs="+", metavar="NAME", help="only these; * matches anything")
    options.add_argument("--again", action="store_true", help="measure again what is there")
    options.add_argument("--minutes", type=float, default=1e9, metavar="N", help="begin no longer row")
    options.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU; figures mean nothing")
    return options


def figures_file(chosen: argparse.Namespace) -> Path:
    """Return the file that keeps the figures."""
    return chosen.json or FOLDER / ("rehearsal.json" if chosen.rehearse else "figures.json")


class Question:
    """Measure and keep the rows of one script.

    Args:
        name: name of the script, and of its rows in the file.
        chosen: options of `parser`.
        goals: takes all rows and returns the goals, each made by `goal`.
    """

    def __init__(self, name: str, chosen: argparse.Namespace, goals: Goals) -> None:
        self.chosen = chosen
        self._goals = goals
        self._path = figures_file(chosen)
        self._deadline = time.monotonic() + 60 * chosen.minutes
        self._status = 0
        self._printed: set[str] = set()
        self._where = device(chosen.rehearse)
        self._figures = self._read()
        self.rows: dict[str, dict[str, Any]] = self._figures["questions"].setdefault(name, {})
        print(f"== {name}, {self._where['device']}, torch {self._where['torch']}", flush=True)
        if chosen.rehearse:
            print("REHEARSAL: tiny sizes on a CPU. These figures mean nothing.", flush=True)

    def _read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {"machine": self._where, "questions": {}}
        figures = json.loads(self._path.read_text())
        if figures["machine"]["device"] != self._where["device"]:
            sys.exit(
                f"{self._path}: holds figures of {figures['machine']['device']}, this is "
                f"{self._where['device']}; move it away or name another file with --json"
            )
        return figures

    def measure(
        self, name: str, seconds: float, call: Callable[[], dict[str, Any]], describe: Callable[[Row], str]
    ) -> dict[str, Any] | None:
        """Measure a row unless it is there, keep it and print it.

        Args:
            seconds: what the row takes at most on a GPU; it does not begin if fewer are left.
            call: returns the figures.
            describe: returns the line to print.

        Returns:
            The row; None if it failed, was left out by ``--rows``, or is left for another call.
        """
        if self.chosen.rows and not any(fnmatch(name, pattern) for pattern in self.chosen.rows):
            return None
        row = self.rows.get(name)
        code = code_digest()
        stale = row is None or ("error" in row and row["code"] != code)
        if row is not None and not stale and not self.chosen.again:
            other = "" if row["code"] == code else ", of other code"
            print(f"{name}: there already{other}: {_line(row, describe)}", flush=True)
            return None if "error" in row else row
        if not self.chosen.rehearse and time.monotonic() + seconds > self._deadline:
            self.leave(name, f"it takes up to {seconds:.0f} s")
            return None
        began = time.perf_counter()
        try:
            found = call()
        except Exception as error:  # the other rows are measured whichever error ends this one
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = f"{type(error).__name__}: {lines[-1] if lines else ''}"[:400]
            found = {"error": reason, "traceback": "".join(traceback.format_exception(error))}
        row = {**found, "took": round(time.perf_counter() - began, 1), "code": code}
        self.rows[name] = row
        self._write()
        print(f"{name}: {_line(row, describe)} ({row['took']} s)", flush=True)
        self._print_goals()
        return None if "error" in found else row

    @property
    def minutes_left(self) -> float:
        return (self._deadline - time.monotonic()) / 60

    def leave(self, name: str, why: str) -> None:
        """Leave a row for another call."""
        print(f"{name}: left for another call, {why}", flush=True)
        self._status = MISSING

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(self._figures, indent=1) + "\n")
        beside.replace(self._path)

    def _print_goals(self) -> None:
        """Print the goals whose figure is new."""
        if self.chosen.rehearse:
            return
        good = {name: row for name, row in self.rows.items() if "error" not in row}
        for found in self._goals(good):
            line = f"    goal: {found['goal']}: {found['outcome']}"
            if found["figure"] is not None and line not in self._printed:
                self._printed.add(line)
                print(line, flush=True)

    def end(self) -> int:
        """Return the exit status."""
        self._print_goals()
        return self._status


def _line(row: Row, describe: Callable[[Row], str]) -> str:
    return f"FAILED, {row['error']}" if "error" in row else describe(row)


def goal(aim: str, figure: float | None, met: Callable[[float], bool]) -> dict[str, Any]:
    """Return a goal with its figure and outcome: met, missed or not measured."""
    outcome = "not measured"
    if figure is not None:
        outcome = f"{'met' if met(figure) else 'missed'} ({figure:,.4g})"
    return {"goal": aim, "figure": figure, "outcome": outcome}


def start(function: Callable[..., Any], *arguments: Any) -> tuple[Any, multiprocessing.connection.Connection]:
    """Start a function in a process of its own; return the process and the pipe of its result.

    The process is forked from one that has loaded torch and has not touched the GPU.
    """
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    return process, receiver


def apart(function: Callable[..., Any], *arguments: Any, seconds: float = 600) -> Any:
    """Return what a function returns in a process of its own.

    One call then leaves no memory, no compiled code and no settings of torch to the next, and a call that
    runs out of memory ends only itself.

    Raises:
        RuntimeError: the function failed, died, or took more than ``seconds``.
    """
    return finish(*start(function, *arguments), seconds=seconds)


def finish(process: Any, receiver: multiprocessing.connection.Connection, seconds: float) -> Any:
    """Wait for a process of `start` and return its result, as `apart` does."""
    try:
        if not receiver.poll(seconds):
            raise RuntimeError(f"hangs: not done in {seconds:.0f} s")
        failed, result = receiver.recv()
        process.join(60)
    except EOFError:
        process.join(60)
        raise RuntimeError(f"ended with exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if failed:
        reason, where = result
        error = RuntimeError(reason)
        error.add_note(where)
        raise error
    return result


def _answer(
    sender: multiprocessing.connection.Connection, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    try:
        answer = False, function(*arguments)
    except Exception as error:
        answer = True, (str(error) or type(error).__name__, traceback.format_exc())
    sender.send(answer)


def device(rehearse: bool) -> dict[str, Any]:
    """Return the device, torch and the date; exit with the reason if no GPU can be used."""
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
    """Return a digest of all code in this tree that figures depend on."""
    code = hashlib.sha256()
    for folder in ("spider", "kernels", "benchmarks/gpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            code.update(path.read_bytes())
    return code.hexdigest()[:12]
