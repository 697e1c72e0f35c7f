"""SIGKILL at any moment loses at most the work since the last checkpoint, and never a byte of the result."""

import json
import os
import random
import shutil
import signal
import subprocess
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
    for stage in workflow.run["stages"]:
        stage["max_steps"] = 150
    return workflow


def test_a_run_killed_at_random_moments_equals_one_that_never_was(tmp_path):
    undisturbed, killed = in_folder(tmp_path / "undisturbed"), in_folder(tmp_path / "killed")
    start = time.monotonic()
    undisturbed("runs/small")
    whole = time.monotonic() - start
    expected = outcome(undisturbed)

    moments = random.Random(0)
    kills = 0
    while kills < KILLS:
        process = killed.start("runs/small")
        try:
            process.wait(moments.uniform(0.5, 0.5 * whole))
            shutil.rmtree(killed.results / "runs")  # finished before its kill: from the start again
        except subprocess.TimeoutExpired:
            kill(process)
            kills += 1
            killed("--unlock")
    killed("runs/small")
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
        assert "another trainer is at work here" in output
    finally:
        os.killpg(process.pid, signal.SIGKILL)
