"""Stop when asked, at a step's end: SIGTERM (a scheduler's preemption), SIGUSR1 (its warning before), SIGINT
(Ctrl-C).

The first signal is only remembered; the loop finishes its step, saves, and leaves. A second Ctrl-C stops at
once, which is safe at any moment, because checkpoints are whole or absent.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """While entered, ``received`` is the number of the signal that asked to stop, or None."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._remember) for s in _WATCHED}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum
        log.warning("%s: saving after this step, then leaving", signal.Signals(signum).name)
