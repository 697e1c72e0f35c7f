"""The spool: what happened, as JSON files under ``results/``, written whether or not a store can be reached.

One file a record, each whole or absent, each overwritten in place as its subject goes on:

    tracking/workflows/{id}.json          one invocation of the pipeline
    tracking/training/{key}.json          one training run, all its stages and restarts
    tracking/jobs/{identity}.json         one rule job; a rerun of the same job is the same file
    tracking/models/{identity}.json       one checkpoint
    tracking/evaluations/{identity}.json  the scores of one checkpoint

The first three are *runs* and share a shape: status, process, params, tags, metrics, datasets, artifacts. A
run whose process died without a word (SIGKILL) keeps saying "running" until `mark_dead` finds its process
gone.

Trade-off: a file a record costs a directory scan a sync (milliseconds for thousands), and buys that no two
processes ever write the same file and that a person can read, copy or delete a record with plain tools.
"""

from __future__ import annotations

import functools
import getpass
import json
import logging
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from spider.files import digest, read_json, sha256, write_json

log = logging.getLogger(__name__)

Record = dict[str, Any]

#: In the order they must be sent: parents before children.
RUN_KINDS = ("workflows", "training", "jobs")
KINDS = (*RUN_KINDS, "models", "evaluations")
REMEDY = "`spider track sync` sends what is missing"

#: Files up to this size are identified by content, larger ones by metadata.
HASH_LIMIT = 1 << 20
ARTIFACT_LIMIT = 10 << 20


def enabled() -> bool:
    """False under ``SPIDER_TRACKING=off``: nothing is spooled and nothing sent."""
    return os.environ.get("SPIDER_TRACKING", "").lower() != "off"


def folder_identity(results: Path) -> str:
    """What tells this results folder from any other, wherever it is moved; made here the first time.

    To be called by one process at a time (`sync` holds its lock).
    """
    path = results / "tracking" / "folder.json"
    if not path.exists():
        write_json(path, {"format": 1, "identity": secrets.token_hex(6)})
    return read_json(path)["identity"]


def folder(results: Path, kind: str) -> Path:
    return results / "tracking" / kind


def record_path(results: Path, kind: str, identity: str) -> Path:
    return folder(results, kind) / f"{identity}.json"


def write(results: Path, kind: str, record: Record) -> None:
    """Put a record in the spool, secrets removed. A full or read-only disk costs the record, not the job."""
    if not enabled():
        return
    path = record_path(results, kind, record["identity"])
    try:
        write_json(path, redact(record))
    except OSError as error:
        log.warning("%s: cannot write the tracking record (%s); this job goes untracked", path, error)


def records(results: Path) -> Iterator[tuple[str, Path]]:
    """(kind, path) of every record, parents first and oldest names first."""
    for kind in KINDS:
        for path in sorted(folder(results, kind).glob("*.json")):
            yield kind, path


# ---------------------------------------------------------------------------------------- runs and processes


def new_run(kind: str, identity: str, name: str, params: dict[str, Any]) -> Record:
    """A run that starts now in this process."""
    return {
        "format": 1,
        "kind": kind,
        "identity": identity,
        "name": name,
        "status": "running",
        "started": time.time(),
        "ended": None,
        "error": None,
        "process": _this_process(),
        "params": params,
        "tags": origin(),
        "metrics": [],
        "datasets": [],
        "artifacts": [],
    }


def origin() -> dict[str, str]:
    """Tags that say by whom, where and from which code something is made."""
    tags = {"spider.version": version("spider"), "spider.host": socket.gethostname(), "spider.user": _user()}
    if commit := git_commit():
        tags["git.commit"] = commit
    return tags


def end_run(record: Record, status: str, error: BaseException | str | None = None) -> None:
    """Set the final state; an exception becomes one line."""
    if isinstance(error, BaseException):
        lines = str(error).strip().splitlines()
        error = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    record.update(status=status, error=error, ended=time.time())


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
    }


def alive(process: dict[str, Any]) -> bool | None:
    """Whether a recorded process still runs; None for one on another host, of which nothing is known.

    A pid alone is not enough, since pids are used again: the time of creation must fit too (within the drift
    that a clock adjustment gives it).
    """
    if process["host"] != socket.gethostname():
        return None
    try:
        found = psutil.Process(process["pid"])
        return abs(found.create_time() - process["created"]) < 30 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mark_dead(results: Path, *, workflow: str | None = None) -> int:
    """Mark as killed each running record whose process is gone; returns how many still run.

    With ``workflow``, a running job of that invocation on another host counts as gone too: the invocation is
    over, so its jobs are.
    """
    running = 0
    for kind in RUN_KINDS:
        for path in folder(results, kind).glob("*.json"):
            record = _if_running(path)
            if record is None:
                continue
            lives = alive(record["process"])
            if lives or (lives is None and (workflow is None or record.get("workflow") != workflow)):
                running += bool(lives)
                continue
            # It may have ended well between our two looks; now that it is gone the file is its last word.
            record = _if_running(path)
            if record is not None:
                end_run(record, "killed", "the process ended without a word (killed, or the machine stopped)")
                write(results, kind, record)
    return running


