"""A workflow starts beside others and after killed ones, and names the setting that a scheduler refuses."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spider.workflow.start import FILE, enter, one_word, remedies
from tests.advice.followed import advised, refused

#: A workflow: it enters, Snakemake locks its files; then it works.
WORKFLOW = """
import sys, time
from pathlib import Path
from spider.workflow.start import enter

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
    assert f"process {living.pid} on" in caplog.text
    advised(caplog.text, "workflow/start.py", "wait for that process or stop it, and do not use --unlock")
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


def test_an_environment_among_spaces_gets_a_link_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "my environment"))
    python = f"{sys.prefix}/bin/python"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    with refused("workflow/start.py", "move the project, or set XDG_CACHE_HOME to a folder without a space"):
        one_word(python)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refused("workflow/start.py", "name another folder in XDG_CACHE_HOME, or move the project"):
        one_word(python)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    link = Path(one_word(python)).parents[1]
    assert " " not in str(link) and link.readlink() == Path(sys.prefix)
    moved = str(tmp_path / "environment/bin/python")
    assert one_word(moved) == moved


@pytest.mark.parametrize(
    ("said", "setting"),
    [
        ("sbatch: error: invalid partition specified: fast", "no partition fast: name those of your site in"),
        ("Batch job submission failed: Invalid account or account/partition combination", "set account"),
        ("sbatch: error: Invalid generic resource (gres) specification", "set max_gpu of the partitions in"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "set longest"),
        ("sbatch: error: Memory specification can not be satisfied", "set threads, mem_mb, gpus and nodes"),
        ("/bin/sh: 1: sbatch: not found", "on a login node"),
        ("[Errno 2] No such file or directory: 'sacct'", "on a login node"),
        ("Batch job submission failed: Unable to contact slurm controller", "as soon as `sinfo` answers"),
    ],
)
def test_a_refusal_of_a_scheduler_names_the_setting_to_change(tmp_path, said, setting):
    log = tmp_path / "snakemake.log"
    log.write_text(f"Error in rule train:\n    message: SLURM sbatch failed. {said}'.\n" * 3)
    (advice,) = remedies([str(log)])
    assert setting in advice


def test_any_other_failure_is_left_to_speak_for_itself(tmp_path):
    log = tmp_path / "snakemake.log"
    log.write_text("Error in rule train: CalledProcessError, exit status 1")
    assert remedies([str(log)]) == []
