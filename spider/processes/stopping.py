"""Two ways to leave before the end: when asked, and when stuck.

`StopSignals` notes SIGTERM (a scheduler's preemption), SIGUSR1 (its warning before) and SIGINT (Ctrl-C). The
first is only remembered; the loop finishes its step, saves, and leaves. A second Ctrl-C stops at once, which
is safe at any moment, because checkpoints are whole or absent.

`Watchdog` ends a step that never ends: a stuck collective, a hung GPU or a dead disk under the data costs
half an hour, not the weekend. Nothing inside the process can interrupt such a step, so a thread beside it
logs which one it is and the stacks of all threads, and leaves without clean-up by the status that says "run
me again". What is lost is what a SIGKILL would have cost.

Time is counted in the thread's own short waits, each worth what it asked for, however late it returns. A
process that was stopped, or whose machine slept, has therefore not stalled. The price: code that hangs
without letting go of Python's interpreter lock hangs the watchdog too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Self

from spider.errors import RESUME_ME

log = logging.getLogger(__name__)

#: How much longer than the limit the first step may take: it also compiles and allocates.
FIRST_STEP = 4


class StopSignals(contextlib.ExitStack):
    """While entered, ``received`` is the number of the signal that asked to stop, or None."""

    received: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                self.callback(signal.signal, signum, signal.signal(signum, self._remember))
        return self

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum
        log.warning("%s: saving after this step, then leaving", signal.Signals(signum).name)


class Watchdog:
    """While entered, ends the process with `RESUME_ME` where a `step` takes more than ``minutes``: for the
    first step `FIRST_STEP` times as many; None: any time is right."""

    def __init__(self, minutes: float | None) -> None:
        self._minutes, self._patience = minutes, FIRST_STEP
        self._number: int | None = None
        self._left = threading.Event()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch the run's ``number``-th step in here. Between steps a checkpoint may take its time."""
        self._number = number
        try:
            yield
        finally:
            self._number, self._patience = None, 1

    def __enter__(self) -> Watchdog:
        if self._minutes is not None:
            threading.Thread(target=self._watch, args=(60 * self._minutes,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()

    def _watch(self, limit: float) -> None:
        tick = min(limit / 20, 5.0)
        known, waited = None, 0.0
        while not self._left.wait(tick):
            number = self._number
            known, waited = number, waited + tick if number == known else 0.0
            if number is not None and waited >= limit * self._patience:
                _end(number, waited)


def _end(number: int, waited: float) -> None:
    threading.Timer(30.0, os._exit, [RESUME_ME]).start()  # the log may go to the very disk that hangs
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)  # reads no source file, as the traceback module would
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    log.error(
        "step %d stalled: it has not ended for %.3g minutes. Leaving with status %d; run again to go on from "
        "the last checkpoint. The stacks below show what each thread waits for (data, another process, the "
        "GPU); where a step may really take that long, raise stall_minutes.\n%s",
        *(number, waited / 60, RESUME_ME, stacks),
    )
    os._exit(RESUME_ME)
