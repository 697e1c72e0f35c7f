"""How OpenMP's threads wait for each other: awake on a quiet machine, asleep on one that others use too.

libgomp's threads spin for some 3 ms at every barrier before they sleep. Where the machine is ours that is
right: small steps are a quarter faster than with threads that sleep at once. Where somebody else works on it
they spin while the thread that they wait for is not running, and training is twenty times slower. Its
settings (``GOMP_SPINCOUNT``, ``OMP_WAIT_POLICY``) are read once, when it is loaded. But it spins a
three-thousandth as long while a process has more OpenMP threads than processors, and that can change at any
time: `Governor` keeps a team of threads asleep where, and as long as, the threads that compute stand ready
and are not run.

What is computed, and by how many threads, is the same either way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from pathlib import Path

#: Seconds between two looks.
EVERY = 0.5
#: Seconds a second that our threads, all together, stood ready while others ran: above the first they are to
#: sleep, below the second to spin. A loader beside them costs less.
BUSY, QUIET = 0.3, 0.2
#: Where Linux tells how long each thread ran, and how long it waited for a processor.
_TASKS = Path("/proc/self/task")


def share_the_processor() -> None:
    """Have OpenMP's threads wait as the machine's load asks for, unless the user said how. To be called
    before torch is loaded."""
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        return
    if waited():
        Governor().start()
    else:  # Linux without these figures: what costs least at worst
        os.environ["GOMP_SPINCOUNT"] = "2000"


def waited() -> dict[str, float]:
    """Seconds that each thread of this process stood ready and was not run; empty where nobody counts."""
    seconds = {}
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it may have ended meanwhile
                seconds[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return seconds


def loaded_libgomp() -> ctypes.CDLL | None:
    """The library that torch has brought, once it has."""
    if "torch" not in sys.modules:
        return None
    maps = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split(maxsplit=5)[5] for line in maps if "/libgomp" in line), None)
    return ctypes.CDLL(path) if path else None


class Governor(threading.Thread):
    """Looks at the load of the machine twice a second, for as long as the process lives."""

    def __init__(self) -> None:
        super().__init__(name="governor", daemon=True)
        self._library: ctypes.CDLL | None = None
        self._let_go: threading.Event | None = None

    @property
    def asleep(self) -> bool:
        """Whether threads are to sleep at barriers."""
        return self._let_go is not None

    def run(self) -> None:
        before, then = waited(), time.perf_counter()
        while True:
            time.sleep(EVERY)
            after, now = waited(), time.perf_counter()
            more = sum(seconds - before.get(task, seconds) for task, seconds in after.items())
            self.look(more / (now - then))
            before, then = after, now

    def look(self, share: float) -> None:
        """Decide by how many seconds a second our threads stood ready and were not run."""
        if self._library is None:
            self._library = loaded_libgomp()
        if self._library is None:
            return
        if not self.asleep and share > BUSY:
            team = threading.Thread(
                target=self._keep_a_team, args=(self._library, let_go := threading.Event())
            )
            team.daemon = True
            self._let_go = let_go
            team.start()
        elif self._let_go is not None and share < QUIET:
            self._let_go.set()
            self._let_go = None

    @staticmethod
    def _keep_a_team(library: ctypes.CDLL, let_go: threading.Event) -> None:
        """Be one thread more than there are processors: a team outlives its work and ends with its leader."""
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of nothing
        library.GOMP_parallel(nothing, None, len(os.sched_getaffinity(0)) + 1, 0)
        let_go.wait()
