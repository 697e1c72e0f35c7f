"""Processes that send in the background, so that what computes never waits for a store nor imports mlflow.

A *follower* runs beside a workflow or a trainer and syncs every few seconds at low priority. Its standard
input is a pipe that its parent holds: a byte in it tells the follower to end. If it closes without one, the
parent was killed, and the follower ends once no job of this folder runs any more (a killed Snakemake leaves
its trainer running).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from spider.tracking import spool
from spider.tracking.sync import Syncer

log = logging.getLogger(__name__)

POLL = 5.0
SLOWEST_POLL = 60.0
LONGEST_ATTEMPT = 60.0
"""Seconds that one sync may take, the last one of a follower told to end included."""
PENDING = 3
"""Exit code of a process that could not send everything."""


class Sender:
    """A follower started here; with no process, someone else's does the work."""

    def __init__(self, results: Path, process: subprocess.Popen[bytes] | None) -> None:
        self._results, self._process = results, process

    def stop(self, timeout: float = 5) -> bool:
        """Let the follower send the rest and end, waiting ``timeout`` seconds at most; True if all is sent.

        One that is not done by then goes on by itself for up to a minute; one warning says what to do.
        """
        process, self._process = self._process, None
        if process is None:
            return True
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it may have ended by itself
            process.stdin.write(b"x")
            process.stdin.close()
        return _outcome(process, self._results, timeout)


def start(results: Path) -> Sender:
    """Start a follower of ``results``; it ends soon after this process."""
    return Sender(results, _spawn(results, "follow"))


def start_sender(results: Path) -> Sender:
    """A follower for a training run; in a workflow, and with tracking off, none is needed."""
    if not spool.enabled() or os.environ.get("SPIDER_WORKFLOW"):
        return Sender(results, None)
    return start(results)


def send(results: Path, timeout: float = 5) -> bool:
    """Sync once in another process, waiting ``timeout`` seconds at most; True if all is sent."""
    if not spool.enabled():
        return True
    process = _spawn(results, "sync", "--timeout", str(LONGEST_ATTEMPT))
    return process is None or _outcome(process, results, timeout)


def _spawn(results: Path, verb: str, *options: str) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-m", "spider.tracking", verb, str(results.absolute()), *options]
    try:
        (results / "tracking").mkdir(parents=True, exist_ok=True)
        with open(results / "tracking" / "sender.log", "ab") as said:
            # Its own session: Ctrl-C in the terminal is for the job, which then tells its sender.
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True
            )
    except OSError as error:
        log.warning("cannot start the tracking sender (%s); %s", error, spool.REMEDY)
        return None


def _outcome(process: subprocess.Popen[bytes], results: Path, timeout: float) -> bool:
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        log.warning("the tracking store is slow or away, still sending; if that fails, %s", spool.REMEDY)
        return False
    if code:
        said = (results / "tracking" / "sender.log").read_text(errors="replace").splitlines()
        reason = said[-1].partition(": ")[2] if said else f"exit code {code}"  # past time, level and name
        log.warning("not everything reached the tracking store: %s", reason)
    return code == 0


def follow(results: Path) -> int:
    """Sync every few seconds until told to end; the body of a follower process. Returns its exit code."""
    os.nice(5)
    syncer = Syncer(results)
    pause, failures, orphaned, complaint = 0.0, 0, False, None
    while True:
        if orphaned:
            time.sleep(pause)
        elif select.select([sys.stdin], [], [], pause)[0]:
            if os.read(sys.stdin.fileno(), 1):
                break
            orphaned = True
        # The pipe of a dying parent closes before its process is gone: only the next look may find it dead.
        if not spool.mark_dead(results) and orphaned:
            break
        pause = POLL
        if syncer.pending():
            report = syncer.attempt(LONGEST_ATTEMPT)
            failures = failures + 1 if report.error else 0
            pause = min(SLOWEST_POLL, POLL * 2 ** min(failures, 8))
            if report.error != complaint:
                complaint = report.error
                log.warning("%s", complaint or "the store answers again")
    report = syncer.attempt(LONGEST_ATTEMPT)
    if report.pending:
        log.warning("%s; %s", report, spool.REMEDY)
    return PENDING if report.pending else 0
