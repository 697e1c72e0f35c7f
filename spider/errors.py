"""How a training run ends when it does not end by finishing."""

from __future__ import annotations

import signal

#: Exit status of a job that saved its work and wants to be started again (BSD's EX_TEMPFAIL).
RESUME_ME = 75


class TrainingError(ValueError):
    """Training cannot start or go on; the message says why, where, and what to do."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the path and the remedy."""


class Ended(Exception):
    """Another process of this training stopped, and says why; there is nothing left to do here."""

    exit_code = 1


class Preempted(Exception):
    """A signal asked the run to stop; its state was saved. The command line exits with `RESUME_ME`."""

    exit_code = RESUME_ME

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"{signal.Signals(signum).name}: stopped after step {step}, run again to go on")
