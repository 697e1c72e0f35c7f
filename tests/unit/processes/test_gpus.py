"""Each command gets GPUs of its own, the oldest waiter first, and a kill frees them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spider.processes.gpus import CLAIMED, ORDER, VISIBLE, claimed, visible

ROOT = Path(__file__).parents[3]
MADE = ROOT / "tests/made_gpus"

#: Claims GPUs, notes when it has them and when it gives them back, and in between waits for a file.
JOB = """
import json, os, sys, time
from pathlib import Path
from spider.processes.gpus import VISIBLE, claimed
name, count, until, nested = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
def note(what):
    with open("timeline.jsonl", "a") as file:
        file.write(json.dumps([name, what, os.environ[VISIBLE].split(","), time.monotonic()]) + "\\n")
with claimed(count):
    if nested:
        import subprocess
        subprocess.Popen([sys.executable, "-c", sys.orig_argv[2], *nested])
    note("begin")
    while not until.exists():
        time.sleep(0.01)
    note("end")
"""


@pytest.fixture(autouse=True)
def made(monkeypatch, tmp_path):
    """Return a function that makes this number of GPUs, for this process and those that it starts."""
    for name in (VISIBLE, ORDER, CLAIMED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(MADE)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{MADE}:{ROOT}")
    monkeypatch.setenv("SPIDER_GPU_LOCKS", str(tmp_path / "locks"))
    monkeypatch.chdir(tmp_path)

    def make(gpus: int | str) -> None:
        monkeypatch.setenv("MADE_GPUS", str(gpus))

    make(2)
    yield make
    sys.modules.pop("pynvml", None)


class Jobs:
    """Jobs that were started here; all are killed at the end."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, count: int, until: str, *nested: str, **environment: str) -> None:
        """Start a job, and wait until it has GPUs or stands in the queue."""
        before = self.waiting()
        command = [sys.executable, "-c", JOB, name, str(count), until, *nested]
        self.processes[name] = subprocess.Popen(command, env={**os.environ, **environment})
        wait_until(lambda: name in self.having() or self.waiting() - before)

    def waiting(self) -> set[str]:
        return {path.name for path in Path("locks").glob("waiting-*")}

    def timeline(self) -> list[tuple[str, str, list[str], float]]:
        path = Path("timeline.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def having(self) -> list[str]:
        """Return the jobs that have had GPUs, in order."""
        return [name for name, what, _, _ in self.timeline() if what == "begin"]

    def devices(self, name: str) -> list[str]:
        return next(devices for one, _, devices, _ in self.timeline() if one == name)

    def end(self, *names: str) -> None:
        for name in names or self.processes:
            assert self.processes[name].wait(60) == 0


@pytest.fixture
def jobs():
    jobs = Jobs()
    yield jobs
    for process in jobs.processes.values():
        process.kill()
        process.wait()


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("gpus", "variable", "found"),
    [
        (0, None, {}),
        (2, None, {"0": "GPU-0", "1": "GPU-1"}),
        (3, " 1 , 2", {"1": "GPU-1", "2": "GPU-2"}),
        (3, "GPU-2,GPU-0", {"GPU-2": "GPU-2", "GPU-0": "GPU-0"}),
        (3, "1,7,2", {"1": "GPU-1"}),  # as CUDA reads it
        (3, "GPU-", {}),  # the beginning of several
        (3, "", {}),
        ("1,2", None, {"0": "GPU-0", "MIG-1-0": "MIG-1-0", "MIG-1-1": "MIG-1-1"}),
        ("1,2", "1", {"1": "MIG-1-0"}),
    ],
)
def test_visible_gpus_are_those_of_the_variable(made, monkeypatch, gpus, variable, found):
    made(gpus)
    if variable is not None:
        monkeypatch.setenv(VISIBLE, variable)
    assert visible() == found


