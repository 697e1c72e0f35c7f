"""Send the records of the spool that an MLflow store lacks.

``tracking/sent.json`` holds for each store the last state of each record that was sent, and the number of
bytes of each ``metrics.jsonl`` that were sent. It only saves work: without it all records are sent again,
which changes nothing. One process sends at a time (``tracking/.sync.lock``). A second one waits for a moment,
and then leaves the records to the first one or to a later sync.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from pydantic import BaseModel, TypeAdapter

from spider.files import digest, read_json, write_json
from spider.results import Results
from spider.tracking import spool
from spider.tracking.records import RefusedError, relative
from spider.tracking.registry import Registry
from spider.tracking.store import REFUSALS, Point, Store
from spider.tracking.target import (
    copies_weights,
    enabled,
    explain,
    one_line,
    registers,
    store_key,
    store_uri,
)
from spider.tracking.versions import lines
from spider.training.metrics import parse_row

log = logging.getLogger(__name__)

#: Seconds between two attempts of a process that sends in the background, and of an attempt.
POLL, SLOWEST_POLL, LONGEST_ATTEMPT = 5.0, 60.0, 60.0
#: The largest share of a processor that it takes.
SHARE = 0.1
#: The item of all registered models, which is sent last.
REGISTRY = "model registry"


class SyncReport(NamedTuple):
    """The result of a sync: numbers of sent records and points by kind, of unsent ones, and the error."""

    sent: dict[str, int] = {}
    pending: int = 0
    error: str | None = None
    experiment: str | None = None
    """Id of the experiment *Training*; None if the store was not reached."""

    def __str__(self) -> str:
        sent = ", ".join(f"{n} {kind}" for kind, n in self.sent.items()) or "nothing"
        left = f"; {self.pending} pending" if self.pending else ""
        return f"sent {sent}{left}" + (f" ({self.error})" if self.error else "")


class Curve(BaseModel):
    """The progress of a ``metrics.jsonl``: the key of its training run, its `_head` and the next byte."""

    key: str
    offset: int
    head: str


class Sent(BaseModel):
    """The records that a store has, by path in the results folder."""

    fingerprint: Any = None
    records: dict[str, list[int]] = {}
    curves: dict[str, Curve] = {}
    registry: str | None = None
    """State of all records about registered models."""
    registered: dict[str, str] = {}
    """`Line.digest` of each run."""


_EVERYWHERE = TypeAdapter(dict[str, Sent])


class Item(NamedTuple):
    """An unsent record, or an unsent part of a curve of the training run ``key``."""

    kind: str
    path: Path
    name: str
    """Path in the results folder, as in `Sent`."""
    key: str = ""


def sync(results: Path, *, timeout: float = math.inf) -> SyncReport:
    """Send all records that the store lacks, as `Syncer.attempt`."""
    return Syncer(results).attempt(timeout)


class Syncer:
    """Send the records of a results folder, with one connection for all attempts."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._store: Store | None = None
        self._complained: set[str] = set()

    def attempt(self, timeout: float = math.inf) -> SyncReport:
        """Send the unsent records. An error of the store is returned, not raised.

        After ``timeout`` seconds, wait for no other sender and begin no further call to the store. A call may
        take 30 s.
        """
        if not enabled():
            return SyncReport()
        deadline = time.monotonic() + timeout
        spool.mark_dead(self.results)
        sent: Counter[str] = Counter()
        error, uri = None, ""
        try:
            uri = store_uri(self.results)
            with FileLock(_lock(self.results), timeout):
                _holder(self.results).write_text(_process_name(os.getpid()))
                if self._store is None or self._store.stale():
                    self._store = Store(self.results)
                error = self._send_all(self._store, sent, deadline)
        except Timeout:
            error = "another process is sending"
        except Exception as failure:  # no error of a store may stop the job
            self._store = None
            error = spool.redact(explain(failure, uri))
        experiment = self._store.experiments["Training"] if self._store else None
        return SyncReport(dict(sent), self.pending(), error, experiment)

    def pending(self) -> int:
        """Return the number of records and curves that are not sent entirely, by ``sent.json``."""
        try:
            known = _load_sent(self.results).get(store_key(self.results), Sent())
        except ValueError:
            known = Sent()
        return len(_unsent(self.results, known))

    def _send_all(self, store: Store, sent: Counter[str], deadline: float) -> str | None:
        """Send the unsent records and update ``sent.json``; return the last refusal."""
        everywhere = _load_sent(self.results)
        refusal = None
        known = everywhere.get(store.key, Sent())
        if known.fingerprint != store.fingerprint:
            known = Sent(fingerprint=store.fingerprint)
        everywhere[store.key] = known
        try:
            for item in _unsent(self.results, known):
                if time.monotonic() > deadline:
                    return refusal or "out of time"
                try:
                    for kind, number in _deliver(store, item, known):
                        sent[kind] += number
                        if time.monotonic() > deadline:
                            break
                except Exception as failure:
                    if getattr(failure, "error_code", None) not in REFUSALS:
                        raise
                    refusal = spool.redact(f"{item.name}: {_reason(failure)}")
                    if refusal not in self._complained:
                        self._complained.add(refusal)
                        log.warning("not accepted by the store: %s", refusal)
        finally:
            write_json(self.results / "tracking" / "sent.json", _EVERYWHERE.dump_python(everywhere))
        return refusal


