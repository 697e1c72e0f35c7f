"""Replay what the store lacks: the one way from the spool into MLflow.

``tracking/sent.json`` remembers, store by store, the state in which each record was last sent and up to which
byte each ``metrics.jsonl``. It only saves work: without it all is sent again, which changes nothing. One
process sends at a time (``tracking/.sync.lock``); whoever comes second waits for a moment, then leaves it to
the first or to a later sync.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from spider.files import read_json, write_json
from spider.tracking import spool
from spider.tracking.explain import explain, one_line
from spider.tracking.store import RefusedError, Store, is_refusal
from spider.tracking.target import place_key, store_uri

log = logging.getLogger(__name__)

Point = tuple[str, float, int, int]


@dataclass(frozen=True)
class SyncReport:
    """What a sync did: records and metric points sent by kind, what is left, and why it stopped early."""

    sent: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    error: str | None = None

    def __str__(self) -> str:
        sent = ", ".join(f"{n} {kind}" for kind, n in self.sent.items()) or "nothing"
        left = f"; {self.pending} pending" if self.pending else ""
        return f"sent {sent}{left}" + (f" ({self.error})" if self.error else "")


class Item(NamedTuple):
    """A record or a curve of which the store lacks something."""

    kind: str
    path: Path
    name: str
    """Path below the results folder, the key in ``sent.json``."""
    key: str
    """Training key of a curve; empty for a record."""


def sync(results: Path, *, timeout: float | None = None) -> SyncReport:
    """Send everything the store lacks. Never raises for a store that is down, slow or refuses.

    Args:
        timeout: seconds after which to stop, while waiting for another sender or between two calls to the
            store (one call may take 30 s on its own).
    """
    return Syncer(results).attempt(timeout)


class Syncer:
    """Sends one results folder, keeping its connection from one attempt to the next."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._store: Store | None = None
        self._complained: set[str] = set()

    def attempt(self, timeout: float | None = None) -> SyncReport:
        if not spool.enabled():
            return SyncReport()
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        spool.mark_dead(self.results)
        sent: Counter[str] = Counter()
        error, uri = None, ""
        try:
            uri = store_uri(self.results)
            (self.results / "tracking").mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.results / "tracking" / ".sync.lock")
            with lock.acquire(timeout=-1 if timeout is None else timeout):
                error = self._send_all(uri, sent, deadline)
        except Timeout:
            error = "another process is sending"
        except Exception as failure:  # whatever a store does must not reach the job
            self._store = None
            error = spool.redact(explain(failure, uri))
        return SyncReport(dict(sent), self.pending(), error)

    def pending(self) -> int:
        """Records and curves of which the store lacks something, as far as ``sent.json`` knows."""
        try:
            known = _load_sent(self.results).get(place_key(store_uri(self.results)), {})
        except ValueError:
            known = {}
        return len(_unsent(self.results, known))

    def _send_all(self, uri: str, sent: Counter[str], deadline: float) -> str | None:
        """Send, keeping ``sent.json`` current; returns the first refusal."""
        if self._store is None or self._store.stale(uri):
            self._store = Store(uri, self.results)
        store = self._store
        everywhere = _load_sent(self.results)
        known = everywhere.get(place_key(uri), {})
        if known.get("fingerprint") != store.fingerprint:
            known = {"fingerprint": store.fingerprint, "records": {}, "curves": {}}
        everywhere[place_key(uri)] = known
        refusal = None
        try:
            for item in _unsent(self.results, known):
                if time.monotonic() > deadline:
                    return refusal or "out of time"
                try:
                    if item.key:
                        self._send_curve(store, item, known["curves"], sent, deadline)
                    else:
                        self._send_record(store, item, known["records"])
                        sent[item.kind] += 1
                except Exception as failure:
                    if not is_refusal(failure):
                        raise
                    refusal = spool.redact(f"{item.name}: {one_line(failure)}")
                    if refusal not in self._complained:
                        self._complained.add(refusal)
                        log.warning("not accepted by the store: %s", refusal)
        finally:
            write_json(self.results / "tracking" / "sent.json", everywhere)
        return refusal

    def _send_record(self, store: Store, item: Item, known: dict[str, Any]) -> None:
        state = _state(item.path)  # before reading: a change in between is then sent next time
        record = _read_record(item.path)
        if item.kind in spool.RUN_KINDS:
            store.send_run(record, self.results)
        elif item.kind == "models":
            self._training_run(store, record["training"])
            store.send_model(record)
        else:
            self._training_run(store, record["training"])
            store.send_evaluation(record, self.results)
        known[item.name] = state

    def _training_run(self, store: Store, key: str) -> tuple[str | None, bool]:
        """MLflow id of a training run, and whether it had to be made again (someone deleted it there)."""
        if run_id := store.find_run(key, "Training"):
            return run_id, False
        path = spool.record_path(self.results, "training", key)
        if path.exists():
            store.send_run(_read_record(path), self.results)
        return store.find_run(key, "Training"), True

    def _send_curve(
        self, store: Store, item: Item, known: dict[str, Any], sent: Counter[str], deadline: float
    ) -> None:
        run_id, made_again = self._training_run(store, item.key)
        if run_id is None:
            return
        start = 0 if made_again else _offset(item, known)
        for offset, points in batches(item.path, start):
            store.log_points(run_id, points)
            known[item.name] = {"key": item.key, "offset": offset, "head": _head(item.path)}
            sent["points"] += len(points)
            if time.monotonic() > deadline:
                return


