"""Errors that end a training, and the exit status of a training that can be resumed."""

from __future__ import annotations

import signal

#: Exit status of a job that saved its work and can be resumed (BSD's EX_TEMPFAIL).
RESUME_ME = 75


class TrainingError(ValueError):
    """Training cannot start or continue. The message has the reason, the place and the remedy."""


class Diverged(TrainingError):
    """The loss, the weights or the predictions of a model are not finite."""


class DamagedShard(ValueError):
    """A shard is not what was encoded. The message has the path, the place and the remedy."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read. The message has the path and the remedy."""


class Ended(Exception):
    """Another process of this training stopped, and reports the reason."""

    exit_code = 1


class Preempted(Exception):
    """A signal stopped the training after its state was saved. The command exits with `RESUME_ME`."""

    exit_code = RESUME_ME

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"{signal.Signals(signum).name}: stopped after step {step}, run again to go on")
