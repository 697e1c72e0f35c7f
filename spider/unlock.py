"""Remove the lock that a killed workflow left on its folder, and name the process that holds a lock.

Snakemake locks a folder with files in ``.snakemake/locks`` that do not say which process made them, so the
lock of a killed workflow stays. Each workflow of Spider therefore keeps a record in ``.snakemake/spider``:
its process, its host, and which of the lock files are its own. While it lives it holds a kernel lock on that
record. The kernel drops the lock however the process ends, on a shared disk too (unless that is mounted with
``nolock`` or ``local_lock``).

The next workflow removes the lock files of each record whose kernel lock is free. All other lock files stay:
those of living workflows, of Snakemake without Spider, and of a workflow that was killed before it recorded
its own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)

#: Inode and time of change of each lock file, which tell it from a later one of the same name.
Locks = dict[str, list[int]]

#: The errors that `flock` raises on a disk without kernel locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass
class Presence:
    """A workflow's own record, which other workflows see as held until this process ends."""

    folder: Path
    record: IO[str]
    before: Locks

    def record_locks(self) -> None:
        """Write down the lock files that Snakemake has made for this workflow since it entered the folder."""
        now = _lock_files(self.folder)
        own = {name: found for name, found in now.items() if self.before.get(name) != found}
        _append(self.record, {"locks": own})


def enter(folder: Path, *, change: bool = True) -> Presence | None:
    """Remove the locks of killed workflows from ``folder`` and record this process as one at work there.

    A warning names each living workflow that has locked files there. With ``change=False``, as for a dry run,
    nothing is removed or written, and the result is None. It is None too on a disk without kernel locks.
    """
    records = folder / ".snakemake/spider"
    living: Locks = {}
    try:
        for path in sorted(records.glob("*.jsonl")):
            living |= _examine(folder, path, change)
        present = _record(records) if change else None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        log.warning(
            "%s: this disk has no file locks (%s); after a workflow was killed, run snakemake --unlock",
            records,
            error.strerror,
        )
        return None
    found = _lock_files(folder)
    if unknown := [name for name, identity in found.items() if living.get(name) != identity]:
        log.warning(
            "%s: locked by a Snakemake without a record (%s): another workflow, or one that was killed as it "
            "started. If none is running here, remove the lock: snakemake --unlock",
            folder,
            ", ".join(unknown),
        )
    return Presence(folder, present, found) if present else None


def _examine(folder: Path, path: Path, change: bool) -> Locks:
    """Return the lock files of a living workflow, and remove those of one that has ended."""
    try:
        record = open(path, "r+", encoding="utf-8")  # noqa: SIM115 - flock needs it open until the end
    except FileNotFoundError:  # another workflow has just removed it
        return {}
    with record:
        entries = _read(record)
        owner = f"process {entries.get('process', '(unknown)')} on {entries.get('host', '(unknown)')}"
        own = entries.get("locks", {})
        left = {name: identity for name, identity in _lock_files(folder).items() if own.get(name) == identity}
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left:
                log.warning(
                    "%s: %s has been at work here since %s. Where both make the same files, Snakemake stops "
                    "with a LockException: wait for that process or stop it, and do not use --unlock",
                    folder,
                    owner,
                    entries.get("started", "(unknown)"),
                )
            return left
        if not change:
            if left:
                log.warning("%s: %s was killed; the next run removes its lock", folder, owner)
            return left
        for name in left:
            (folder / ".snakemake/locks" / name).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        if left:
            log.warning("%s: %s was killed; its lock is removed", folder, owner)
    return {}


def _record(records: Path) -> IO[str]:
    """Write a record of this process and lock it; another workflow may remove it until it is locked."""
    records.mkdir(parents=True, exist_ok=True)
    while True:
        path = records / f"{secrets.token_hex(8)}.jsonl"
        record = open(path, "x+", encoding="utf-8")  # noqa: SIM115 - open for the life of the process
        fcntl.flock(record, fcntl.LOCK_EX)
        if path.exists():
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            _append(record, {"process": os.getpid(), "host": socket.gethostname(), "started": started})
            return record
        record.close()


def _append(record: IO[str], entry: dict[str, Any]) -> None:
    record.write(json.dumps(entry) + "\n")
    record.flush()
    os.fsync(record.fileno())


def _read(record: IO[str]) -> dict[str, Any]:
    """Return all entries of a record as one. A line that a killed process left incomplete is skipped."""
    entries: dict[str, Any] = {}
    for line in record:
        with suppress(json.JSONDecodeError):
            entries |= json.loads(line)
    return entries


def _lock_files(folder: Path) -> Locks:
    """Return the lock files of Snakemake in a folder."""
    found: Locks = {}
    for path in folder.glob(".snakemake/locks/*.lock"):
        with suppress(FileNotFoundError):
            now = path.stat()
            found[path.name] = [now.st_ino, now.st_mtime_ns]
    return found
