"""The watchdog ends only a step that hangs, and training resumes from the last checkpoint."""

from __future__ import annotations

import subprocess

import pytest

from spider.checkpoints.records import steps
from spider.common.errors import RESUME_ME
from tests.forkserver import python

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


def test_the_watchdog_ends_a_step_that_waits_for_data_and_logs_its_stacks(tmp_path, make_spec, start):
    hangs = make_spec(stall_minutes=2 / 60, max_steps=10)
    assert hangs.identity == make_spec(max_steps=10).identity
    process = start(hangs, tmp_path / "a", before=DEAD_DISK)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == RESUME_ME
    assert "step 8 stalled: it has not ended for 0.03" in errors
    assert "in _step" in errors and "in __next__" in errors, "what the training waits for"
    assert "in block" in errors, "and what that waits for, in another thread"
    assert steps(tmp_path / "a/checkpoints")[-1].name == "step-00000005"


#: The watchdog waits only as often as the arguments say; a limit is 20 of its waits.
COUNTED = """
import sys, threading
from spider.processes.shutdown import Watchdog
back, go = threading.Semaphore(0), threading.Semaphore(0)
class Waits(threading.Event):
    def wait(self, timeout=None):
        back.release()
        go.acquire()
watchdog = Watchdog(1 / 60)
watchdog._left = Waits()
with watchdog:
    for word in sys.argv[1:]:
        kind, waits = word.split(":")
        with watchdog.watch(kind, 7):
            for _ in range(int(waits)):
                back.acquire()
                go.release()
            back.acquire()
            back.release()
"""


@pytest.mark.parametrize(
    ("watches", "stalled"),
    [
        ("step:70 validation:70 step:18 validation:18 step:18 validation:18", None),
        ("step:1 validation:70 step:30", "step 7"),
        ("step:30 validation:90", "validation 7"),
    ],
)
def test_a_step_and_a_validation_are_watched_apart_and_each_first_one_may_take_longer(watches, stalled):
    process = subprocess.run([python(), "-c", COUNTED, *watches.split()], capture_output=True, text=True)
    assert process.returncode == (RESUME_ME if stalled else 0), process.stderr
    assert not stalled or f"{stalled} stalled: it has not ended for" in process.stderr
