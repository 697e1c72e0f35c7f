"""The spool: JSON files in the results folder, written whether or not a store can be reached.

Each record (`records`) is one file, whole or absent, which is overwritten as its run continues:

    tracking/workflows/{id}.json          an invocation of the workflow
    tracking/training/{key}.json          a training run with all its stages and restarts
    tracking/jobs/{identity}.json         a job of a rule; a rerun of the same job has the same file
    tracking/models/{identity}.json       a checkpoint
    tracking/evaluations/{identity}.json  the scores of a checkpoint
    tracking/choices/{identity}.json      the best stage of a run
    tracking/running/{kind}-{identity}    an empty file, which names a run that has not ended yet

Trade-off: each sync scans the folders, which takes milliseconds for thousands of records. In return no two
processes ever write the same file, and people can read, copy or delete a record with plain tools.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spider.files import fsync, read_json, write_json
from spider.tracking.records import Checkpoint, Evaluation, Run, TrackingRecord

log = logging.getLogger(__name__)

REMEDY = "`spider track sync` sends what is missing"

#: Folders of the records in the order of sending: parents before children.
RUN_KINDS = ("workflows", "training", "jobs")
KINDS: dict[str, type[TrackingRecord]] = {**dict.fromkeys(RUN_KINDS, Run), "models": Checkpoint}
KINDS["evaluations"] = Evaluation


def record_path(results: Path, kind: str, identity: str) -> Path:
    return results / "tracking" / kind / f"{identity}.json"


def put(path: Path, value: Any) -> None:
    """Write JSON. On a full or read-only disk the record is lost, but the job continues."""
    try:
        write_json(path, value)
    except OSError as error:
        log.warning("%s: cannot write the tracking record (%s); this job goes untracked", path, error)


def write(results: Path, record: TrackingRecord) -> None:
    """Write a record into the spool without secrets, and update the list of running runs."""
    kind = record.kind if record.kind == "training" else f"{record.kind}s"
    path = record_path(results, kind, record.identity)
    running = isinstance(record, Run) and record.status == "running"
    if running:  # list it before it is written, so that a kill in between leaves no unlisted record
        _list_as_running(results, path)
    put(path, redact(record.plain()))
    if running:  # list it again, because `mark_dead` may have removed the entry of the earlier attempt
        _list_as_running(results, path)
    elif isinstance(record, Run):
        with contextlib.suppress(OSError):  # the run may not be listed
            (_running_list(results) / _entry(path)).unlink()


def read_run(path: Path, *, if_running: bool = False) -> Run | None:
    """Return the run at ``path``, or None if it cannot be read; `sync` reports the reason.

    With ``if_running``, return None also for a run that has ended.
    """
    try:
        plain = read_json(path)
        return None if if_running and plain["status"] != "running" else Run.parse(plain, path)
    except (ValueError, KeyError, TypeError, OSError):
        return None


def records(results: Path, kinds: Iterable[str] = KINDS) -> Iterator[tuple[str, Path]]:
    """Yield the kind and the path of each record, parents first."""
    for kind in kinds:
        for path in sorted((results / "tracking" / kind).glob("*.json")):
            yield kind, path


def jobs(results: Path) -> list[Run]:
    """Return the records of all jobs; raise `RefusedError` for a damaged one."""
    return [Run.read(path) for _, path in records(results, ["jobs"])]


def mark_dead(results: Path, *, workflow: str | None = None) -> int:
    """Mark each running record whose process has ended as killed; return how many still run.

    Only the records in the list of running runs are read. With ``workflow``, a running job of that invocation
    on another host counts as killed too, because its invocation has ended.
    """
    running = 0
    for path in _running(results):
        if (run := read_run(path, if_running=True)) is None:
            continue
        lives = run.process.alive()
        if lives or (lives is None and (workflow is None or run.workflow != workflow)):
            running += bool(lives)
        # It may have finished between the two reads. Its process has ended, so this read is final.
        elif run := read_run(path, if_running=True):
            run.end("killed", "the process ended without a message (killed, or the machine stopped)")
            write(results, run)
            if read_run(path, if_running=True):  # the next attempt has begun in the meantime
                _list_as_running(results, path)
    return running


def _running(results: Path) -> list[Path]:
    """Return the paths of the records that are listed as running, in a fixed order."""
    if not (results / "tracking").is_dir():
        return []
    try:
        entries = sorted(name.partition("-") for name in os.listdir(_running_list(results)))
    except OSError:  # the list cannot be made here: read every record instead
        return [path for _, path in records(results, RUN_KINDS)]
    return [record_path(results, kind, identity) for kind, _, identity in entries]


def _running_list(results: Path) -> Path:
    """Return the folder with an empty file for each running run; create it if it does not exist."""
    listed = results / "tracking" / "running"
    listed.mkdir(parents=True, exist_ok=True)
    return listed


def _entry(record: Path) -> str:
    """Return the name of a record in the list of running runs."""
    return f"{record.parent.name}-{record.stem}"


def _list_as_running(results: Path, record: Path) -> None:
    """Add a record to the list of running runs; if the disk refuses, `put` logs a warning."""
    with contextlib.suppress(OSError):
        (_running_list(results) / _entry(record)).touch()
        fsync(_running_list(results))


# -------------------------------------------------------------------------------------------------- secrets

_SECRET_NAME = re.compile(
    r"passw|secret|credential|api_?key|access_?key|private_?key|authori[sz]ation|(?<!per )token$", re.I
)
_SECRET_TEXT = {
    r"(://)[^/\s:@]*:[^/\s@]*@": r"\1***@",
    r"(?i)\b(https?://)[^/\s@?#]+@": r"\1***@",  # a token, while the address of a database may name a user
    r"(?i)\b(bearer|basic)\s+[\w.~+/-]{8,}=*": r"\1 ***",
    r"\b(?:hf_|gh[pousr]_|github_pat_|sk-|glpat-|xox[bap]-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b": "***",
}
#: A setting in a text. Code has such assignments too.
_SECRET_SETTING = {r"(?i)((?:password|passwd|secret|api_?key|token)[=:]\s*)[^\s&'\",;]+": r"\1***"}


def redact(value: Any, *, settings: bool = True) -> Any:
    """Return ``value`` without secrets: values of secret keys, texts like tokens, secrets of the environment.

    With ``settings``, texts such as ``password=...`` lose their value too. Numbers like ``tokens: 5000`` and
    ``eos_token: 258`` stay, and so does a column ``by nats per token``.
    """
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= 8]
    patterns = _SECRET_TEXT | (_SECRET_SETTING if settings else {})
    secrets.sort(key=len, reverse=True)  # a longer secret may contain a shorter one

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: "***" if _is_secret(str(k), v) else clean(v) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v) for v in value]
        if not isinstance(value, str):
            return value
        for secret in secrets:
            value = value.replace(secret, "***")
        for pattern, replacement in patterns.items():
            value = re.sub(pattern, replacement, value)
        return value

    return clean(value)


def _is_secret(name: str, value: Any) -> bool:
    if not _SECRET_NAME.search(name) or value is None or isinstance(value, bool):
        return False
    return not (name.lower().endswith("token") and isinstance(value, (int, float)))
