"""Records of the jobs of the workflow: ``made/{path of its first output}.json``, one file for each job.

The process that runs the workflow writes them (`spider.provenance.recorder`). A record has what the output
that lies there was made from, which decides whether the job runs again, and each run of the job: what it
read and wrote, by path and digest, and how it ended. So a chain of jobs leads from a score to the raw files
(`spider.provenance.lineage`). All of this is declared in the rule, and no command repeats it.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shlex
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, Field

from spider.common.files import digest, sha256
from spider.common.record import Record

#: Flag of an input of Snakemake that stands for a file of the user, whose name Snakemake cannot take.
STANDS_FOR = "spider_stands_for"

#: Name of the file that Snakemake writes into a folder that is the output of a rule.
TIMESTAMP = ".snakemake_timestamp"

#: Size of a file in bytes, and its time in nanoseconds.
Stat = tuple[int, int]
Status = Literal["running", "finished", "failed", "killed"]


class File(BaseModel, frozen=True):
    """An input or output of a job. A path in the results folder is relative to it."""

    path: str
    digest: str | None = None
    """`file_digest` of the file with this size and time; None until it is hashed."""
    stat: Stat | None = None
    """None if the file did not exist."""


class Job(BaseModel, frozen=True):
    """One run of a job."""

    rule: str
    wildcards: dict[str, str] = {}
    workflow: str
    """Identity of the invocation of the workflow."""
    params: dict[str, Any] = {}
    inputs: list[File] = []
    outputs: list[File] = []
    command: str = ""
    """The command line, from the name of the command on."""
    snapshot: str | None = None
    """Name of the copy of the configuration in ``configs``."""
    log: str | None = None
    benchmark: str | None = None
    threads: int = 1
    resources: dict[str, Any] = {}
    reason: str = ""
    """Why Snakemake ran it."""
    started: float
    ended: float | None = None
    status: Status = "running"
    error: str | None = None
    commit: str | None = None
    code: str | None = None
    """Name of the record of the code that it imported, in ``code``."""
    processor: str | None = None
    cpu_seconds: float | None = None
    """Processor seconds of its processes, if it is no training of several."""
    peak_rss_mb: float | None = None
    """The most memory that one of them held, in units of 2^20 bytes."""

    @property
    def of(self) -> str:
        """Return the values of the wildcards, such as ``demo/000``."""
        return "/".join(value.strip("/") for value in self.wildcards.values() if value)

    @property
    def name(self) -> str:
        return f"{self.rule} {self.of}".strip()


class Made(Record):
    """The record of a job."""

    WHAT = "a record of what an output was made from"
    REMEDY = "delete it; its output then counts as made from the settings and files of now"

    format: int = 1
    params: list[str] | None = None
    """The params that the output was made with, as Python writes them. None if it was never made."""
    inputs: list[str] = Field(default_factory=list)
    """The inputs that it was made from. Those in the results folder are relative to it, so it can move."""
    own: dict[str, Stat] = Field(default_factory=dict)
    """The user's own files among them."""
    jobs: list[Job] = Field(default_factory=list)
    """All runs of the job, the newest last."""

    def with_job(self, number: int, **changes: Any) -> Made:
        """Return a copy with changes of one of the jobs."""
        jobs = [*self.jobs]
        jobs[number] = jobs[number].model_copy(update=changes)
        return self.model_copy(update={"jobs": jobs})


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


class Workflow(Record):
    """``workflows/{identity}.json``: an invocation of the workflow that ran a job."""

    WHAT = "a record of an invocation of the workflow"
    REMEDY = "delete this record"

    format: int = 1
    identity: str
    started: float
    ended: float | None = None
    status: Status = "running"
    process: Process
    config: dict[str, Any]
    user: str
    version: str
    commit: str | None
    patch: str | None = None
    """Name of the file in ``code`` with the changes that were not committed."""
    packages: dict[str, str]
    """The version of Python and of each installed package."""

    @property
    def lives(self) -> bool:
        """Return whether its process may still write records. One on another host is believed to."""
        return self.status == "running" and self.process.alive() is not False


def workflows(root: Path) -> dict[str, Workflow]:
    """Return the invocations of a results folder by identity, the oldest first."""
    found = (Workflow.read(path) for path in sorted((root / "workflows").glob("*.json")))
    return {one.identity: one for one in found}


def records(root: Path) -> Iterator[Path]:
    """Yield the paths of the records of all jobs of a results folder."""
    for folder, _, names in os.walk(root / "made"):
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".json") and name[0] != ".")


