"""Start a workflow: alone in its results folder, after a killed one too, and where a scheduler runs its jobs.

Snakemake locks the files of a workflow in ``.snakemake/locks``, and a killed workflow leaves its lock there.
Each workflow of Spider therefore shares a kernel lock on `FILE` in its results folder while it lives. The
kernel drops it however the process ends, on a shared disk too (unless that is mounted with ``nolock`` or
``local_lock``). A workflow that gets the kernel lock for itself is the only one, and removes every lock of
Snakemake that names a file of the results folder.

Slurm reports a refused job without the setting that caused it. After a workflow has failed, `remedies` finds
these reports in its log and names the setting to change. Finished files stay, and the same command continues.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from spider.common.files import digest, hidden

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


_SITE = "at the top of profiles/slurm/config.yaml"
_PARTITIONS = "in profiles/slurm/partitions.yaml"
_RUN = "under `resources:` of the run in the configuration"

_REMEDIES = {
    r"invalid partition specified: (?P<name>[^\s']+)": (
        "this cluster has no partition {name}: name those of your site "
        f"{_PARTITIONS}; `sinfo -s` lists what there is"
    ),
    r"Invalid account|account \S+ appears to be invalid": (
        f"Slurm refuses this account on this partition: set account {_SITE}; "
        "`sacctmgr show assoc user=$USER format=account,partition` lists yours"
    ),
    r"Invalid generic resource|Invalid Trackable RESource": (
        f"the partition lacks these GPUs: set max_gpu of the partitions {_PARTITIONS}, or gpus {_RUN}; "
        "`sinfo -o '%P %G'` lists what each has"
    ),
    r"Requested time limit is invalid|time limit exceeds|TIME limit": (
        f"the time limit of the partition is lower: set longest {_SITE}; `sinfo -o '%P %l'` lists the limits"
    ),
    r"Requested node configuration is not available|Memory specification can not be satisfied"
    r"|More processors requested|Node count specification invalid": (
        f"every node of the partition is smaller: set threads, mem_mb, gpus and nodes {_RUN}; "
        "`sinfo -o '%P %D %c %m %G'` lists the nodes"
    ),
    r"sbatch: (?:command )?not found|No such file or directory: 's(?:batch|acct)'": (
        "Slurm's commands are not on this machine: start Snakemake on a login node of the cluster"
    ),
    r"Unable to contact slurm controller|Could not establish a configuration source": (
        "Slurm does not answer: repeat the command as soon as `sinfo` answers"
    ),
}


def remedies(logs: Iterable[str]) -> list[str]:
    """Return a line with a remedy for each kind of refusal in Snakemake's logs of a failed workflow."""
    return advice("".join(Path(log).read_text(encoding="utf-8", errors="replace") for log in logs))


def advice(text: str) -> list[str]:
    """Return a line with a remedy for each kind of refusal in a text."""
    refusals = ((re.search(pattern, text), remedy) for pattern, remedy in _REMEDIES.items())
    return [remedy.format(**match.groupdict()) for match, remedy in refusals if match]


def partitions() -> set[str]:
    """Return the names of the partitions of this machine's Slurm.

    Raises:
        ValueError: Slurm is not there or does not answer; the message has a remedy.
    """
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise ValueError(*advice("sbatch: not found")) from None
    except subprocess.CalledProcessError as error:
        raise ValueError("; ".join(advice(error.stderr)) or f"sinfo fails: {error.stderr.strip()}") from None
    return set(done.stdout.split())


def lacking_gpus(gpus: int) -> str | None:
    """Return why this machine cannot give its jobs this number of GPUs, or None if it can.

    The check runs in another process, because it imports torch, which takes seconds and holds GPU memory.
    """
    command = [sys.executable, "-m", "spider.processes.device", str(gpus)]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if check.returncode == 0 else check.stderr.strip().splitlines()[-1]


def one_word(python: str) -> str:
    """Return a path of this interpreter without spaces or other characters that a shell splits at.

    The script that Snakemake sends to a scheduler has the path of the interpreter without quotes. If it has a
    space, a link to the environment is made in the user's cache folder, which a cluster shares like homes.

    Raises:
        ValueError: the cache folder has a space as well, or cannot be written.
    """
    if shlex.quote(python) == python:
        return python
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    link = cache / "spider" / "environments" / digest(sys.prefix)
    plain = str(link / Path(python).relative_to(sys.prefix))
    if shlex.quote(plain) != plain:
        raise ValueError(
            f"{python}: a scheduler's job scripts cannot name an interpreter in a folder with a space, and "
            f"{cache} has one too; move the project, or set XDG_CACHE_HOME to a folder without a space"
        )
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        if not (link.is_symlink() and os.readlink(link) == sys.prefix):
            beside = hidden(link, "tmp")
            beside.symlink_to(sys.prefix)
            beside.replace(link)
    except OSError as error:
        raise ValueError(
            f"{link}: cannot link the environment there for a scheduler's job scripts ({error.strerror}); "
            "name another folder in XDG_CACHE_HOME, or move the project to a folder without a space"
        ) from None
    log.warning("jobs use this environment through %s, because its own path has a space", link)
    return plain
