"""Records: the shapes of what is written down, each a small JSON file that is read back in one way.

A *run* is what starts, goes on and ends: an invocation of the workflow, a training, a job. It is changed by
the process that it is about and by no other, until that is gone. A checkpoint and its scores are said once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field

from spider.evaluation.result import Row
from spider.files import digest, read_json, sha256
from spider.record import Record
from spider.version import VERSION

log = logging.getLogger(__name__)

HASH_LIMIT = 1 << 20  # bytes up to which hashing a file takes no time worth saving
ARTIFACT_LIMIT = 10 << 20

Status = Literal["running", "finished", "failed", "killed"]


class RefusedError(ValueError):
    """A record that cannot be sent; the others can."""

    error_code = "BAD_REQUEST"  # where MLflow's own have it


class Metric(BaseModel, frozen=True):
    key: str
    value: float
    step: int
    time: float  # seconds since the epoch


class Dataset(BaseModel, frozen=True):
    name: str
    digest: str
    source: str
    context: str


class File(BaseModel, frozen=True):
    """A file that a job read or made. Its path is relative to the results folder where it lies there."""

    path: str
    digest: str | None
    """As `file_digest` has it; None: there is no such file. ``size:`` where a later job is to hash it."""


class Shown(BaseModel, frozen=True):
    """A small file that the store gets a copy of."""

    path: str
    sha256: str


class Process(BaseModel, frozen=True):
    """This one, unless said otherwise."""

    host: str = Field(default_factory=socket.gethostname)
    pid: int = Field(default_factory=os.getpid)
    created: float = Field(default_factory=lambda: psutil.Process().create_time())

    def alive(self) -> bool | None:
        """Whether it still runs; None for one on another host, of which nothing is known.

        Pids are used again: the time of creation must fit too, within the drift of an adjusted clock.
        """
        if self.host != socket.gethostname():
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 30
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False


def origin() -> dict[str, str]:
    """Tags that say by whom, where and from which code something is made."""
    # In a container without an entry for this user, its number.
    user = os.environ.get("LOGNAME") or os.environ.get("USER") or psutil.Process().username()
    tags = {"spider.version": VERSION, "spider.host": socket.gethostname(), "spider.user": user}
    return tags | ({"git.commit": commit} if (commit := git_commit()) else {})


@functools.cache
def git_commit() -> str | None:
    """Commit of the code that runs (``-dirty`` where edited); None without git or outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def file_digest(path: Path) -> str | None:
    """Return what identifies a file or folder by its content; None if it is absent.

    A file is identified by ``sha256:`` and its hash. A folder is identified by ``record:`` and the hash of
    the small JSON in it that holds its files' hashes, or else by ``files:`` and a digest of names and hashes.
    """
    if not path.exists():
        return None
    if not path.is_dir():
        return f"sha256:{_hash_noted_beside(path) or sha256(path)}"
    for name in ("metadata.json", "manifest.json", "config.json"):
        description = path / name
        if description.is_file() and b'"sha256"' in description.read_bytes():
            return f"record:{sha256(description)}"
    files = sorted(filter(Path.is_file, path.rglob("*")))
    return f"files:{digest([(str(file.relative_to(path)), sha256(file)) for file in files])}"


def _hash_noted_beside(path: Path) -> str | None:
    """Return the hash of a large file that was written into the JSON beside it when the file was made.

    It saves reading a downloaded file once more. It holds for a file of the noted size that was not changed
    since then.
    """
    beside, file = path.with_suffix(".json"), path.stat()
    if file.st_size <= HASH_LIMIT or beside == path or not beside.is_file():
        return None
    with contextlib.suppress(ValueError):
        noted = read_json(beside)
        newer = beside.stat().st_mtime_ns >= file.st_mtime_ns
        if newer and isinstance(noted, dict) and noted.get("bytes") == file.st_size and "sha256" in noted:
            return str(noted["sha256"])
    return None


def size_for_now(path: Path) -> str | None:
    """Return ``size:`` and the size of a large file that a later job hashes; a small one's `file_digest`."""
    if path.is_file() and (size := path.stat().st_size) > HASH_LIMIT:
        return f"size:{size}"
    return file_digest(path)


def relative(results: Path, path: Path) -> str:
    """``path`` as written in records: relative to the results where it lies there, so that they can move."""
    absolute, root = path.absolute(), results.absolute()
    return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else str(absolute)


