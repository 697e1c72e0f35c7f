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

from spider.checkpoints.records import read_manifest, steps
from spider.common.files import read_json, sha256
from spider.common.results import StageFolder
from spider.config import load_config

from .conftest import PATIENCE, ROOT, finished, text_of, untracked, wait_for

FIRST = "results/runs/small/first/train.json"
SCORED = [
    f"results/runs/small/{stage}/{name}.json"
    for stage in ("first", "second")
    for name in ("evaluation", "sample")
]


def outcome(workflow):
    """Return all that a kill may not change: tensors, receipts, curves and scores, without their times."""
    found = {}
    for name in ("first", "second"):
        stage = StageFolder(workflow.stage(name))
        receipt, evaluation = read_json(stage.receipt), read_json(stage.evaluation)
        rows = [json.loads(line) for line in stage.metrics.open()]
        curve = [
            [row["step"], row["metrics"]["train/loss"], row["metrics"]["train/grad_norm"]] for row in rows
        ]
        kept = (stage.path / receipt["checkpoint"]).glob("*.safetensors")
        found[name] = [
            {path.name: sha256(path) for path in kept},
            *(receipt[key] for key in ("weights", "steps", "bytes", "position", "loss")),
            *(evaluation[key] for key in ("weights", "nats", "bpb", "results")),
            curve,
            sha256(stage.sample),
        ]
    return found


def killed(workflow, *targets, when):
    """Start the workflow, and kill it and its jobs as soon as something is so, if only for milliseconds."""
    process = workflow.start(*targets, forked=True)
    while not when():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_run_that_is_killed_and_damaged_again_and_again_ends_with_the_same_bytes(prepared, trained_folder):
    """Options of `spider train` were set in the environment when the folder to compare with was made."""
    first, second = (StageFolder(prepared.stage(name)) for name in ("first", "second"))
    log = prepared.results / "logs/train/small/first.log"
    killed(prepared, *SCORED, when=lambda: [*first.checkpoints.glob(".step-*")])  # while it saves
    killed(prepared, *SCORED, when=lambda: len(steps(first.checkpoints)) > 1)
    *_, before, newest = steps(first.checkpoints)
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    first.receipt.unlink(missing_ok=True)  # A fast machine may have ended the stage before the kill.
    log.unlink()
    killed(prepared, *SCORED, when=lambda: "going on from" in text_of(log))
    assert f"going on from {before.name}" in text_of(log) and newest.name in text_of(log)
    killed(prepared, *SCORED, when=lambda: [*second.checkpoints.glob(".step-*")])
    killed(prepared, *SCORED, when=lambda: text_of(prepared.results / "logs/evaluate/small/second.log"))
    prepared(*SCORED)
    undisturbed = untracked(trained_folder)
    assert outcome(prepared) == outcome(undisturbed)
    made = read_manifest(undisturbed.stage("first") / undisturbed.receipt("first")["checkpoint"])
    assert made.identity == load_config(undisturbed.config).stage("small", "first").identity
    said = (undisturbed.results / "logs/train/small/first.log").read_text()
    assert said.count("SEQ_LEN, LR: set in the environment and ignored") == 1


@pytest.mark.long
@pytest.mark.parametrize("family", ["spider", "gpt"])
def test_a_run_with_faults_equals_one_without(tmp_path, family):
    # This seed draws for the Spider a damaged checkpoint, a full disk, and a kill while saving.
    chosen = f"--quick --kills 3 --seed 390 --family {family} --json {tmp_path}/found.json".split()
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
    """SIGKILL of Snakemake alone leaves its trainer running. The same command trains no step twice."""
    prepared.run["stages"][0]["max_steps"] = 60
    left = prepared.start(FIRST)
    stage, log = StageFolder(prepared.stage("first")), prepared.results / "logs/train/small/first.log"
    wait_for(lambda: list(stage.checkpoints.glob("step-*")), left)
    trainer = read_json(stage.holder)["pid"]
    os.kill(trainer, signal.SIGSTOP)  # It then lives until the next Snakemake waits for it.
    os.kill(left.pid, signal.SIGKILL)
    left.wait()
    try:
        assert not stage.receipt.exists()
        again = prepared.start(FIRST, forked=True)
        wait_for(lambda: "waiting for it to end" in text_of(log), again)
        os.kill(trainer, signal.SIGCONT)
        output, status = finished(again, PATIENCE)
        assert status == 0, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(left.pid, signal.SIGKILL)
    assert "another trainer is at work here" in text_of(log)
    logged = [json.loads(line)["step"] for line in stage.metrics.open()]
    assert logged == list(range(5, 61, 5)) and prepared.receipt("first")["global_step"] == 60


def test_the_lock_of_a_killed_workflow_is_removed_and_that_of_a_living_one_stays(prepared):
    prepared.run["stages"][0]["max_steps"] = 3000
    locks = prepared.folder / ".snakemake/locks"
    living = prepared.start(FIRST, forked=True)
    wait_for(lambda: locks.is_dir() and list(locks.iterdir()), living)
    try:
        refused = prepared(FIRST, fails=True)
        assert "LockException" in refused and re.search(r"process \d+ on", refused)
        assert "do not use --unlock" in refused and list(locks.iterdir())
    finally:
        os.killpg(living.pid, signal.SIGKILL)
        living.wait()
    assert list(locks.iterdir())
    prepared("--dry-run", FIRST)
    assert list(locks.iterdir())
    prepared.run["stages"][0]["max_steps"] = 30
    assert "left by a workflow that was killed, and removed" in prepared(FIRST)
    assert not locks.exists()
