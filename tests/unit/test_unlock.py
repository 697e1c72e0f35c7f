"""Only the locks of workflows that were killed are removed; another one at work is named."""

import os
import signal
import subprocess
import sys

import pytest

from spider.workflow.unlock import FILE, enter

#: A workflow: it enters, Snakemake locks its files; then it works.
WORKFLOW = """
import sys, time
from pathlib import Path
from spider.workflow.unlock import enter

entered = enter(Path.cwd(), Path("results"))
(locks := Path(".snakemake/locks")).mkdir(parents=True, exist_ok=True)
(locks / f"{sys.argv[1]}.output.lock").write_text("text.jsonl\\nresults/a\\n")
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Start a workflow in the folder; all are killed at the end."""
    monkeypatch.chdir(tmp_path)
    running = []

    def start(name):
        command = [sys.executable, "-c", WORKFLOW, name]
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


def entered(folder):
    """Enter and leave, as a workflow that ends at once."""
    enter(folder, (folder / "results").relative_to(folder)).close()


def locks(folder):
    return sorted(path.name for path in folder.glob(".snakemake/locks/*"))


def test_the_locks_of_killed_workflows_are_removed_and_those_of_other_results_stay(tmp_path, started, caplog):
    dead, living = started("0"), started("1")
    other = tmp_path / ".snakemake/locks/7.output.lock"
    other.write_text("elsewhere/results/a\n")
    killed(dead)
    entered(tmp_path)
    assert locks(tmp_path) == ["0.output.lock", "1.output.lock", "7.output.lock"]
    assert f"process {living.pid} on" in caplog.text and "do not use --unlock" in caplog.text
    caplog.clear()
    killed(living)
    entered(tmp_path)
    assert locks(tmp_path) == ["7.output.lock"]
    assert "0.output.lock: left by a workflow that was killed, and removed" in caplog.text


def test_a_workflow_that_ended_is_not_reported(tmp_path, started, caplog):
    entered(tmp_path)
    assert (tmp_path / "results" / FILE).exists()
    entered(tmp_path)
    assert not caplog.text


def test_a_disk_without_locks_gets_the_remedy(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert enter(tmp_path, tmp_path) is None
    assert "this disk has no file locks (No locks available)" in caplog.text
