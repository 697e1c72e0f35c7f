"""The lock of a workflow that was killed is taken off the folder by the next one, if nobody lives.

Snakemake's lock is a list of files that says nothing of whose it is. So each workflow also holds a lock of
the kernel, shared with its like, on a file beside it: the kernel drops that when the process dies, however
it dies, on a shared disk as well (unless that is mounted with ``nolock`` or ``local_lock``). Who can have it
exclusively is alone, and what lies there was left by the dead. Whoever cannot leaves all as it is, and
Snakemake decides as ever: two workflows may share a folder while their files differ.
"""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)


def enter(folder: Path) -> IO[str] | None:
    """Be known as one of the workflows at work in ``folder``, for as long as what is returned stays open.

    Removes the locks of those that were killed. None where the disk has no such locks.
    """
    kept = folder / ".snakemake"
    kept.mkdir(exist_ok=True)
    alive = open(kept / "spider.lock", "a+")  # noqa: SIM115 - open for the life of the process
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # somebody lives
    except OSError as error:
        alive.close()
        log.warning("%s: %s; locks of killed workflows stay (snakemake --unlock)", alive.name, error.strerror)
        return None
    else:
        left = [*kept.glob("locks/*.lock")]
        for lock in left:
            lock.unlink(missing_ok=True)
        if left:
            log.warning("%s: the workflow that had locked this folder was killed; going on", folder)
    fcntl.flock(alive, fcntl.LOCK_SH)
    return alive
