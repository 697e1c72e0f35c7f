"""The watchdog ends only a step that hangs, and training resumes from the last checkpoint."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from spider.checkpoints.records import steps
from spider.errors import RESUME_ME
from spider.training.stage import train
from tests.forkserver import python
from tests.unit.training.outcomes import outcome

#: The thread that reads ahead hangs from the eighth step's rows on, as on a failed disk.
DEAD_DISK = """
import threading
from spider.data import loader
loader.BLOCK = 4
read = loader.Loader._block
def block(self):
    if self._next_sample >= 4 * 7:
        threading.Event().wait()
    return read(self)
loader.Loader._block = block
"""


def test_the_watchdog_ends_a_step_that_waits_for_data_and_logs_its_stacks(tmp_path, make_spec, shards, start):
    spec = make_spec()
    hangs = make_spec(stall_minutes=2 / 60)
    assert hangs.identity == spec.identity
    process = start(hangs, tmp_path / "a", before=DEAD_DISK)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == RESUME_ME
    assert "step 8 stalled: it has not ended for 0.03" in errors
    assert "in _step" in errors and "in __next__" in errors, "what the training waits for"
    assert "in block" in errors, "and what that waits for, in another thread"
    assert steps(tmp_path / "a/checkpoints")[-1].name == "step-00000005"
    train(spec, tmp_path / "a", shards)
    train(spec, tmp_path / "b", shards)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


WATCHED = """
import sys, time
from spider.processes.shutdown import Watchdog
with Watchdog(0.5 / 60) as watchdog:
    with watchdog.step(1):
        time.sleep({first})
    with watchdog.step(2):
        pass
    time.sleep({between})
    with watchdog.step(3):
        print("in the third step", flush=True)
        for _ in range(20):
            time.sleep(0.01)
    time.sleep(0.1)
"""


def watched(**seconds):
    code = WATCHED.format(**{"first": 0, "between": 0} | seconds)
    return subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("seconds", "status"),
    [({"first": 1.0}, 0), ({"first": 4.0}, RESUME_ME), ({"between": 1.5}, 0)],
    ids=["a first step that compiles", "a first step that hangs", "a checkpoint that takes long"],
)
def test_the_first_step_may_take_longer_and_time_between_steps_is_not_limited(seconds, status):
    process = watched(**seconds)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status, errors


def test_a_suspended_process_has_not_stalled():
    process = watched()
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