@pytest.mark.parametrize("variable", [None, "GPU-1,GPU-0"])
def test_a_process_sees_the_gpus_that_it_takes_and_no_others(monkeypatch, variable):
    if variable:
        monkeypatch.setenv(VISIBLE, variable)
    with claimed(1):
        assert os.environ[VISIBLE] == (variable.split(",")[0] if variable else "0")
        assert os.environ.get(ORDER) == (None if variable else "PCI_BUS_ID")
    with claimed(2):
        assert os.environ[VISIBLE] == (variable or "0,1")
    with claimed(0):
        assert os.environ[VISIBLE] == ""
    with claimed(3):  # more than there are
        assert os.environ.get(VISIBLE) == variable and CLAIMED not in os.environ
    assert os.environ.get(VISIBLE) == variable and ORDER not in os.environ and CLAIMED not in os.environ


@pytest.mark.parametrize("gpus", [1, 3])
def test_five_jobs_share_the_gpus_one_at_a_time(made, jobs, gpus):
    made(gpus)
    for number in range(5):
        jobs.start(str(number), 1, "end")
    wait_until(lambda: len(jobs.having()) == gpus)  # As many as there are GPUs begin, before any has ended.
    Path("end").touch()
    jobs.end()
    at_work: dict[str, str] = {}
    for name, what, (device,), _ in jobs.timeline():
        assert at_work.get(device) == (None if what == "begin" else name)
        at_work[device] = name if what == "begin" else None
    assert {*at_work} == {str(number) for number in range(gpus)}
    assert not jobs.waiting()


def test_the_oldest_waits_for_the_shortest_time_and_a_large_job_is_not_passed(jobs):
    jobs.start("first", 1, "end-first")
    jobs.start("large", 2, "end-large")
    jobs.start("small", 1, "end-small")
    wait_until(lambda: jobs.having() == ["first"])  # `large` keeps the free GPU for itself.
    Path("end-first").touch()
    wait_until(lambda: jobs.having() == ["first", "large"])
    assert jobs.devices("large") == ["1", "0"]
    for file in ("end-large", "end-small"):
        Path(file).touch()
    jobs.end()
    assert jobs.having() == ["first", "large", "small"]


def test_a_job_does_not_wait_behind_one_that_wants_other_gpus(jobs):
    jobs.start("first", 1, "end")
    jobs.start("waits", 1, "end", **{VISIBLE: "0"})
    jobs.start("other", 1, "end", **{VISIBLE: "1"})
    wait_until(lambda: jobs.having() == ["first", "other"])


def test_a_killed_job_frees_its_gpu_and_a_killed_waiter_is_passed(made, jobs):
    made(1)
    for name in ("holds", "waits", "next"):
        jobs.start(name, 1, "end")
    wait_until(lambda: jobs.having() == ["holds"])
    for name in ("waits", "holds"):
        jobs.processes[name].send_signal(signal.SIGKILL)
        jobs.processes[name].wait()
    wait_until(lambda: jobs.having() == ["holds", "next"])
    Path("end").touch()
    jobs.end("next")
    assert not jobs.waiting()


def test_processes_of_a_killed_job_keep_its_gpu(made, jobs):
    made(1)
    jobs.start("launcher", 1, "end", "worker", "1", "end-worker")
    wait_until(lambda: "worker" in jobs.having())
    jobs.processes["launcher"].kill()
    jobs.processes["launcher"].wait()
    jobs.start("next", 1, "end")
    assert jobs.having() == ["launcher", "worker"]
    Path("end-worker").touch()
    Path("end").touch()
    jobs.end("next")
    assert jobs.devices("worker") == ["0"]
    assert [name for name, what, _, _ in jobs.timeline() if what == "end"] == ["worker", "next"]


def test_a_waiting_job_says_who_holds_what(made, jobs, caplog):
    made(1)
    jobs.start("holds", 1, "end-holds")
    wait_until(lambda: jobs.having() == ["holds"])
    caplog.set_level("INFO")
    said = []

    def free(seconds: float) -> None:
        said.append(caplog.text)
        Path("end-holds").touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spider.processes.gpus.time.sleep", free)
        with claimed(1):
            pass
    pid = jobs.processes["holds"].pid
    assert f"waiting for 1 GPUs: GPU 0 is held by process {pid} (spider " in said[0]
    assert "GPUs: 0 of the visible 0" in caplog.text
