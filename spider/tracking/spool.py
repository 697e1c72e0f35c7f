"""The spool: what happened, as JSON files under ``results/``, written whether or not a store can be reached.

One file a record (`records`), each whole or absent, each overwritten in place as its subject goes on:

    tracking/workflows/{id}.json          one invocation of the pipeline
    tracking/training/{key}.json          one training run, all its stages and restarts
    tracking/jobs/{identity}.json         one rule job; a rerun of the same job is the same file
    tracking/models/{identity}.json       one checkpoint
    tracking/evaluations/{identity}.json  the scores of one checkpoint
    tracking/choices/{identity}.json      the best of a run's stages
    tracking/running/{kind}-{identity}    empty: names a run that has not ended yet

Trade-off: a file a record costs a directory scan a sync (milliseconds for thousands), and buys that no two
processes ever write the same file and that a person can read, copy or delete a record with plain tools.
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

#: Folders of the records, in the order they must be sent: parents before children.
RUN_KINDS = ("workflows", "training", "jobs")
KINDS: dict[str, type[TrackingRecord]] = {**dict.fromkeys(RUN_KINDS, Run), "models": Checkpoint}
KINDS["evaluations"] = Evaluation


def record_path(results: Path, kind: str, identity: str) -> Path:
    return results / "tracking" / kind / f"{identity}.json"


def put(path: Path, value: Any) -> None:
    """Write JSON. A full or read-only disk costs the record, not the job."""
    try:
        write_json(path, value)
    except OSError as error:
        log.warning("%s: cannot write the tracking record (%s); this job goes untracked", path, error)


def write(results: Path, record: TrackingRecord) -> None:
    """Write a record into the spool, without secrets, and keep the list of running runs up to date."""
    kind = record.kind if record.kind == "training" else f"{record.kind}s"
    path = record_path(results, kind, record.identity)
    running = isinstance(record, Run) and record.status == "running"
    if running:  # listed before it is written: a kill in between leaves no record that is not listed
        _list_as_running(results, path)
    put(path, redact(record.plain()))
    if running:  # once more: `mark_dead` may have removed the entry of the attempt before
        _list_as_running(results, path)
    elif isinstance(record, Run):
        with contextlib.suppress(OSError):  # it may never have been listed
            (_running_list(results) / _entry(path)).unlink()


def read_run(path: Path, *, if_running: bool = False) -> Run | None:
    """None where none can be read, of which `sync` says why; if so asked, also where it says it has ended."""
    try:
        plain = read_json(path)
        return None if if_running and plain["status"] != "running" else Run.parse(plain, path)
    except (ValueError, KeyError, TypeError, OSError):
        return None


def records(results: Path, kinds: Iterable[str] = KINDS) -> Iterator[tuple[str, Path]]:
    """Kind and path of every record, parents first and oldest names first."""
    for kind in kinds:
        for path in sorted((results / "tracking" / kind).glob("*.json")):
            yield kind, path


def mark_dead(results: Path, *, workflow: str | None = None) -> int:
    """Mark as killed each record that says "running" and whose process is gone; return how many still run.

    Only the records in the list of running runs are read, however many others there are. With ``workflow``, a
    running job of that invocation on another host counts as gone too: its invocation is over.
    """
    running = 0
    for path in _running(results):
        if (run := read_run(path, if_running=True)) is None:
            continue
        lives = run.process.alive()
        if lives or (lives is None and (workflow is None or run.workflow != workflow)):
            running += bool(lives)
        # It may have ended well between the two reads; its process is gone now, so this read is final.
        elif run := read_run(path, if_running=True):
            run.end("killed", "the process ended without a word (killed, or the machine stopped)")
            write(results, run)
            if read_run(path, if_running=True):  # its next attempt has begun meanwhile
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
    """Return the folder that lists the running runs, one empty file for each; make it where there is none."""
    listed = results / "tracking" / "running"
    listed.mkdir(parents=True, exist_ok=True)
    return listed


def _entry(record: Path) -> str:
    """Return the name by which a record is listed as running."""
    return f"{record.parent.name}-{record.stem}"


def _list_as_running(results: Path, record: Path) -> None:
    """List a record as running. Where the disk refuses, `put` warns of the record itself."""
    with contextlib.suppress(OSError):
        (_running_list(results) / _entry(record)).touch()
        fsync(_running_list(results))


# -------------------------------------------------------------------------------------------------- secrets

_SECRET_NAME = re.compile(
    r"passw|secret|credential|api_?key|access_?key|private_?key|authori[sz]ation|token$", re.I
)
_SECRET_TEXT = {
    r"(://)[^/\s:@]*:[^/\s@]*@": r"\1***@",
    r"(?i)\b(https?://)[^/\s@?#]+@": r"\1***@",  # a token; a database's address may name a user
    r"(?i)\b(bearer|basic)\s+[\w.~+/-]{8,}=*": r"\1 ***",
    r"(?i)((?:password|passwd|secret|api_?key|token)[=:]\s*)[^\s&'\",;]+": r"\1***",
    r"\b(?:hf_|gh[pousr]_|github_pat_|sk-|glpat-|xox[bap]-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b": "***",
}


def redact(value: Any) -> Any:
    """``value`` without secrets: by the name of a key, by the look of a text, by what the environment holds.

    ``tokens: 5000`` and ``eos_token: 258`` are numbers of the data, and stay.
    """
    held = sorted((v for k, v in os.environ.items() if _SECRET_NAME.search(k) and len(v) >= 8), key=len)

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: "***" if _is_secret(str(k), v) else clean(v) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v) for v in value]
        if not isinstance(value, str):
            return value
        for secret in reversed(held):  # the longest first: it may hold another
            value = value.replace(secret, "***")
        for pattern, instead in _SECRET_TEXT.items():
            value = re.sub(pattern, instead, value)
        return value

    return clean(value)


def _is_secret(name: str, value: Any) -> bool:
    if not _SECRET_NAME.search(name) or value is None or isinstance(value, bool):
        return False
    return not (name.lower().endswith("token") and isinstance(value, (int, float)))
