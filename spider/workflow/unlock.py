"""Remove the locks that killed workflows left, so that the same command continues after a kill.

Snakemake locks the files of a workflow in ``.snakemake/locks``, and a killed workflow leaves its lock there.
Each workflow of Spider therefore shares a kernel lock on `FILE` in its results folder while it lives. The
kernel drops it however the process ends, on a shared disk too (unless that is mounted with ``nolock`` or
``local_lock``). A workflow that gets the kernel lock for itself is the only one, and removes every lock of
Snakemake that names a file of the results folder.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

FILE = ".workflow.lock"

#: The errors that `flock` raises on a disk without kernel locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def enter(folder: Path, results: Path) -> IO[str] | None:
    """Share the kernel lock of a results folder until the process ends, and remove Snakemake's stale locks.

    A warning names the newest of the other workflows that share it.

    Args:
        folder: where Snakemake was started.

    Returns:
        The file that must stay open; None on a disk without kernel locks.

    Raises:
        ValueError: the results folder cannot be written.
    """
    try:
        results.mkdir(parents=True, exist_ok=True)
        lock = open(results / FILE, "a+", encoding="utf-8")  # noqa: SIM115 - open for the life of the process
    except OSError:
        remedy = "make it writable, or name another folder (results:)"
        raise ValueError(f"results: {results.absolute()}: cannot be written; {remedy}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        log.warning(
            "%s: %s. Where both make the same files, Snakemake stops with a LockException: wait for that "
            "process or stop it, and do not use --unlock",
            results,
            lock.read().strip() or "another workflow is at work here",
        )
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        log.warning(
            "%s: this disk has no file locks (%s); after a workflow was killed, run snakemake --unlock",
            results,
            error.strerror,
        )
        return None
    else:
        for path in folder.glob(".snakemake/locks/*.lock"):
            with suppress(FileNotFoundError):  # A Snakemake without Spider has just ended.
                if any(line.startswith(f"{results}/") for line in path.read_text("utf-8").splitlines()):
                    path.unlink()
                    log.warning("%s: left by a workflow that was killed, and removed", path)
    fcntl.flock(lock, fcntl.LOCK_SH)
    lock.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    lock.write(f"process {os.getpid()} on {socket.gethostname()} has been at work here since {since}\n")
    lock.flush()
    return lock
