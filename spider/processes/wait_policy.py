"""Choose how OpenMP's threads wait at a barrier: spin on an idle machine, sleep on a shared one.

libgomp's threads spin for about 3 ms at every barrier before they sleep. On an idle machine that is right:
small steps are a quarter faster than with threads that sleep at once. On a machine that other programs use,
they spin while the thread they wait for is not running, and training is twenty times slower.

libgomp reads its settings (``GOMP_SPINCOUNT``, ``OMP_WAIT_POLICY``) once, when it is loaded. But it spins
only 1/3000 as long while a process has more OpenMP threads than processors, which can change at any time.
`Governor` therefore keeps a team of extra threads asleep while the computing threads wait for a processor.

The wait policy changes neither the results nor the number of threads that compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from pathlib import Path

#: Seconds between two readings of the load.
EVERY = 0.5
#: Seconds a second that our threads, summed, are ready to run and do not run. Above `BUSY` threads sleep at
#: barriers, below `QUIET` they spin. A data loader beside them causes less.
BUSY, QUIET = 0.3, 0.2
#: Linux lists here how long each thread ran and how long it waited for a processor.
_TASKS = Path("/proc/self/task")


def set_wait_policy() -> None:
    """Adapt how OpenMP's threads wait to the machine's load, unless the user's environment sets it.

    Call it before torch is loaded.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        return
    if waiting_seconds():
        Governor().start()
    else:  # a Linux without these figures: the setting with the least worst case
        os.environ["GOMP_SPINCOUNT"] = "2000"


def waiting_seconds() -> dict[str, float]:
    """Return the seconds that each thread of this process was ready to run and did not run.

    The result is empty where the kernel does not count them.
    """
    seconds = {}
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # the thread may have ended
                seconds[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return seconds


def loaded_libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that torch has loaded, or None before torch is imported."""
    if "torch" not in sys.modules:
        return None
    maps = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split(maxsplit=5)[5] for line in maps if "/libgomp" in line), None)
    return ctypes.CDLL(path) if path else None


class Governor(threading.Thread):
    """Read the load twice a second and set the wait policy, for as long as the process lives."""

    def __init__(self) -> None:
        super().__init__(name="governor", daemon=True)
        self._library: ctypes.CDLL | None = None
        self._release: threading.Event | None = None

    @property
    def asleep(self) -> bool:
        """Whether threads sleep at barriers."""
        return self._release is not None

    def run(self) -> None:
        before, then = waiting_seconds(), time.perf_counter()
        while True:
            time.sleep(EVERY)
            after, now = waiting_seconds(), time.perf_counter()
            waited = sum(seconds - before.get(task, seconds) for task, seconds in after.items())
            self.adjust(waited / (now - then))
            before, then = after, now

    def adjust(self, load: float) -> None:
        """Set the policy for a load: seconds a second that threads were ready and did not run."""
        if self._library is None:
            self._library = loaded_libgomp()
        if self._library is None:
            return
        if self._release is None and load > BUSY:
            self._release = threading.Event()
            arguments = (self._library, self._release)
            threading.Thread(target=self._keep_team, args=arguments, daemon=True).start()
        elif self._release is not None and load < QUIET:
            self._release.set()
            self._release = None

    @staticmethod
    def _keep_team(library: ctypes.CDLL, release: threading.Event) -> None:
        """Keep a team of n + 1 threads alive on n processors, so that libgomp takes the machine for
        oversubscribed and spins briefly. A team lives as long as its leader, which is this thread."""
        no_work = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL) does nothing
        library.GOMP_parallel(no_work, None, len(os.sched_getaffinity(0)) + 1, 0)
        release.wait()
