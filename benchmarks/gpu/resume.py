"""Killed on a GPU: does a training that is killed and goes on end with the same bytes as one that is not?

    python benchmarks/gpu/resume.py

SIGKILL strikes `KILLS` times, each soon after a checkpoint that is new. benchmarks/torture.py does more to
trainings, on any machine; here it is the device's arithmetic, generator and compiled code that have to start
again from the same state.
"""

from __future__ import annotations

import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import questions
from trainings import (
    PATIENCE,
    bytes_of,
    differences,
    finish,
    folder_for,
    goals_of,
    precisions,
    said,
    spec_for,
    start,
    undisturbed,
)

from spider.checkpoints import records
from spider.config import StageSpec
from spider.results import StageFolder

KILLS = 2


def main() -> None:
    chosen = questions.parser(__doc__).parse_args()
    question = questions.Question("resume", chosen, goals_of)
    for precision in precisions(chosen.rehearse):
        question.measure(precision, 300, partial(killed, precision, chosen.rehearse), said)
    question.end()


def killed(precision: str, rehearse: bool) -> dict[str, Any]:
    """A training killed and gone on with, compared with one that was left alone."""
    alone = bytes_of(undisturbed(precision, rehearse))
    spec, folder = spec_for(precision, rehearse), folder_for(f"killed, {precision}")
    shutil.rmtree(folder, ignore_errors=True)
    draw, struck = random.Random(0), []
    for _ in range(1 if rehearse else KILLS):
        if (at := strike(spec, folder, draw)) is not None:
            struck.append(at)
    if not struck:
        raise RuntimeError("it ended before it could be killed")
    finish(start(spec, folder))
    differ = differences(alone, bytes_of(folder))
    return {"compared": len(alone), "differ": differ, "kills": len(struck), "killed_after_steps": struck}


def strike(spec: StageSpec, folder: Path, draw: random.Random) -> int | None:
    """Train until there is a new checkpoint, and a moment longer; then kill it. The checkpoint's step, or
    None if it had ended before."""
    place = StageFolder(folder).checkpoints
    known, process = newest(place), start(spec, folder)
    deadline = time.monotonic() + PATIENCE
    while newest(place) == known and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.1))
    ended = process.poll()
    process.kill()
    _, said = process.communicate()
    if ended:
        raise RuntimeError(said.splitlines()[-1] if said else f"exit status {ended}")
    return newest(place) if ended is None else None


def newest(place: Path) -> int | None:
    return records.step_of(found[-1]) if (found := records.steps(place)) else None


if __name__ == "__main__":
    main()
