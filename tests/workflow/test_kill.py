"""SIGKILL at any moment loses at most the work since the last checkpoint, and never a byte of the result."""

import json
import os
import random
import signal
import time

from .conftest import Workflow

KILLS = 12


def kill(process):
    """SIGKILL snakemake and everything it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcome(workflow):
    """What a run amounts to: weights, losses and scores; not the times it took."""
    found = {}
    for stage in ("first", "second"):
        receipt = workflow.receipt(stage)
        evaluation = json.loads((workflow.stage(stage) / "evaluation.json").read_text())
        lines = (workflow.stage(stage) / "metrics.jsonl").read_text().splitlines()
        losses = [(row["step"], row["metrics"]["train/loss"]) for row in map(json.loads, lines)]
        found[stage] = (receipt["weights"], receipt["bytes"], losses, evaluation["bpb"], evaluation["sample"])
    return found


def in_folder(path):
    path.mkdir()
    workflow = Workflow(path)
    workflow.config["tracking"] = {"enabled": False}
    return workflow


def test_a_run_killed_at_random_moments_equals_one_that_never_was(tmp_path):
    undisturbed, killed = in_folder(tmp_path / "undisturbed"), in_folder(tmp_path / "killed")
    start = time.monotonic()
    undisturbed()
    whole = time.monotonic() - start
    expected = outcome(undisturbed)

    moments = random.Random(0)
    kills = 0
    while kills < KILLS:
        process = killed.start()
        # The later kills come sooner after the start, so that they do not all meet a finished run.
        time.sleep(moments.uniform(0.3, 0.7 * whole))
        if process.poll() is not None:  # it finished before the kill: take a stage away and go on
            (killed.stage("second") / "train.json").unlink(missing_ok=True)
            (killed.stage("first") / "train.json").unlink(missing_ok=True)
            continue
        kill(process)
        kills += 1
        killed("--unlock")
    killed()
    assert outcome(killed) == expected


def test_an_orphaned_trainer_keeps_its_run_folder_to_itself(workflow):
    """Killing snakemake alone leaves the trainer: the next run says so and breaks nothing."""
    workflow.run["stages"][0]["max_steps"] = 3000
    process = workflow.start()
    checkpoints = workflow.stage("first") / "checkpoints"
    deadline = time.monotonic() + 90
    while not list(checkpoints.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    try:
        workflow("--unlock")
        output = workflow(fails=True)
        assert "is training in this folder" in output
    finally:
        os.killpg(process.pid, signal.SIGKILL)
