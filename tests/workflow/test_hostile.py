"""What a user, a disk or a machine may do to a run: a clear message each time, and nothing lost."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spider.files import read_json

from .conftest import Workflow, said, wait_for

FIRST = "results/runs/small/first/train.json"


def test_a_second_invocation_is_told_of_the_lock_ctrl_c_saves_and_what_is_damaged_is_named(prepared):
    """One training, to which all of it happens; the same command goes on with it."""
    prepared.run["stages"][0]["max_steps"] = 2000
    checkpoints, log = (
        prepared.stage("first") / "checkpoints",
        prepared.results / "logs/train/small/first.log",
    )
    process = prepared.start(FIRST)
    wait_for(lambda: len(list(checkpoints.glob("step-*"))) >= 2, process)
    try:
        refused = prepared(fails=True)
        assert "cannot be locked" in refused and "--unlock" in refused
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
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
    wait_for(lambda: "going on from" in said(log), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert newest.name in said(log) and f"going on from {before.name}" in said(log)


@pytest.fixture
def mounted(tmp_path):
    """Mount tmpfs file systems with chosen options below a folder; needs root."""
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
    assert "error: results: cannot be written (Read-only file system); make it writable, or" in output
    assert "Traceback" not in output and "OSError" not in output
    assert not list((workflow.folder / ".snakemake/locks").glob("*"))


def test_a_full_disk_stops_with_a_message_and_the_run_goes_on_when_there_is_room(
    prepared_folder, prepared, mounted
):
    mounted(prepared.results, "size=24m")
    shutil.copytree(prepared_folder / "results", prepared.results, dirs_exist_ok=True)
    prepared.run["stages"][0]["max_steps"] = 60
    filler = prepared.results / "filler"
    process = prepared.start(FIRST)
    checkpoints = prepared.stage("first") / "checkpoints"
    wait_for(lambda: list(checkpoints.glob("step-*")), process)
    free = shutil.disk_usage(prepared.results).free
    with contextlib.suppress(OSError):  # the trainer may be writing too: then the disk is full already
        filler.write_bytes(b"\0" * (free - 4096))
    output, _ = process.communicate(timeout=90)
    if process.returncode == 0:
        pytest.skip("the run finished before the disk was full")
    assert "no space" in output.lower(), output
    filler.unlink()
    prepared(FIRST)
    assert prepared.receipt("first")["steps"] == 60


def test_a_machine_without_git_and_a_path_with_spaces(tmp_path):
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    workflow = Workflow(folder)
    del workflow.run["stages"][1]
    bare = tmp_path / "bin"
    bare.mkdir()
    # The executor plugin for Slurm calls `which` wherever Snakemake starts.
    for tool in ("bash", "sh", "env", "rm", "mkdir", "which"):
        (bare / tool).symlink_to(shutil.which(tool))
    output = workflow(PATH=str(bare), PYTHONPATH="")
    assert "bits per byte" in output
    assert read_json(workflow.results / "report/summary.json")["runs"]["small"]
    assert sys.executable  # the interpreter itself was found without PATH
