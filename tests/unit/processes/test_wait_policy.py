"""OpenMP's threads sleep at barriers on a busy machine and spin on an idle one, unless the user sets it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from spider.processes import wait_policy
from spider.processes.wait_policy import BUSY, QUIET, Governor, set_wait_policy, waiting_seconds

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def threads() -> set[str]:
    """Return the ids of this process's threads, including those that Python did not start."""
    return set(waiting_seconds())


def becomes_true(condition, seconds: float = 60) -> bool:
    """Poll the condition until it holds or the time is over, and return whether it holds."""
    until = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return result


@pytest.fixture
def governor():
    import torch  # noqa: F401, the governor controls torch's libgomp

    governor = Governor()
    yield governor
    governor.adjust(0.0)


def test_a_busy_machine_adds_a_team_of_threads_and_an_idle_one_removes_it(governor):
    # Threads of an earlier test may begin and end meanwhile, so threads are compared by their ids.
    before, team = threads(), len(os.sched_getaffinity(0)) + 1
    governor.adjust(BUSY + 0.1)
    assert governor.asleep
    assert becomes_true(lambda: len(threads() - before) >= team)
    added = threads() - before
    governor.adjust((BUSY + QUIET) / 2)
    assert governor.asleep, "a load between the limits changes nothing"
    governor.adjust(BUSY + 0.1)
    assert len(threads() - before - added) < team, "one team is enough"
    governor.adjust(QUIET - 0.1)
    assert not governor.asleep
    assert becomes_true(lambda: not threads() & added)
    governor.adjust((BUSY + QUIET) / 2)
    assert not governor.asleep


CHILD = """
import threading, time
from spider.processes.wait_policy import set_wait_policy
set_wait_policy()
import torch
governor = next(thread for thread in threading.enumerate() if thread.name == "governor")
print("ready", flush=True)
values, until = torch.zeros(1 << 18), time.monotonic() + 60
while not governor.asleep and time.monotonic() < until:
    values.add_(1)
print(governor.asleep)
"""


def test_threads_sleep_beside_processes_that_never_pause():
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        spin = [sys.executable, "-c", "while True: pass"]
        others = [subprocess.Popen(spin, start_new_session=True) for _ in os.sched_getaffinity(0)]
        try:
            output = child.stdout.read()  # the child ends by itself within 60 s
        finally:
            for other in others:
                other.kill()
                other.wait()
    assert child.returncode == 0 and output == "True\n"


@pytest.mark.parametrize("name", VARIABLES)
def test_a_setting_of_the_user_is_not_changed(monkeypatch, name):
    monkeypatch.setenv(name, "PASSIVE" if name == "OMP_WAIT_POLICY" else "123")
    monkeypatch.setattr(wait_policy, "Governor", None)
    before = dict(os.environ)
    set_wait_policy()
    assert dict(os.environ) == before