def _read_record(path: Path) -> spool.Record:
    """A record of this format; `RefusedError` for another, so that one damaged file holds up no other."""
    try:
        record = read_json(path)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    if not isinstance(record, dict) or record.get("format") != 1:
        raise RefusedError("not a record of this version of Spider; move it away")
    return record


def batches(path: Path, start: int, size: int = 1000) -> Iterator[tuple[int, list[Point]]]:
    """Points of a ``metrics.jsonl`` from byte ``start``, about ``size`` a batch, with the offset behind each.

    A last line without its newline is still being written, and waits.
    """
    points: list[Point] = []
    offset = done = start
    with open(path, "rb") as f:
        f.seek(start)
        for line in f:
            if not line.endswith(b"\n"):
                break
            row = _row(line, path, offset)
            if points and len(points) + len(row) > size:
                yield done, points
                points = []
            points += row
            offset = done = offset + len(line)
    if offset > start:
        yield done, points


def _row(line: bytes, path: Path, offset: int) -> list[Point]:
    try:
        row = json.loads(line)
        at, step = int(row["time"] * 1000), int(row["step"])
        return [(key, float(value), at, step) for key, value in row["metrics"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s: skipped a malformed row at byte %d (%s)", path, offset, error)
        return []


def rows_were_replaced(results: Path, name: str) -> bool:
    """Whether rows of ``name`` (a ``metrics.jsonl`` below ``results``) were sent that it no longer holds."""
    heads = {
        known["curves"][name]["head"]
        for known in _load_sent(results).values()
        if name in known.get("curves", {})
    }
    path = results / name
    return bool(heads) and (not path.exists() or _head(path) not in heads)


def _unsent(results: Path, known: dict[str, Any]) -> list[Item]:
    done, curves = known.get("records", {}), known.get("curves", {})
    items = []
    for kind, path in spool.records(results):
        name = path.relative_to(results).as_posix()
        if done.get(name) != _state(path):
            items.append(Item(kind, path, name, ""))
    for pointer in sorted(results.glob("runs/*/tracking.json")):
        key = read_json(pointer)["key"]
        for path in sorted(pointer.parent.glob("*/metrics.jsonl")):
            item = Item("curves", path, path.relative_to(results).as_posix(), key)
            if _complete_size(path) > _offset(item, curves):
                items.append(item)
    return items


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_mtime_ns, stat.st_size, stat.st_ino]


def _offset(item: Item, known: dict[str, Any]) -> int:
    """Byte up to which a curve was sent: 0 for another training run's, or for a file that was replaced."""
    entry = known.get(item.name)
    if entry is None or entry["key"] != item.key or entry["head"] != _head(item.path):
        return 0
    return entry["offset"] if entry["offset"] <= item.path.stat().st_size else 0


def _head(path: Path) -> str:
    """Digest of the first row, which tells one file of rows from another."""
    with open(path, "rb") as f:
        return hashlib.sha256(f.readline()).hexdigest()[:16]


def _complete_size(path: Path) -> int:
    """Bytes up to the last newline."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        start = max(0, size - (1 << 16))
        f.seek(start)
        return start + f.read(size - start).rfind(b"\n") + 1


def _load_sent(results: Path) -> dict[str, Any]:
    path = results / "tracking" / "sent.json"
    try:
        return read_json(path) if path.exists() else {}
    except ValueError as error:
        log.warning("%s; sending everything again", error)
        return {}
