"""SIGKILL at any moment loses at most the work since the last checkpoint, and never a byte of the result."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

from spider.files import read_json

from .conftest import ROOT


def test_a_run_that_is_killed_damaged_and_out_of_space_equals_one_that_never_was(tmp_path):
    torture = [
        sys.executable,
        ROOT / "benchmarks/torture.py",
        "--quick",
        "--kills",
        "4",
        "--json",
        tmp_path / "found.json",
    ]
    done = subprocess.run(torture, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_json(tmp_path / "found.json")["figures"]
    assert found["kills"] == 4 and all(found["equal"])


def test_what_a_killed_snakemake_left_at_work_is_waited_for_and_taken_over(workflow):
    """Killing snakemake alone leaves the trainer; the same command goes on, and nothing is trained twice."""
    workflow.run["stages"][0]["max_steps"] = 250
    process = workflow.start("results/runs/small/first/train.json")
    checkpoints = workflow.stage("first") / "checkpoints"
    deadline = time.monotonic() + 90
    while not list(checkpoints.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    try:
        workflow("results/runs/small/first/train.json")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = (workflow.results / "logs/train/small/first.log").read_text()
    assert "another trainer is at work here" in said and "waiting for it to end" in said
    steps = [json.loads(line)["step"] for line in (workflow.stage("first") / "metrics.jsonl").open()]
    assert steps == list(range(5, 251, 5)) and workflow.receipt("first")["global_step"] == 250


def test_the_lock_of_a_killed_workflow_is_gone_at_once_and_that_of_a_living_one_stays(workflow):
    workflow.run["stages"][0]["max_steps"] = 3000
    locks = workflow.folder / ".snakemake/locks"

    def started():
        process = workflow.start()
        deadline = time.monotonic() + 90
        while not (locks.is_dir() and list(locks.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return process

    living = started()
    try:
        assert "LockException" in workflow("datasets/text", fails=True)
        assert list(locks.iterdir())
    finally:
        os.killpg(living.pid, signal.SIGKILL)
        living.wait()
    assert list(locks.iterdir())
    assert "was killed; going on" in workflow("datasets/text")
    assert not locks.exists()
