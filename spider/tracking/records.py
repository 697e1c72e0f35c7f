"""The records of the spool: small JSON files.

A *run* starts, continues and ends: an invocation of the workflow, a training or a job. Only its own process
changes its record, until that process has ended. A checkpoint and its scores are recorded once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field

from spider.evaluation.result import Row
from spider.files import digest, sha256
from spider.record import Record
from spider.version import VERSION

log = logging.getLogger(__name__)

#: Size of the largest file that is uploaded as an artifact, in bytes.
ARTIFACT_LIMIT = 10 << 20

#: Name of the file that Snakemake writes into a folder that is the output of a rule.
TIMESTAMP = ".snakemake_timestamp"

Status = Literal["running", "finished", "failed", "killed"]


class RefusedError(ValueError):
    """A record that cannot be sent. The other records can."""

    error_code = "BAD_REQUEST"  # errors of MLflow have this attribute too


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
    """An input or output file of a job. A path in the results folder is relative to it."""

    path: str
    digest: str | None
    """`file_digest` of the file; None if it does not exist."""


class Process(BaseModel, frozen=True):
    """A process, by default the current one."""

    host: str = Field(default_factory=socket.gethostname)
    pid: int = Field(default_factory=os.getpid)
    created: float = Field(default_factory=lambda: psutil.Process().create_time())

    def alive(self) -> bool | None:
        """Return whether the process still runs, or None for a process on another host.

        Process ids are reused. So the time of creation must match too, within the drift of an adjusted clock.
        """
        if self.host != socket.gethostname():
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 30
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False


def origin() -> dict[str, str]:
    """Return tags with the user, the host, the version and the commit."""
    # In a container without an entry for this user, this is the number of the user.
    user = os.environ.get("LOGNAME") or os.environ.get("USER") or psutil.Process().username()
    tags = {"spider.version": VERSION, "spider.host": socket.gethostname(), "spider.user": user}
    return tags | ({"git.commit": commit} if (commit := git_commit()) else {})


@functools.cache
def git_commit() -> str | None:
    """Return the commit of the running code, with ``-dirty`` after edits; None outside of a git checkout."""
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
    `TIMESTAMP` is left out, because Snakemake writes it into a folder after the job that made the folder.
    """
    if not path.exists():
        return None
    if not path.is_dir():
        return f"sha256:{sha256(path)}"
    for name in ("metadata.json", "manifest.json", "config.json"):
        description = path / name
        if description.is_file() and b'"sha256"' in description.read_bytes():
            return f"record:{sha256(description)}"
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != TIMESTAMP)
    return f"files:{digest([(str(file.relative_to(path)), sha256(file)) for file in files])}"


def relative(results: Path, path: Path) -> str:
    """Return a path for a record: a path in the results folder is relative, so that the folder can move."""
    absolute, root = path.absolute(), results.absolute()
    return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else str(absolute)


def file_list(results: Path, paths: Iterable[Path]) -> list[File]:
    """Return the paths for a record, each with its `file_digest`."""
    return [File(path=relative(results, path), digest=file_digest(path)) for path in paths]


def artifacts(results: Path, paths: Iterable[Path]) -> list[File]:
    """Return the small files to upload; log a warning for each one that is too large or missing."""
    small = []
    for path in paths:
        if not path.is_file():
            log.warning("%s: no such file, not logged as an artifact", path)
        elif (size := path.stat().st_size) > ARTIFACT_LIMIT:
            log.warning(
                "%s: %.0f MB is over the %d MB limit of an artifact, not logged; shards and weights are "
                "recorded by path and digest (list them in outputs)", path, size / 1e6, ARTIFACT_LIMIT >> 20
            )  # fmt: skip
        else:
            small.append(path)
    return file_list(results, small)


class TrackingRecord(Record):
    """Base class of the records of the spool."""

    WHAT = "a tracking record"
    REMEDY = "move it away"
    ERROR = RefusedError

    format: int = 1
    kind: str
    identity: str


class Run(TrackingRecord):
    """An invocation of the workflow, a training or a job, from its start in this process to its end."""

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
    artifacts: list[File] = []
    workflow: str | None = None
    """Identity of the invocation that a job belongs to."""
    command: str | None = None
    """Command line of a job, from the name of the command on."""
    inputs: list[File] = []
    outputs: list[File] = []
    attempt: int = 0
    spent: float = 0.0
    """Seconds of all attempts so far."""
    config: dict[str, Any] | None = None
    """Configuration of an invocation of the workflow."""
    _results: Path = Path()

    def metric(self, key: str, value: float, step: int | None = None, at: float | None = None) -> None:
        """Log a number (``bytes``, ``bpb``, ...); the default step is the number of the attempt."""
        step = self.attempt if step is None else step
        at = time.time() if at is None else at
        self.metrics.append(Metric(key=key, value=value, step=step, time=at))

    def tag(self, key: str, value: object) -> None:
        self.tags[key] = str(value)

    def artifact(self, path: Path) -> None:
        """Upload a small file (JSON, a plot, a sample). A file over 10 MiB is left out with a warning."""
        self.artifacts += artifacts(self._results, [path])

    def dataset(self, name: str, digest: str, source: str, *, context: str = "input") -> None:
        """Record a dataset that was read; ``source`` is a path, or repo@revision."""
        use = Dataset(name=name, digest=digest, source=source, context=context)
        self.datasets += [] if use in self.datasets else [use]

    def end(self, status: Status, error: str | None = None) -> None:
        """Set the status, the error and the time of the end."""
        self.status = status
        self.error = error
        self.ended = time.time()


class Checkpoint(TrackingRecord):
    """A checkpoint of a stage, which becomes a model in the store without its weights."""

    kind: Literal["model"] = "model"
    name: str
    training: str
    """Identity of its training run."""
    step: int
    final: bool = True
    """Whether the stage ended with it. Only then it becomes a version of the registered model of its run."""
    params: dict[str, Any]
    tags: dict[str, str] = Field(default_factory=origin)


class Evaluation(TrackingRecord):
    """The scores of a checkpoint."""

    kind: Literal["evaluation"] = "evaluation"
    model: str
    """Identity of the checkpoint."""
    training: str
    stage: str
    """Folder in the folder of the run, such as ``main`` or ``main/compressed``."""
    step: int
    time: float
    metrics: dict[str, float]
    costs: dict[str, float] = {}
    """Parameters, and the bytes and seconds of training up to this stage."""
    rows: list[Row] = []
    dataset: tuple[str, str, str] | None = None
    """Name, digest and source of the text."""
    curves: dict[str, list[tuple[int, float]]] = {}
    artifacts: list[File] = []


class Choice(TrackingRecord):
    """The best stage of a run, by comparison of the scores on the same text."""

    kind: Literal["choice"] = "choice"
    run: str
    stage: str
    weights: str
    """Digest of the weights that were scored."""


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return ``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    if not isinstance(value, dict):
        return {prefix: value}
    below = (flatten(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items())
    return {key: leaf for part in below for key, leaf in part.items()}
