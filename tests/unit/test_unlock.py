"""Only the lock of a workflow that was killed is removed; the process that holds another is named."""

import os
import signal
import subprocess
import sys

import pytest

from spider.unlock import enter

#: A workflow: it enters, Snakemake locks the folder, the files of the lock are recorded; then it works.
WORKFLOW = """
import sys, time
from pathlib import Path
from spider.unlock import enter

present = enter(Path.cwd())
(locks := Path(".snakemake/locks")).mkdir(exist_ok=True)
(locks / f"{sys.argv[1]}.output.lock").write_text("results/a")
if "unrecorded" not in sys.argv:
    present.record_locks()
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def started(tmp_path):
    """Start a workflow in the folder; all are killed at the end."""
    running = []

    def start(*words):
        command = [sys.executable, "-c", WORKFLOW, *words]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def killed(process):
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def locks(folder):
    return sorted(path.name for path in folder.glob(".snakemake/locks/*"))


def locked_by_another_snakemake(folder):
    (folder / ".snakemake/locks").mkdir(parents=True)
    (folder / ".snakemake/locks/7.input.lock").write_text("somebody/elses/file")


def test_the_lock_of_a_workflow_without_spider_stays(tmp_path, caplog):
    locked_by_another_snakemake(tmp_path)
    enter(tmp_path)
    assert locks(tmp_path) == ["7.input.lock"]
    assert "locked by a Snakemake without a record (7.input.lock)" in caplog.text


def test_the_lock_of_a_killed_workflow_is_removed_and_no_other(tmp_path, started, caplog):
    living, dead = started("0"), started("1")
    locked = tmp_path / ".snakemake/locks/7.input.lock"
    locked.write_text("somebody/elses/file")
    killed(dead)
    assert enter(tmp_path, change=False) is None
    assert locks(tmp_path) == ["0.output.lock", "1.output.lock", "7.input.lock"]
    assert f"process {dead.pid} on" in caplog.text and "the next run removes its lock" in caplog.text
    caplog.clear()
    enter(tmp_path)
    assert locks(tmp_path) == ["0.output.lock", "7.input.lock"]
    assert f"process {dead.pid} on" in caplog.text and "was killed; its lock is removed" in caplog.text
    assert f"process {living.pid} on" in caplog.text and "do not use --unlock" in caplog.text


def test_a_lock_of_the_same_name_that_another_snakemake_made_since_stays(tmp_path, started):
    killed(started("0"))
    lock = tmp_path / ".snakemake/locks/0.output.lock"
    lock.unlink()
    lock.write_text("somebody/elses/file")
    os.utime(lock, (1, 1))
    enter(tmp_path)
    assert locks(tmp_path) == ["0.output.lock"]


def test_a_lock_that_was_not_recorded_in_time_stays_with_the_remedy(tmp_path, started, caplog):
    killed(started("0", "unrecorded"))
    (record,) = tmp_path.glob(".snakemake/spider/*")
    with open(record, "a") as file:
        file.write('{"locks": {"0.outp')
    enter(tmp_path)
    assert locks(tmp_path) == ["0.output.lock"] and "snakemake --unlock" in caplog.text
    assert not record.exists()


def test_a_workflow_that_ended_is_not_reported(tmp_path, started, caplog):
    process = started("0")
    (tmp_path / ".snakemake/locks/0.output.lock").unlink()
    killed(process)
    present = enter(tmp_path)
    assert not caplog.text
    assert [str(path) for path in tmp_path.glob(".snakemake/spider/*")] == [present.record.name]
