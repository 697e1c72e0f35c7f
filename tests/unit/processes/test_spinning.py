"""Threads sleep at barriers where others want the machine, spin where it is ours, and do as the user says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from spider.processes import spinning
from spider.processes.spinning import BUSY, QUIET, Governor, share_the_processor, waited

SAID = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def threads() -> int:
    """Of this process, those that are not Python's among them."""
    return len(waited())


def comes_true(what, seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not (true := what()) and time.monotonic() < until:
        time.sleep(0.01)
    return true


@pytest.fixture
def governor():
    import torch  # noqa: F401, its libgomp is what is governed

    governor = Governor()
    yield governor
    governor.look(0.0)


def test_a_busy_machine_gives_the_process_more_threads_than_processors_and_a_quiet_one_takes_them(governor):
    before, processors = threads(), len(os.sched_getaffinity(0))
    governor.look(BUSY + 0.1)
    assert governor.asleep
    assert comes_true(lambda: threads() >= before + processors + 1)
    governor.look((BUSY + QUIET) / 2)
    assert governor.asleep, "neither busy nor quiet: as it was"
    governor.look(BUSY + 0.1)
    assert threads() <= before + processors + 1, "one team is enough"
    governor.look(QUIET - 0.1)
    assert not governor.asleep
    assert comes_true(lambda: threads() <= before)
    governor.look((BUSY + QUIET) / 2)
    assert not governor.asleep


def test_without_torch_there_is_nothing_to_govern(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    governor = Governor()
    governor.look(BUSY + 0.1)
    assert not governor.asleep


IN_A_PROCESS = """
import threading, time
from spider.processes.spinning import share_the_processor
share_the_processor()
import torch
governor = next(thread for thread in threading.enumerate() if thread.name == "governor")
one, until = torch.zeros(1 << 18), time.monotonic() + 60
while not governor.asleep and time.monotonic() < until:
    one.add_(1)
print(governor.asleep)
"""


def test_beside_a_process_that_never_pauses_threads_sleep():
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin, start_new_session=True) for _ in range(len(os.sched_getaffinity(0)))]
    plain = {name: value for name, value in os.environ.items() if name not in SAID}
    try:
        command = [sys.executable, "-c", IN_A_PROCESS]
        done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=120, check=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("name", SAID)
def test_what_a_user_said_is_left_alone(monkeypatch, name):
    monkeypatch.setenv(name, "PASSIVE" if name == SAID[1] else "123")
    monkeypatch.setattr(spinning, "Governor", None)
    before = dict(os.environ)
    share_the_processor()
    assert dict(os.environ) == before


def test_where_nobody_counts_a_fixed_setting_is_taken(monkeypatch, tmp_path):
    for name in SAID:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(spinning, "_TASKS", tmp_path / "nowhere")
    monkeypatch.setattr(spinning, "Governor", None)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is put back
    monkeypatch.delenv("GOMP_SPINCOUNT")
    share_the_processor()
    assert os.environ["GOMP_SPINCOUNT"] == "2000"


def test_what_a_thread_waited_is_told_for_as_long_as_it_lives():
    here, ready = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (ready.set(), here.wait()))
    thread.start()
    ready.wait()
    alive = waited()
    here.set()
    thread.join()
    assert str(thread.native_id) in alive and all(seconds >= 0 for seconds in alive.values())
    assert comes_true(lambda: str(thread.native_id) not in waited())
