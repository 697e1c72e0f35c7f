"""SIGKILL at any moment loses at most the work since the last checkpoint, and changes no result."""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from spider.common.files import read_json
from spider.common.results import StageFolder
from spider.config import load_config

from .conftest import PATIENCE, ROOT, finished, text_of, wait_for


def test_a_run_with_faults_equals_one_without(tmp_path):
    # This seed draws a damaged checkpoint, a full disk, and a kill while saving.
    chosen = ["--quick", "--kills", "3", "--seed", "390", "--json", tmp_path / "found.json"]
    torture = [sys.executable, ROOT / "benchmarks/torture.py", *chosen]
    done = subprocess.run(torture, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_json(tmp_path / "found.json")["figures"]
    assert found["kills"] == 3 and all(found["equal"])


@pytest.mark.long
def test_the_exhibits_of_the_readme(tmp_path):
    picture = tmp_path / "kill.svg"
    exhibits = [sys.executable, ROOT / "benchmarks/exhibits.py", "--svg", picture]
    done = subprocess.run([*exhibits, "--folder", tmp_path / "runs"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGKILL") == 3
    assert re.search(r"^train +main +Params have changed.*\n(?s:.*)^train +anneal +Input", done.stdout, re.M)
    assert re.search(r"^commit +[0-9a-f]{40}(-dirty)? +spider evaluate smoke/anneal", done.stdout, re.M)
    assert picture.read_text().count("SIGKILL") == 4  # with the title
    assert "@font-face" not in picture.read_text()


@pytest.mark.parametrize("family", ["spider", "gpt"])
def test_each_family_has_a_configuration_for_the_torture_test(family, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    torture = importlib.import_module("torture")
    config = load_config(torture.configuration(family, 30))
    assert [config.stage(torture.RUN, stage).model.family for stage in torture.STAGES] == [family] * 2


def test_the_next_snakemake_waits_for_the_trainer_of_a_killed_one(prepared):
    """SIGKILL of Snakemake leaves its trainer running. The same command resumes, and trains no step twice."""
    first = "results/runs/small/first/train.json"
    prepared.run["stages"][0]["max_steps"] = 60
    left = prepared.start(first)
    stage, log = StageFolder(prepared.stage("first")), prepared.results / "logs/train/small/first.log"
    wait_for(lambda: list(stage.checkpoints.glob("step-*")), left, seconds=PATIENCE)
    trainer = read_json(stage.holder)["pid"]
    os.kill(trainer, signal.SIGSTOP)  # It then lives until the next Snakemake waits for it.
    os.kill(left.pid, signal.SIGKILL)
    left.wait()
    try:
        assert not stage.receipt.exists()
        again = prepared.start(first)
        wait_for(lambda: "waiting for it to end" in text_of(log), again, seconds=PATIENCE)
        os.kill(trainer, signal.SIGCONT)
        output, status = finished(again, PATIENCE)
        assert status == 0, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(left.pid, signal.SIGKILL)
    assert "another trainer is at work here" in text_of(log)
    steps = [json.loads(line)["step"] for line in stage.metrics.open()]
    assert steps == list(range(5, 61, 5)) and prepared.receipt("first")["global_step"] == 60


def test_the_lock_of_a_killed_workflow_is_removed_and_that_of_a_living_one_stays(workflow):
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
        refused = workflow("datasets/text", fails=True)
        assert "LockException" in refused and f"process {living.pid} on" in refused
        assert list(locks.iterdir())
    finally:
        os.killpg(living.pid, signal.SIGKILL)
        living.wait()
    assert list(locks.iterdir())
    workflow("--dry-run", "datasets/text")
    assert list(locks.iterdir())
    assert "left by a workflow that was killed, and removed" in workflow("datasets/text")
    assert not locks.exists()
