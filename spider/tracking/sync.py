"""Replay what the store lacks: the one way from the spool into MLflow.

``tracking/sent.json`` remembers, store by store, the state in which each record was last sent and up to which
byte each ``metrics.jsonl``. It only saves work: without it all is sent again, which changes nothing. One
process sends at a time (``tracking/.sync.lock``); whoever comes second waits for a moment, then leaves it to
the first or to a later sync.
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

POLL, SLOWEST_POLL, LONGEST_ATTEMPT = 5.0, 60.0, 60.0  # seconds, of a process that sends in the background
#: Of a processor, that it takes at most.
SHARE = 0.1
REGISTRY = "model registry"  # what is sent last, as one item


class SyncReport(NamedTuple):
    """What a sync did: records and metric points sent by kind, what is left, and why it stopped early."""

    sent: dict[str, int] = {}
    pending: int = 0
    error: str | None = None

    def __str__(self) -> str:
        sent = ", ".join(f"{n} {kind}" for kind, n in self.sent.items()) or "nothing"
        left = f"; {self.pending} pending" if self.pending else ""
        return f"sent {sent}{left}" + (f" ({self.error})" if self.error else "")


class Curve(BaseModel):
    """How far a ``metrics.jsonl`` was sent: as whose, which one by its first row, and up to which byte."""

    key: str
    offset: int
    head: str


class Sent(BaseModel):
    """What one store has, by path below the results folder."""

    fingerprint: Any = None
    records: dict[str, list[int]] = {}
    curves: dict[str, Curve] = {}
    registry: str | None = None
    """State of all records of which models are registered."""
    registered: dict[str, str] = {}
    """Of each run, `Line.digest`."""


_EVERYWHERE = TypeAdapter(dict[str, Sent])


class Item(NamedTuple):
    """A record of which the store lacks something, or a curve of the training run with that ``key``."""

    kind: str
    path: Path
    name: str  # path below the results folder, as in `Sent`
    key: str = ""


def sync(results: Path, *, timeout: float = math.inf) -> SyncReport:
    """Send everything the store lacks; see `Syncer.attempt`."""
    return Syncer(results).attempt(timeout)


class Syncer:
    """Sends one results folder, keeping its connection from one attempt to the next."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._store: Store | None = None
        self._complained: set[str] = set()

    def attempt(self, timeout: float = math.inf) -> SyncReport:
        """Send what is missing. Never raises for a store that is down, slow or refuses.

        After ``timeout`` seconds it waits for no other sender and begins no other call to the store; one may
        take 30 s on its own.
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
                _holder(self.results).write_text(_me(os.getpid()))
                if self._store is None or self._store.stale():
                    self._store = Store(self.results)
                error = self._send_all(self._store, sent, deadline)
        except Timeout:
            error = "another process is sending"
        except Exception as failure:  # whatever a store does must not reach the job
            self._store = None
            error = spool.redact(explain(failure, uri))
        return SyncReport(dict(sent), self.pending(), error)

    def pending(self) -> int:
        """Records and curves of which the store lacks something, as far as ``sent.json`` knows."""
        try:
            known = _load_sent(self.results).get(store_key(self.results), Sent())
        except ValueError:
            known = Sent()
        return len(_unsent(self.results, known))

    def _send_all(self, store: Store, sent: Counter[str], deadline: float) -> str | None:
        """Send, keeping ``sent.json`` current; returns the last refusal."""
        everywhere, refusal = _load_sent(self.results), None
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
                    refusal = spool.redact(f"{item.name}: {_said(failure)}")
                    if refusal not in self._complained:
                        self._complained.add(refusal)
                        log.warning("not accepted by the store: %s", refusal)
        finally:
            write_json(self.results / "tracking" / "sent.json", _EVERYWHERE.dump_python(everywhere))
        return refusal


def _deliver(store: Store, item: Item, known: Sent) -> Iterator[tuple[str, int]]:
    """Send an item piece by piece, noting each as known; yields what it was and how many."""
    if item.kind == REGISTRY:
        yield from _register(store, known)
        return
    if not item.key:
        state = _state(item.path)  # before reading: a later change is sent next time
        store.send(spool.KINDS[item.kind].read(item.path))
        known.records[item.name] = state
        yield item.kind, 1
        return
    run_id, made_again = store.training_run(item.key)
    for offset, points in batches(item.path, 0 if made_again else _offset(item, known)):
        store.log_points(run_id, points)
        known.curves[item.name] = Curve(key=item.key, offset=offset, head=_head(item.path))
        yield "points", len(points)


def _register(store: Store, known: Sent) -> Iterator[tuple[str, int]]:
    """Register the models of all runs of which something is new. One that is refused is tried again at the
    next sync; `RefusedError` says why, after the others are done, or at once where it is no matter of one."""
    results, registry, refusal = store.results, Registry(store), ""
    state = _registry_state(results)
    models = ((relative(results, path), path) for _, path in spool.records(results, ["models"]))
    unsent = {path.stem for name, path in models if known.records.get(name) != _state(path)}
    for line in lines(results):
        told = digest([line.digest, copies_weights()])
        if known.registered.get(line.run) == told:
            continue
        try:
            if unsent & {version.record.identity for version in line.versions}:
                raise RefusedError("a checkpoint's record was not accepted")
            registry.publish(line)
        except Exception as failure:
            if getattr(failure, "error_code", None) not in REFUSALS:
                raise RefusedError(registry.explain(failure)) from failure
            refusal = f"run {line.run}: {_said(failure)}"
            continue
        known.registered[line.run] = told
        yield "registered models", 1
    if refusal:
        raise RefusedError(refusal)
    known.registry = state


def _said(failure: Exception) -> str:
    return str(failure) if isinstance(failure, RefusedError) else one_line(failure)


def batches(path: Path, start: int, size: int = 1000) -> Iterator[tuple[int, list[Point]]]:
    """Points of a ``metrics.jsonl`` from byte ``start``, about ``size`` a batch, with the offset behind each.

    A last line without its newline is still being written, and waits.
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
    """Whether rows of a ``metrics.jsonl`` were sent that it no longer holds."""
    name = relative(results, path)
    heads = {sent.curves[name].head for sent in _load_sent(results).values() if name in sent.curves}
    return bool(heads) and (not path.exists() or _head(path) not in heads)