def read_all(root: Path) -> dict[Path, Made]:
    """Return all records of a results folder by their paths; `ValueError` for a damaged one."""
    return {path: Made.read(path) for path in records(root)}


def jobs(root: Path) -> list[Job]:
    """Return all runs of all jobs of a results folder, the oldest first; `ValueError` for a damaged one."""
    found = [job for made in read_all(root).values() for job in made.jobs]
    return sorted(found, key=lambda job: job.started)


def made_path(root: Path, output: str) -> Path:
    """Return the path of the record of an output, whose path is relative to the results folder."""
    return root / "made" / f"{output}.json"


#: Columns of Snakemake's benchmark files that are read. A megabyte of its has 2^20 bytes.
_MEASURED = ("s", "cpu_time", "max_rss", "io_in", "io_out")


def attempts(benchmark: Path) -> list[dict[str, float]]:
    """Return what Snakemake measured of each attempt at a job, without the values that it wrote as NA."""
    with open(benchmark, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    try:
        known = [
            {name: float(row[name]) for name in _MEASURED if row.get(name) not in (None, "NA", "-", "")}
            for row in rows
        ]
    except ValueError:
        known = [{}]
    if not all("s" in row for row in known):
        raise ValueError(f"{benchmark}: not a Snakemake benchmark file (no seconds in column s)")
    return known


def usage(root: Path, job: Job) -> dict[str, float]:
    """Return what the newest attempt at a job took, by Snakemake's names; nothing if that is unknown.

    Snakemake looks at the processes of a job every half second, and from 15 seconds on every 30. So it knows
    nothing of the time since the last look. The figures that the job itself notes at its end come first.
    """
    path = root / job.benchmark if job.benchmark else None
    rows = attempts(path) if path and path.exists() else []
    row = rows[-1] if rows else {}
    if job.cpu_seconds is not None:
        row["cpu_time"] = job.cpu_seconds
    if job.peak_rss_mb is not None:
        row["max_rss"] = max(job.peak_rss_mb, row.get("max_rss", 0.0))
    return row


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return ``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    if not isinstance(value, dict):
        return {prefix: value}
    below = (flatten(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items())
    return {key: leaf for part in below for key, leaf in part.items()}


# ----------------------------------------------------------------------------------------------------- files


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


def stat_of(path: str | Path) -> Stat | None:
    """Return the size and the time of a file; None if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def file_at(results: Path, path: str | Path) -> File:
    """Return a file for a record, without its digest."""
    return File(path=relative(results, Path(path)), stat=stat_of(path))


def stats(files: Iterable[str]) -> dict[str, Stat]:
    """Return the size and the time of each file that exists."""
    return {file: found for file in files if (found := stat_of(file))}


def real(file: Any) -> str:
    """Return the path of an input of Snakemake, or of the file that it stands for."""
    return str(getattr(file, "flags", {}).get(STANDS_FOR) or file)


def in_future(files: Iterable[str]) -> list[str]:
    """Return a line for each file whose time is more than a minute ahead of this machine's clock.

    Snakemake refuses an output that is older than an input, after the job that made it.
    """
    times = {file: time_ns / 1e9 for file, (_, time_ns) in stats(files).items()}
    return [
        f"{file}: its time ({time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}) is in the future, so "
        f"each job that reads it would fail; `touch {shlex.quote(file)}` sets it to now"
        for file, at in times.items()
        if at > time.time() + 60
    ]


def edited(made: Made, now: Mapping[str, Stat]) -> list[str]:
    """Return the user's own files whose content differs from what the job of an output has read.

    Without a digest in the record of the job, another time counts as another content.
    """
    newest = next((job for job in reversed(made.jobs) if job.status == "finished"), None)

    def differs(name: str, stat: Stat) -> bool:
        if name not in made.own or made.own[name][0] != stat[0]:
            return True
        # The folder of the project may have moved, with the file in it.
        of = [one for one in (newest.inputs if newest else []) if one.path.endswith(f"/{name.lstrip('/')}")]
        return file_digest(Path(name)) not in {one.digest for one in of if one.digest}

    return [name for name, stat in now.items() if stat != made.own.get(name) and differs(name, stat)]


def edited_since(root: Path, dataset: str) -> list[str]:
    """Return the user's own files that were edited since a dataset was encoded from them."""
    found: list[str] = []
    for path in sorted((root / "made/shards" / dataset).glob("*/*.json")):
        for name in Made.read(path).inputs:
            if (raw := made_path(root, name)).exists():
                made = Made.read(raw)
                found += edited(made, stats(made.own))
    return found
