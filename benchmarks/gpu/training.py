"""Train the full model and evaluate it, in slices that end in time and go on where they were.

    python benchmarks/gpu/training.py [--minutes 9]

``training.yaml`` is trained by `spider train`. When the time of a slice is over, the process gets a SIGTERM,
saves and leaves with status 75. The next slice goes on, in this call or another. A slice lasts as long as
there are minutes left. The last row is `spider evaluate`: bits per byte beside the compressors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import questions
import yaml
from questions import FOLDER, MISSING, ROOT, Row, goal
from texts import corpus
from trainings import SMOKE

from spider import cli
from spider.config import load_config
from spider.files import read_json, write_json
from spider.results import Results, StageFolder

CONFIG = Path(__file__).with_name("training.yaml")
#: Output of the last `spider` command.
LOG = FOLDER / "work/spider.log"
#: Minutes: the shortest slice that is worth it, and the most that saving and an evaluation take.
LEAST, SAVING, EVALUATING = 2.0, 1.5, 3.0


def main(chosen: argparse.Namespace) -> int:
    question = questions.Question("training", chosen, goals_of)
    path = configuration(chosen.rehearse)
    config = load_config(path)
    (run,) = config.runs
    stage = config.run(run).stages[0].name
    folder = Results(Path(config.results)).stage(run, stage)
    if question.rows and not folder.path.exists():
        print("the folder of the training is gone: it begins again", flush=True)
        question.rows.clear()
    while not folder.receipt.exists():
        slices = sum(name.startswith("slice") for name in question.rows)
        name, minutes = f"slice {slices + 1}", question.minutes_left - SAVING
        if minutes < LEAST and not chosen.rehearse:
            question.leave(name, f"a slice takes {LEAST + SAVING:g} minutes or more")
            break

        def enough(began: int) -> bool:  # a rehearsal stops the first slice as soon as it has logged
            return chosen.rehearse and not slices and last_row(folder)["step"] > began  # noqa: B023

        call = partial(train, path, run, stage, folder, minutes, enough)
        if question.measure(name, 0, call, describe_slice) is None:
            break  # it failed, or --rows leaves it out
    if folder.receipt.exists():
        call = partial(evaluate, path, run, stage, folder)
        question.measure("evaluation", 60 * EVALUATING, call, describe_evaluation)
    return question.end()


def configuration(rehearse: bool) -> Path:
    """Write the configuration with its text, and for a rehearsal with a small model; return the file."""
    raw = yaml.safe_load(CONFIG.read_text())
    run = raw["runs"]["spider-1b"]
    name, _ = corpus()
    raw["results"], run["data"] = str(FOLDER / "results"), name
    raw["datasets"] = {name: raw["datasets"].get(name, {"source": {"kind": "mock"}})}
    if rehearse:
        smoke = yaml.safe_load(SMOKE.read_text())["runs"]["smoke"]
        run |= {"model": smoke["model"], "precision": "fp32", "resources": {}}
        run["defaults"] = {**smoke["defaults"], "ckpt_every": 1000}
        run["stages"] = [{"name": "main", "max_steps": 20, "schedule": "wsd", "warmup_steps": 5}]
        run["evaluation"] = {"max_bytes": 2000, "loops_bytes": 0, "sample_bytes": 20, "batch": 4}
        raw["runs"] = {"rehearsal": run}
    write_json(path := FOLDER / "work/training.json", raw)
    return path


def start(path: Path, *words: str) -> Any:
    """Start a `spider` command and return its process; `end` waits for it."""
    process, _ = questions.start(_run, ["spider", "--config", str(path), *words], LOG)
    return process


def _run(words: list[str], log: Path) -> None:
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(ROOT)
    sys.argv = words
    cli.main()


def end(process: Any, minutes: float) -> int:
    """Wait for a command and return its exit status, 0 or `MISSING`."""
    process.join(60 * minutes)
    if process.is_alive():
        process.kill()
        raise RuntimeError(f"hangs: not done in {minutes:.0f} minutes")
    if process.exitcode not in (0, MISSING):
        lines = LOG.read_text().strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {process.exitcode}")
    return int(process.exitcode)


def train(
    path: Path, run: str, stage: str, folder: StageFolder, minutes: float, enough: Callable[[int], bool]
) -> dict[str, Any]:
    """Train one slice; it ends early if ``enough`` of its first step is true."""
    began, before = time.monotonic(), last_row(folder)
    process = start(path, "train", f"{run}/{stage}")
    while process.is_alive() and time.monotonic() < began + 60 * minutes and not enough(before["step"]):
        time.sleep(0.05)
    if process.is_alive():
        process.terminate()
    stopped = time.monotonic()
    status = end(process, SAVING + 5)
    after = last_row(folder)
    steps = after["step"] - before["step"]
    return {
        "minutes": (stopped - began) / 60,
        "saving": time.monotonic() - stopped,
        "from_step": before["step"],
        "to_step": after["step"],
        "steps_a_minute": 60 * steps / max(stopped - began, 1e-9),
        "finished": status == 0,
        "metrics": after["metrics"],
    }


def last_row(folder: StageFolder) -> dict[str, Any]:
    """Return the last row of the metrics."""
    lines = folder.metrics.read_text().splitlines() if folder.metrics.exists() else []
    return json.loads(lines[-1]) if lines else {"step": 0, "metrics": {}}


def evaluate(path: Path, run: str, stage: str, folder: StageFolder) -> dict[str, Any]:
    """Evaluate the stage and write its sample."""
    for command in ("evaluate", "sample"):
        end(start(path, command, f"{run}/{stage}"), minutes=10)
    measured, receipt = read_json(folder.evaluation), read_json(folder.receipt)
    known = ("bpb", "bpb_strict", "bytes", "bytes_per_second", "seconds")
    trained = {name: receipt[name] for name in ("steps", "bytes", "seconds", "checkpoint_seconds", "loss")}
    written: dict[str, Any] = {"sample": read_json(folder.sample)["text"]}
    rows = measured["results"]["baselines"]["rows"]
    # The model's score is of each document alone; zpaq is not measured so.
    written["compressors"] = {row["label"]: row["value"] for row in rows if row["value"] is not None}
    return {**{name: measured[name] for name in known}, **written, "trained": trained}


def describe_slice(row: Row) -> str:
    loss, speed = row["metrics"].get("train/bpb"), row["metrics"].get("train/bytes_per_second")
    figures = "" if loss is None else f", {loss:.3f} bits per byte in training"
    figures += "" if speed is None else f", {speed:,.0f} bytes/s"
    state = "finished" if row["finished"] else f"saved in {row['saving']:.0f} s"
    return f"{row['minutes']:.1f} minutes, steps {row['from_step']} to {row['to_step']}{figures}; {state}"


def describe_evaluation(row: Row) -> str:
    trained = row["trained"]
    others = ", ".join(f"{name} {rate:.3f}" for name, rate in row["compressors"].items())
    steps = f"after {trained['steps']} steps, {trained['bytes']:,} bytes in {trained['seconds']:.0f} s"
    scored = f"on {row['bytes']:,} bytes at {row['bytes_per_second']:,.0f} bytes/s"
    return f"{row['bpb']:.4f} bits per byte {scored} ({others}), {steps}"


def goals_of(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    row = rows.get("evaluation")
    figure = row["bpb"] - min(row["compressors"].values()) if row and row["compressors"] else None
    return [goal("bits per byte below the best compressor's", figure, lambda x: x < 0)]


if __name__ == "__main__":
    sys.exit(main(questions.parser(__doc__).parse_args()))