def _unsent(results: Path, known: Sent) -> list[Item]:
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
    """Of the records from which models are registered, and of how; None where there are none."""
    there = [_state(path) for _, path in spool.records(results, ("models", "evaluations", "choices"))]
    return digest([there, copies_weights()]) if there else None


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_mtime_ns, stat.st_size, stat.st_ino]


def _offset(item: Item, known: Sent) -> int:
    """Byte up to which a curve was sent: 0 for another training run's, or for a file that was replaced."""
    curve = known.curves.get(item.name)
    if curve and (curve.key, curve.head) == (item.key, _head(item.path)):
        return curve.offset if curve.offset <= item.path.stat().st_size else 0
    return 0


def _head(path: Path) -> str:
    """Digest of the first row, which tells one file of rows from another."""
    with open(path, "rb") as f:
        return hashlib.sha256(f.readline()).hexdigest()[:16]


def _load_sent(results: Path) -> dict[str, Sent]:
    path = results / "tracking" / "sent.json"
    try:
        return _EVERYWHERE.validate_python(read_json(path)) if path.exists() else {}
    except ValueError as error:  # pydantic's, too
        log.warning("%s; sending everything again", error)
        return {}


class Sender:
    """Starts the process that sends ``results``, so that what computes never waits for a store nor imports
    mlflow. A byte in the pipe that is its standard input tells it to send the rest and end."""

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
        """Let it send the rest and end.

        If that takes more than ``timeout`` seconds, it goes on by itself for up to a minute, and one line
        says why and what to do.
        """
        if self._process is None:
            return
        try:
            self._process.communicate(b"x", timeout)
        except subprocess.TimeoutExpired:
            if self._waits_for_another():
                busy = "another process is sending to the tracking store, these records follow after it"
                log.info("%s; if they do not, %s", busy, spool.REMEDY)
            else:
                log.warning(
                    "the tracking store is slow or away, still sending; if that fails, %s", spool.REMEDY
                )
            return
        if code := self._process.returncode:
            said = self._log.read_text(errors="replace").splitlines()
            reason = said[-1].partition(": ")[2] if said else f"exit code {code}"  # past time, level and name
            log.warning("not everything reached the tracking store: %s", reason)

    def _waits_for_another(self) -> bool:
        """Return whether another process than the one that was started here holds the lock for sending."""
        assert self._process is not None
        results = self._log.parents[1]
        try:
            with FileLock(_lock(results), 0):
                return False
        except Timeout:
            holder = _holder(results)
            return not holder.exists() or holder.read_text() != _me(self._process.pid)


def _lock(results: Path) -> Path:
    """Return the file that is locked by the process that sends."""
    return results / "tracking" / ".sync.lock"


def _holder(results: Path) -> Path:
    """Return the file that names the process that sends, or the last one that did."""
    return results / "tracking" / ".sync.holder"


def _me(pid: int) -> str:
    """Return what names a process of this machine."""
    return f"{socket.gethostname()} {pid}"


def follow(results: Path) -> bool:
    """What a `Sender` starts: sync every few seconds, more seldom where that takes long, until told to end;
    returns whether anything is left.

    If the pipe closes without a word, the parent was killed: then it ends once no job of this folder runs any
    more (a killed Snakemake leaves its trainer running).
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
        # The pipe of a dying parent closes before its process is gone: only the next look may find it dead.
        if not spool.mark_dead(results) and orphaned:
            break
        began = time.process_time()
        error = syncer.attempt(LONGEST_ATTEMPT).error if syncer.pending() else None
        # On few processors what is spent here is taken from the job.
        slow = max(POLL, (time.process_time() - began) / SHARE)
        pause = min(SLOWEST_POLL, 2 * max(pause, POLL) if error else slow)
        if error != complaint:
            complaint = error
            log.warning("%s", complaint or "the store answers again")
    report = syncer.attempt(LONGEST_ATTEMPT)
    if report.pending:
        log.warning("%s; %s", report, spool.REMEDY)
    return report.pending > 0
