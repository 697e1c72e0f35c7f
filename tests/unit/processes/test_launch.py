"""The launcher on one node. tests/workflow/test_slurm.py starts several nodes on a real Slurm."""

import logging

import pytest

from spider.processes.launch import launch


@pytest.fixture(autouse=True)
def restored_log():
    """Restore the log, which the launcher disables for the whole process of the tests."""
    yield
    logging.disable(logging.NOTSET)


def test_several_nodes_without_slurm_are_refused_with_a_remedy(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match="this is not a Slurm job; elsewhere start torchrun on each machine"):
        launch(4, ["-c", "pass"], nodes=2)


def test_processes_that_nodes_cannot_share_evenly_are_refused():
    with pytest.raises(ValueError, match="2 nodes cannot share 3 processes evenly"):
        launch(3, ["-c", "pass"], nodes=2)


def test_the_launcher_returns_the_exit_status_of_its_processes(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launch(2, ["-c", "raise SystemExit(75)"]) == 75
    assert launch(2, ["-c", "raise SystemExit(3)"]) == 1
    assert launch(2, ["-c", "pass"]) == 0