def _deliver(store: Store, item: Item, known: Sent) -> Iterator[tuple[str, int]]:
    """Send an item in parts and update ``known`` after each; yield the kind and the number of each part."""
    if item.kind == REGISTRY:
        yield from _register(store, known)
        return
    if not item.key:
        state = _state(item.path)  # taken before reading, so that a later change is sent next time
        store.send(spool.KINDS[item.kind].read(item.path))
        known.records[item.name] = state
        yield item.kind, 1
        return
    run_id, created = store.training_run(item.key)
    for offset, points in batches(item.path, 0 if created else _offset(item, known)):
        store.log_points(run_id, points)
        known.curves[item.name] = Curve(key=item.key, offset=offset, head=_head(item.path))
        yield "points", len(points)


def _register(store: Store, known: Sent) -> Iterator[tuple[str, int]]:
    """Register the models of all runs with new records. The next sync repeats a refused one.

    Raises:
        RefusedError: a model was refused, and the others are registered; or no model can be registered.
    """
    results = store.results
    registry = Registry(store)
    refusal = ""
    state = _registry_state(results)
    models = ((relative(results, path), path) for _, path in spool.records(results, ["models"]))
    unsent = {path.stem for name, path in models if known.records.get(name) != _state(path)}
    for line in lines(results):
        version = digest([line.digest, copies_weights()])
        if known.registered.get(line.run) == version:
            continue
        try:
            if unsent & {one.record.identity for one in line.versions}:
                raise RefusedError("a checkpoint's record was not accepted")
            registry.publish(line)
        except Exception as failure:
            if getattr(failure, "error_code", None) not in REFUSALS:
                raise RefusedError(registry.explain(failure)) from failure
            refusal = f"run {line.run}: {_reason(failure)}"
            continue
        known.registered[line.run] = version
        yield "registered models", 1
    if refusal:
        raise RefusedError(refusal)
    known.registry = state


def _reason(failure: Exception) -> str:
    return str(failure) if isinstance(failure, RefusedError) else one_line(failure)


def batches(path: Path, start: int, size: int = 1000) -> Iterator[tuple[int, list[Point]]]:
    """Yield batches of about ``size`` points of a ``metrics.jsonl`` from byte ``start``, and their ends.

    A last line without a newline is incomplete and left for the next call.
    """
    points: list[Point] = []
    offset = start
    with open(path, "rb") as f:
        f.seek(start)
        for line in f:
            if not line.endswith(b"\n"):
                break
            new = []
            try:
                row = parse_row(line)
                new = [(key, value, int(row.time * 1000), row.step) for key, value in row.metrics.items()]
            except ValueError as error:
                log.warning("%s: skipped a malformed row at byte %d (%s)", path, offset, error)
            if points and len(points) + len(new) > size:
                yield offset, points
                points = []
            points += new
            offset += len(line)
    if offset > start:
        yield offset, points


def rows_were_replaced(results: Path, path: Path) -> bool:
    """Return whether a ``metrics.jsonl`` was replaced after some of its rows were sent."""
    name = relative(results, path)
    heads = {sent.curves[name].head for sent in _load_sent(results).values() if name in sent.curves}
    return bool(heads) and (not path.exists() or _head(path) not in heads)


def _unsent(results: Path, known: Sent) -> list[Item]:
    """Return the records, curves and registered models that are not sent entirely."""
    items = [Item(kind, path, relative(results, path)) for kind, path in spool.records(results)]
    items = [item for item in items if known.records.get(item.name) != _state(item.path)]
    folder = Results(results)
    for run in folder.runs:
        key = read_json(folder.match(run))["key"] if folder.match(run).exists() else ""
        for path in [stage.metrics for stage in folder.stages(run) if key and stage.metrics.exists()]:
            item = Item("curves", path, relative(results, path), key)
            with open(path, "rb") as f:
                f.seek(_offset(item, known))
                items += [item] if f.readline().endswith(b"\n") else []
    if registers() and known.registry != _registry_state(results):
        items.append(Item(REGISTRY, results, REGISTRY))
    return items


