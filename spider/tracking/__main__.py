"""``python -m spider.tracking RESULTS``: the process that sends in the background (`sync.Sender` starts it).

It runs beside a workflow or a trainer, or is started by a job as it ends, and syncs every few seconds at low
priority. Its standard input is a pipe that its parent holds: a byte in it tells it to send the rest and end.
If it closes without one, the parent was killed, and the sender ends once no job of this folder runs any more
(a killed Snakemake leaves its trainer running).
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from pathlib import Path

from spider.tracking import spool
from spider.tracking.sync import Syncer

log = logging.getLogger("spider.tracking")

POLL, SLOWEST_POLL = 5.0, 60.0
LONGEST_ATTEMPT = 60.0  # seconds that one sync may take, the last one included


def follow(results: Path) -> bool:
    """Sync every few seconds until told to end; returns whether anything is left."""
    os.nice(5)
    syncer = Syncer(results)
    pause, orphaned, complaint = 0.0, False, None
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
        error = syncer.attempt(LONGEST_ATTEMPT).error if syncer.pending() else None
        pause = min(SLOWEST_POLL, 2 * max(pause, POLL)) if error else POLL
        if error != complaint:
            complaint = error
            log.warning("%s", complaint or "the store answers again")
    report = syncer.attempt(LONGEST_ATTEMPT)
    if report.pending:
        log.warning("%s; %s", report, spool.REMEDY)
    return report.pending > 0


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    sys.exit(follow(Path(sys.argv[1])))