def _if_running(path: Path) -> Record | None:
    try:
        record = read_json(path)
    except (ValueError, OSError):
        return None
    return record if isinstance(record, dict) and record.get("status") == "running" else None


def _user() -> str:
    """Name of whoever runs this, as the system or ``USER`` says; a bare number where neither does."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        return str(os.getuid())


@functools.cache
def git_commit() -> str | None:
    """Commit of the code that runs (``-dirty`` where edited); None without git or outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


# -------------------------------------------------------------------------------------------------- digests


def file_digest(path: Path) -> str | None:
    """What identifies a file or folder, in microseconds to milliseconds whatever its size; None if absent.

    ``sha256:`` of the content up to 1 MiB. Beyond, ``record:`` of the small JSON that Spider writes beside a
    large file (``000.json`` for ``000.bin``) or inside a folder (``metadata.json``, ``manifest.json``), which
    holds the content's hash. Failing that ``stat:`` of names, sizes and modification times.
    """
    described: tuple[Path, ...]
    if path.is_dir():
        described = (path / "metadata.json", path / "manifest.json")
        parts = (
            sorted(p for p in path.rglob("*") if p.is_file()) if not any(map(Path.is_file, described)) else []
        )
    elif path.is_file():
        if path.stat().st_size <= HASH_LIMIT:
            return f"sha256:{sha256(path)}"
        described = (path.with_suffix(".json"),)
        parts = [path]
    else:
        return None
    for description in described:
        if description.is_file() and description != path:
            return f"record:{sha256(description)}"
    stats = [(str(p.relative_to(path.parent)), p.stat().st_size, p.stat().st_mtime_ns) for p in parts]
    return f"stat:{digest(stats)}"


def relative(results: Path, path: Path) -> str:
    """``path`` as written in records: relative to the results where it lies there, so that they can move."""
    absolute, root = Path(path).absolute(), results.absolute()
    return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else str(absolute)


def file_list(results: Path, paths: Sequence[Path]) -> list[dict[str, Any]]:
    return [{"path": relative(results, p), "digest": file_digest(Path(p))} for p in paths]


def artifact(results: Path, path: Path) -> dict[str, Any] | None:
    """Entry of a small file to show in the store; None, and a warning, for one too large or absent."""
    path = Path(path)
    if not path.is_file():
        log.warning("%s: no such file, not logged as an artifact", path)
        return None
    if (size := path.stat().st_size) > ARTIFACT_LIMIT:
        log.warning(
            "%s: %.0f MB is over the %d MB limit of an artifact, not logged; shards and weights are recorded "
            "by path and digest (list them in outputs)",
            path, size / 1e6, ARTIFACT_LIMIT >> 20,
        )  # fmt: skip
        return None
    return {"path": relative(results, path), "sha256": sha256(path)}


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: paths become text, tuples lists, pydantic models mappings."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    return json.loads(json.dumps(value, default=str))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


# -------------------------------------------------------------------------------------------------- secrets

_SECRET_NAME = re.compile(
    r"passw|secret|credential|api_?key|access_?key|private_?key|authori[sz]ation|token$", re.I
)
_SECRET_TEXT = [
    (re.compile(r"(://)[^/\s:@]*:[^/\s@]*@"), r"\1***@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/-]{8,}=*"), r"\1 ***"),
    (re.compile(r"(?i)((?:password|passwd|secret|api_?key|token)[=:]\s*)[^\s&'\",;]+"), r"\1***"),
    (
        re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|sk-|glpat-|xox[bap]-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b"),
        "***",
    ),
]


def redact(value: Any) -> Any:
    """``value`` without secrets: by the name of a key, by the look of a text, by what the environment holds.

    ``tokens: 5000`` and ``eos_token: 258`` are numbers of the data, and stay.
    """
    held = sorted((v for k, v in os.environ.items() if _SECRET_NAME.search(k) and len(v) >= 8), key=len)
    return _redact(value, held[::-1])


def _redact(value: Any, held: list[str]) -> Any:
    if isinstance(value, dict):
        return {k: "***" if _is_secret(str(k), v) else _redact(v, held) for k, v in value.items()}
    if isinstance(value, list):
        return [_redact(v, held) for v in value]
    if not isinstance(value, str):
        return value
    for secret in held:
        value = value.replace(secret, "***")
    for pattern, instead in _SECRET_TEXT:
        value = pattern.sub(instead, value)
    return value


def _is_secret(name: str, value: Any) -> bool:
    if not _SECRET_NAME.search(name) or value is None or isinstance(value, bool):
        return False
    return not (name.lower().endswith("token") and isinstance(value, (int, float)))
