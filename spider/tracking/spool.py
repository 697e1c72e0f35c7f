"""The spool: what happened, as JSON files under ``results/``, written whether or not a store can be reached.

One file a record (`records`), each whole or absent, each overwritten in place as its subject goes on:

    tracking/workflows/{id}.json          one invocation of the pipeline
    tracking/training/{key}.json          one training run, all its stages and restarts
    tracking/jobs/{identity}.json         one rule job; a rerun of the same job is the same file
    tracking/models/{identity}.json       one checkpoint
    tracking/evaluations/{identity}.json  the scores of one checkpoint

A run whose process died without a word (SIGKILL) keeps saying "running" until `mark_dead` finds its process
gone.

Trade-off: a file a record costs a directory scan a sync (milliseconds for thousands), and buys that no two
processes ever write the same file and that a person can read, copy or delete a record with plain tools.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spider.files import read_json, write_json
from spider.tracking.records import Checkpoint, Evaluation, Record, Run

log = logging.getLogger(__name__)

REMEDY = "`spider track sync` sends what is missing"

#: Folders of the records, in the order they must be sent: parents before children.
RUN_KINDS = ("workflows", "training", "jobs")
KINDS: dict[str, type[Record]] = {
    **dict.fromkeys(RUN_KINDS, Run), "models": Checkpoint, "evaluations": Evaluation
}  # fmt: skip


def folder_identity(results: Path) -> str:
    """What tells this results folder from any other, wherever it is moved; made here the first time.

    To be called by one process at a time (`sync` holds its lock).
    """
    path = results / "tracking" / "folder.json"
    if not path.exists():
        write_json(path, {"format": 1, "identity": secrets.token_hex(6)})
    return read_json(path)["identity"]


def record_path(results: Path, kind: str, identity: str) -> Path:
    return results / "tracking" / kind / f"{identity}.json"


def path_of(results: Path, record: Record) -> Path:
    kind = record.kind if record.kind == "training" else f"{record.kind}s"
    return record_path(results, kind, record.identity)


def write(results: Path, record: Record) -> None:
    """Put a record in the spool, secrets removed. A full or read-only disk costs the record, not the job."""
    path = path_of(results, record)
    try:
        write_json(path, redact(record.plain()))
    except OSError as error:
        log.warning("%s: cannot write the tracking record (%s); this job goes untracked", path, error)


def before(results: Path, record: Run) -> Run | None:
    """What an earlier process wrote of the same; None where nothing can be read."""
    try:
        return Run.read(path_of(results, record))
    except (ValueError, OSError):
        return None


def records(results: Path, kinds: Iterable[str] = KINDS) -> Iterator[tuple[str, Path]]:
    """Kind and path of every record, parents first and oldest names first."""
    for kind in kinds:
        for path in sorted((results / "tracking" / kind).glob("*.json")):
            yield kind, path


def mark_dead(results: Path, *, workflow: str | None = None) -> int:
    """Mark as killed each running record whose process is gone; returns how many still run.

    With ``workflow``, a running job of that invocation on another host counts as gone too: the invocation is
    over, so its jobs are.
    """
    running = 0
    for _, path in records(results, RUN_KINDS):
        if (run := _if_running(path)) is None:
            continue
        lives = run.process.alive()
        if lives or (lives is None and (workflow is None or run.workflow != workflow)):
            running += bool(lives)
        # It may have ended well between our two looks; now that it is gone the file is its last word.
        elif run := _if_running(path):
            run.end("killed", "the process ended without a word (killed, or the machine stopped)")
            write(results, run)
    return running


def _if_running(path: Path) -> Run | None:
    try:
        plain = read_json(path)
        return Run.parse(plain, path) if plain["status"] == "running" else None
    except (ValueError, KeyError, TypeError, OSError):
        return None  # gone, or none of ours, which `sync` says


# -------------------------------------------------------------------------------------------------- secrets

_SECRET_NAME = re.compile(
    r"passw|secret|credential|api_?key|access_?key|private_?key|authori[sz]ation|token$", re.I
)
_SECRET_TEXT = {
    r"(://)[^/\s:@]*:[^/\s@]*@": r"\1***@",
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
