"""Bring an MLflow store up to date with a results folder.

What was sent stands in the tags of the runs in the store, so nothing is kept elsewhere: a lost store is made
again from the folder, with the same content. One process sends at a time (``tracking/.sync.lock``). Each item
is a workflow, a job, a run or a registered model; MLflow may refuse one, and the others are sent.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import filelock

from spider.common.formatting import redact
from spider.common.results import Results
from spider.config import Config
from spider.provenance import recorder
from spider.tracking.follower import REMEDY
from spider.tracking.jobs import Item, Pipeline
from spider.tracking.registry import Registry
from spider.tracking.store import REFUSALS, Store
from spider.tracking.target import enabled, explain, one_line, store_uri
from spider.tracking.trainings import Trainings

log = logging.getLogger(__name__)

#: Seconds between two attempts of the process beside a workflow, and of an attempt.
POLL, SLOWEST_POLL, LONGEST_ATTEMPT = 5.0, 60.0, 60.0
#: The largest share of a processor that it takes.
SHARE = 0.1


class Report(NamedTuple):
    """The result of a sync: numbers of sent items by kind, and the error that stopped it or refused one."""

    sent: dict[str, int] = {}
    error: str | None = None
    experiments: Mapping[str, str] = {}
    """Ids of the experiments by name; none if the store was not reached."""

    def __str__(self) -> str:
        sent = ", ".join(f"{n} {kind}" for kind, n in self.sent.items()) or "nothing"
        return f"sent {sent}" + (f" ({self.error})" if self.error else "")


def sync(results: Results, config: Config, *, timeout: float = math.inf) -> Report:
    """Send what the store lacks, also what killed workflows have left incomplete."""
    with contextlib.suppress(OSError, ValueError):  # a folder that can only be read; a damaged record
        recorder.complete(results.root)
    return Syncer(results, config).attempt(timeout)


def follow(results: Results, config: Config) -> int:
    """Repeat `Syncer.attempt` until standard input has a byte or closes; return the exit status.

    Wait longer between two attempts if they take long. If the input closes without a byte, the workflow was
    killed.
    """
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING, force=True
    )
    os.nice(5)
    syncer = Syncer(results, config)
    pause, complaint = 0.0, None
    while not select.select([sys.stdin], [], [], pause)[0]:
        began = time.process_time()
        error = syncer.attempt(LONGEST_ATTEMPT).error
        # On few processors the time that is spent here slows the jobs.
        slow = max(POLL, (time.process_time() - began) / SHARE)
        pause = min(SLOWEST_POLL, 2 * max(pause, POLL) if error else slow)
        if error != complaint:
            complaint = error
            log.warning("%s", complaint or "the store can be reached again")
    if not os.read(sys.stdin.fileno(), 1):
        return 0
    report = syncer.attempt(LONGEST_ATTEMPT)
    if report.error:
        log.warning("%s; %s", report.error, REMEDY)
    return int(report.error is not None)


class Syncer:
    """Send a results folder, with one connection for all attempts."""

    def __init__(self, results: Results, config: Config) -> None:
        self.results, self.config = results, config
        self._store: Store | None = None
        self._views: list[Pipeline | Trainings | Registry] = []
        self._complained: set[str] = set()

    def attempt(self, timeout: float = math.inf) -> Report:
        """Send what the store lacks. An error of the store is returned, not raised.

        After ``timeout`` seconds, wait for no other process that sends, and begin no further item.
        """
        if not enabled(self.config.tracking):
            return Report()
        deadline = time.monotonic() + timeout
        sent: Counter[str] = Counter()
        error, uri = None, ""
        try:
            lock = self.results.root / "tracking" / ".sync.lock"
            lock.parent.mkdir(exist_ok=True)
            with filelock.FileLock(lock, timeout if timeout < math.inf else -1):
                if self._store is None or self._store.stale():
                    uri = store_uri(self.results.root, self.config.tracking)
                    # What was sent before stands in the store.
                    self._store = store = Store(self.results, self.config.tracking)
                    trainings = Trainings(store, self.results, self.config)
                    self._views = [Pipeline(store), trainings, Registry(store, self.results)]
                for kind, name, send in self._items():
                    if time.monotonic() > deadline:
                        error = error or "out of time"
                        break
                    try:
                        sent[kind] += send()
                    except Exception as failure:
                        if (
                            not isinstance(failure, ValueError)
                            and getattr(failure, "error_code", None) not in REFUSALS
                        ):
                            raise
                        reason = str(failure) if isinstance(failure, ValueError) else one_line(failure)
                        error = str(redact(f"{name}: {reason}"))
                        if error not in self._complained:
                            self._complained.add(error)
                            log.warning("not accepted by the store: %s", error)
        except filelock.Timeout:
            error = "another process is sending"
        except Exception as failure:  # no error of a store may stop a workflow
            self._store = None
            error = str(redact(explain(failure, uri)))
        experiments = self._store.experiments if self._store else {}
        return Report({kind: n for kind, n in sent.items() if n}, error, experiments)

    def _items(self) -> Iterator[Item]:
        for view in self._views:
            try:
                yield from view.items()
            except ValueError as error:  # a damaged record; the other views are sent
                yield Item("records", type(view).__name__, partial(_refuse, error))


def _refuse(error: ValueError) -> int:
    raise error
