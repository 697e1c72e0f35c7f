"""The process that sends in the background, so that what computes never waits for a store nor imports mlflow.

It runs beside a workflow or a trainer, or is started by a job as it ends, and syncs every few seconds at low
priority. Its standard input is a pipe that its parent holds: a byte in it tells it to send the rest and end.
If it closes without one, the parent was killed, and the sender ends once no job of this folder runs any more
(a killed Snakemake leaves its trainer running).
"""

from __future__ import annotations

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
"""Seconds that one sync may take, the last one of a sender told to end included."""


class Sender:
    """Starts a process that sends ``results``; it ends soon after this one."""

    def __init__(self, results: Path) -> None:
        self._log = results / "tracking" / "sender.log"
        self._process: subprocess.Popen[bytes] | None = None
        command = [sys.executable, "-m", "spider.tracking", str(results.absolute())]
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "ab") as said:
                # Its own session: Ctrl-C in the terminal is for the job, which then tells its sender.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True
                )
        except OSError as error:
            log.warning("cannot start the tracking sender (%s); %s", error, spool.REMEDY)

    def stop(self, timeout: float = 5) -> None:
        """Let it send the rest and end, waiting ``timeout`` seconds at most.

        One that is not done by then goes on by itself for up to a minute; one warning says what to do.
        """
        if self._process is None:
            return
        try:
            self._process.communicate(b"x", timeout)
        except subprocess.TimeoutExpired:
            log.warning("the tracking store is slow or away, still sending; if that fails, %s", spool.REMEDY)
            return
        if code := self._process.returncode:
            said = self._log.read_text(errors="replace").splitlines()
            reason = said[-1].partition(": ")[2] if said else f"exit code {code}"  # past time, level and name
            log.warning("not everything reached the tracking store: %s", reason)


def follow(results: Path) -> bool:
    """Sync every few seconds until told to end, as a process of its own; returns whether anything is left."""
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
    return report.pending > 0
