"""Two ways to end a training early: a signal, and a step that does not end.

`StopSignals` notes SIGTERM (a scheduler's preemption), SIGUSR1 (its warning before) and SIGINT (Ctrl-C). The
handler only stores the first signal; the loop finishes its step, saves, and leaves. A second Ctrl-C stops at
once. That is safe at any moment, because checkpoints are either whole or absent.

`Watchdog` ends the process when a step or a measurement does not end. A stuck collective, a hung GPU or a
failed disk then costs half an hour instead of a weekend. Code inside the process cannot interrupt it. A
thread therefore logs what it is and the stacks of all threads, and exits without clean-up with the status for
"run again". As much work is lost as with SIGKILL.

The watchdog counts its own short waits instead of reading a clock, and each wait counts as its nominal
length. So a process that was suspended, or a machine that slept, does not count as stalled. The drawback:
code that hangs while it holds Python's interpreter lock also blocks the watchdog.
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

from spider.common.errors import RESUME_ME

log = logging.getLogger(__name__)

#: The first watch of each kind may take this many times the limit, because it also compiles and allocates.
FIRST = 4


class StopSignals(contextlib.ExitStack):
    """Handle stop signals while entered; ``received`` is the number of the first signal, or None."""

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
    """End the process with `RESUME_ME` when a `watch` takes more than ``minutes`` (None: no limit).

    The first watch of each kind may take `FIRST` times as long.
    """

    def __init__(self, minutes: float | None) -> None:
        self._minutes = minutes
        self._known: set[str] = set()
        self._now: tuple[str, int] | None = None  # what is watched, and the limits that it may take
        self._left = threading.Event()

    @contextlib.contextmanager
    def watch(self, kind: str, number: int) -> Iterator[None]:
        """Watch a step, or a measurement after it, such as ``validation after step``, and its number.

        The time between watches (a checkpoint) is not limited.
        """
        self._now = f"{kind} {number}", 1 if kind in self._known else FIRST
        try:
            yield
        finally:
            self._now = None
            self._known.add(kind)

    def __enter__(self) -> Watchdog:
        if self._minutes is not None:
            threading.Thread(target=self._watch, args=(60 * self._minutes,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()

    def _watch(self, limit: float) -> None:
        tick = min(limit / 20, 5.0)
        watched, waited = None, 0.0
        while not self._left.wait(tick):
            now = self._now
            waited = waited + tick if now is watched else 0.0
            watched = now
            if now is not None and waited >= limit * now[1]:
                _end(now[0], waited)


def _end(what: str, waited: float) -> None:
    threading.Timer(30.0, os._exit, [RESUME_ME]).start()  # the log may be on the disk that hangs
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)  # unlike the traceback module, it reads no source file
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    log.error(
        "%s stalled: it has not ended for %.3g minutes. Leaving with status %d; run again to go on from "
        "the last checkpoint. The stacks below show what each thread waits for (data, another process, the "
        "GPU); if it may really take that long, raise stall_minutes.\n%s",
        what,
        waited / 60,
        RESUME_ME,
        stacks,
    )
    os._exit(RESUME_ME)
