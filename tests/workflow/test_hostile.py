"""Faults of users, disks and machines give clear messages and lose nothing."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from .conftest import text_of, wait_for

FIRST = "results/runs/small/first/train.json"


def test_one_training_survives_a_second_invocation_ctrl_c_and_a_damaged_checkpoint(prepared):
    """The second invocation reports the lock, Ctrl-C saves, and the log names the damaged checkpoint."""
    prepared.run["stages"][0]["max_steps"] = 2000
    checkpoints = prepared.stage("first") / "checkpoints"
    log = prepared.results / "logs/train/small/first.log"
    process = prepared.start(FIRST)
    wait_for(lambda: len(list(checkpoints.glob("step-*"))) >= 2, process)
    try:
        refused = prepared(fails=True)
        assert "cannot be locked" in refused and "--unlock" in refused
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    *_, before, newest = sorted(checkpoints.glob("step-*"))
    step = int(newest.name.removeprefix("step-"))
    assert f"step {step}" in output or newest.name in output, output

    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as f:
        f.seek(largest.stat().st_size // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 0xFF]))
    process = prepared.start(FIRST)
    wait_for(lambda: "going on from" in text_of(log), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert newest.name in text_of(log) and f"going on from {before.name}" in text_of(log)


@pytest.fixture
def mounted(tmp_path):
    """Return a function that mounts a tmpfs with the given options. It needs root."""
    points = []

    def mount(path: Path, options: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True
        )
        if done.returncode != 0:
            pytest.skip(f"cannot mount a file system here: {done.stderr.decode().strip()}")
        points.append(path)

    yield mount
    for point in points:
        subprocess.run(["umount", "--lazy", str(point)])


def test_a_read_only_results_folder_is_named(workflow, mounted):
    mounted(workflow.results, "ro,size=1m")
    output = workflow(fails=True)
    assert f"results: {workflow.results}: cannot be written; make it writable, or name another" in output
    assert "Traceback" not in output and "OSError" not in output
    assert not list((workflow.folder / ".snakemake/locks").glob("*"))


def test_a_full_disk_stops_a_training_which_resumes_when_there_is_space(prepared_folder, prepared, mounted):
    mounted(prepared.results, "size=24m")
    shutil.copytree(prepared_folder / "results", prepared.results, dirs_exist_ok=True)
    prepared.run["stages"][0]["max_steps"] = 60
    filler = prepared.results / "filler"
    process = prepared.start(FIRST)
    checkpoints = prepared.stage("first") / "checkpoints"
    wait_for(lambda: list(checkpoints.glob("step-*")), process)
    free = shutil.disk_usage(prepared.results).free
    with contextlib.suppress(OSError):  # The disk is full already if the trainer writes at the same time.
        filler.write_bytes(b"\0" * (free - 4096))
    output, _ = process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("the run finished before the disk was full")
    assert "no space" in output.lower(), output
    filler.unlink()
    prepared(FIRST)
    assert prepared.receipt("first")["steps"] == 60
