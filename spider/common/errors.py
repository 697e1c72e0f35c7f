"""Errors that end a training, and the exit status of a training that can be resumed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from pydantic import ValidationError

#: Exit status of a job that saved its work and can be resumed (BSD's EX_TEMPFAIL).
RESUME_ME = 75
#: Characters of a library's error that a message shows.
_SHOWN = 300


@contextlib.contextmanager
def reported(what: str, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Turn what a library raises while it reads a user's file into one sentence that begins with ``what``.

    Libraries raise errors of any class for files that are valid but odd, such as `RecursionError` and
    `KeyError`. Rust code panics, and a panic is no `Exception`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        if len(reason) > _SHOWN:
            reason = reason[:_SHOWN].rpartition(". ")[0] or reason[:_SHOWN]  # whole sentences
        if not isinstance(error, ValueError | OSError):
            reason = f"{type(error).__name__}: {reason}"
        raise kind(f"{what}: {reason}") from error


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