def file_list(
    results: Path, paths: Sequence[Path], identify: Callable[[Path], str | None] = file_digest
) -> list[File]:
    """Return the paths as records name them, each with what identifies its content."""
    return [File(path=relative(results, path), digest=identify(path)) for path in paths]


def shown(results: Path, paths: Sequence[Path]) -> list[Shown]:
    """Small files to show in the store; of those too large or absent a warning."""
    entries = []
    for path in paths:
        if not path.is_file():
            log.warning("%s: no such file, not logged as an artifact", path)
        elif (size := path.stat().st_size) > ARTIFACT_LIMIT:
            log.warning(
                "%s: %.0f MB is over the %d MB limit of an artifact, not logged; shards and weights are "
                "recorded by path and digest (list them in outputs)", path, size / 1e6, ARTIFACT_LIMIT >> 20
            )  # fmt: skip
        else:
            entries.append(Shown(path=relative(results, path), sha256=sha256(path)))
    return entries


class TrackingRecord(Record):
    WHAT = "a tracking record"
    REMEDY = "move it away"
    ERROR = RefusedError

    format: int = 1
    kind: str
    identity: str


class Run(TrackingRecord):
    """What starts now, in this process, and ends; and what it may say about itself in between."""

    model_config = ConfigDict(frozen=False)

    kind: Literal["workflow", "training", "job"]
    name: str
    status: Status = "running"
    started: float = Field(default_factory=time.time)
    ended: float | None = None
    error: str | None = None
    process: Process = Field(default_factory=Process)
    params: dict[str, Any] = {}
    tags: dict[str, str] = Field(default_factory=origin)
    metrics: list[Metric] = []
    datasets: list[Dataset] = []
    artifacts: list[Shown] = []
    workflow: str | None = None  # of a job: the invocation it belongs to
    command: str | None = None  # of a job: its command line, from the name of the command on
    inputs: list[File] = []
    outputs: list[File] = []
    attempt: int = 0
    spent: float = 0.0  # seconds that the attempts so far took
    config: dict[str, Any] | None = None  # of an invocation of the workflow
    _results: Path = Path()

    def metric(self, key: str, value: float, step: int | None = None, at: float | None = None) -> None:
        """Log a number (``bytes``, ``bpb``, ...); its step is the attempt's where none is given."""
        step, at = self.attempt if step is None else step, time.time() if at is None else at
        self.metrics.append(Metric(key=key, value=value, step=step, time=at))

    def tag(self, key: str, value: object) -> None:
        self.tags[key] = str(value)

    def artifact(self, path: Path) -> None:
        """Show a small file (JSON, a plot, a sample). One over 10 MiB is refused with a warning."""
        self.artifacts += shown(self._results, [path])

    def dataset(self, name: str, digest: str, source: str, *, context: str = "input") -> None:
        """Name a dataset that was read, once; ``source`` says where from (path, or repo@revision)."""
        use = Dataset(name=name, digest=digest, source=source, context=context)
        self.datasets += [] if use in self.datasets else [use]

    def end(self, status: Status, error: str | None = None) -> None:
        self.status, self.error, self.ended = status, error, time.time()


class Checkpoint(TrackingRecord):
    """The last checkpoint of a stage: a model in the store, without its weights."""

    kind: Literal["model"] = "model"
    name: str
    training: str  # identity of its training run
    step: int
    params: dict[str, Any]
    tags: dict[str, str] = Field(default_factory=origin)


class Evaluation(TrackingRecord):
    """Scores of one checkpoint."""

    kind: Literal["evaluation"] = "evaluation"
    model: str | None = None  # identity of the checkpoint, where this record has one of its own
    training: str
    stage: str
    step: int
    time: float
    metrics: dict[str, float]
    rows: list[Row] = []
    dataset: tuple[str, str, str] | None = None  # name, digest, source
    curves: dict[str, list[tuple[int, float]]] = {}
    artifacts: list[Shown] = []


class Choice(TrackingRecord):
    """The best of a run's stages, by comparison: those scored on one text, none of which a tokenizer left."""

    kind: Literal["choice"] = "choice"
    run: str
    stage: str
    weights: str  # digest of what was scored
    bpb: float
    text_sha256: str

    def means(self, stage: str, weights: str) -> bool:
        return (stage, weights) == (self.stage, self.weights)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return ``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    if not isinstance(value, dict):
        return {prefix: value}
    below = (flatten(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items())
    return {key: leaf for part in below for key, leaf in part.items()}