def _registry_state(results: Path) -> str | None:
    """Return the state of the records about registered models, or None without such records."""
    states = [_state(path) for _, path in spool.records(results, ("models", "evaluations", "choices"))]
    return digest([states, copies_weights()]) if states else None


def _state(path: Path) -> list[int]:
    """Return numbers that change with a record."""
    stat = path.stat()
    return [stat.st_mtime_ns, stat.st_size, stat.st_ino]


def _offset(item: Item, known: Sent) -> int:
    """Return how many bytes of a curve were sent; 0 for another training run or a replaced file."""
    curve = known.curves.get(item.name)
    if curve and (curve.key, curve.head) == (item.key, _head(item.path)):
        return curve.offset if curve.offset <= item.path.stat().st_size else 0
    return 0


def _head(path: Path) -> str:
    """Return the digest of the first row, which identifies a file of rows."""
    with open(path, "rb") as f:
        return hashlib.sha256(f.readline()).hexdigest()[:16]


def _load_sent(results: Path) -> dict[str, Sent]:
    path = results / "tracking" / "sent.json"
    try:
        return _EVERYWHERE.validate_python(read_json(path)) if path.exists() else {}
    except ValueError as error:  # a ValidationError is one too
        log.warning("%s; sending everything again", error)
        return {}


class Sender:
    """Start a process that sends the records of ``results``.

    So a job never waits for a store and does not import mlflow. A byte in the pipe of its standard input
    makes the process send the rest and end.
    """

    def __init__(self, results: Path) -> None:
        self._log = results / "tracking" / "sender.log"
        self._process: subprocess.Popen[bytes] | None = None
        command = [sys.executable, "-m", "spider.tracking", str(results.absolute())]
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "ab") as output:
                # In its own session Ctrl-C does not end it before the job has written its records.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
                )
        except OSError as error:
            log.warning("cannot start the tracking sender (%s); %s", error, spool.REMEDY)

    def stop(self, timeout: float = 5) -> None:
        """Make the process send the rest and end.

        If that takes more than ``timeout`` seconds, the process continues alone for up to a minute, and one
        line in the log names the reason and the remedy.
        """
        if self._process is None:
            return
        try:
            self._process.communicate(b"x", timeout)
        except subprocess.TimeoutExpired:
            if self._waits_for_another():
                busy = "another process is sending to the tracking store, these records are sent after it"
                log.info("%s; if they are not, %s", busy, spool.REMEDY)
            else:
                log.warning(
                    "the tracking store is slow or cannot be reached, still sending; if that fails, %s",
                    spool.REMEDY,
                )
            return
        if code := self._process.returncode:
            lines = self._log.read_text(errors="replace").splitlines()
            # Leave out the time, the level and the name of the logger.
            reason = lines[-1].partition(": ")[2] if lines else f"exit code {code}"
            log.warning("the tracking store did not get all records: %s", reason)

    def _waits_for_another(self) -> bool:
        """Return whether another process than the one that was started here holds the lock for sending."""
        assert self._process is not None
        results = self._log.parents[1]
        try:
            with FileLock(_lock(results), 0):
                return False
        except Timeout:
            holder = _holder(results)
            return not holder.exists() or holder.read_text() != _process_name(self._process.pid)


def _lock(results: Path) -> Path:
    """Return the file that the sending process locks."""
    return results / "tracking" / ".sync.lock"


def _holder(results: Path) -> Path:
    """Return the file with the name of the current or the last sending process."""
    return results / "tracking" / ".sync.holder"


def _process_name(pid: int) -> str:
    """Return the name of a process of this machine."""
    return f"{socket.gethostname()} {pid}"


def follow(results: Path) -> bool:
    """Run the process of a `Sender`: sync every few seconds until the parent ends it.

    Wait longer between two attempts if they take long. If the pipe closes without a byte, the parent was
    killed. Then end when no job of this folder runs (a killed Snakemake leaves its trainer running).

    Returns:
        Whether some records are not sent.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
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
        # The pipe of a dying parent closes before its process ends, so only the next round may find it dead.
        if not spool.mark_dead(results) and orphaned:
            break
        began = time.process_time()
        error = syncer.attempt(LONGEST_ATTEMPT).error if syncer.pending() else None
        # On few processors the time that is spent here slows the job.
        slow = max(POLL, (time.process_time() - began) / SHARE)
        pause = min(SLOWEST_POLL, 2 * max(pause, POLL) if error else slow)
        if error != complaint:
            complaint = error
            log.warning("%s", complaint or "the store can be reached again")
    report = syncer.attempt(LONGEST_ATTEMPT)
    if report.pending:
        log.warning("%s; %s", report, spool.REMEDY)
    return report.pending > 0
