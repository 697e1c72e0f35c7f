"""Write the records of jobs while Snakemake runs them, and answer Snakemake from these records.

Snakemake keeps its own records in ``.snakemake``, where it was started. They are lost with that folder,
another checkout does not have them, and the user's own files are compared by time only. So the workflow asks
the records in the results folder first. An own file is compared by its size and time, and by its digest if
these differ.

Files are hashed in a thread, so no job waits. A digest that the results hold already is taken from there, and
large files come last, when the dataset that they belong to has their digests. What a killed process has left
out is filled in by the next one (`incomplete`).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
from pydantic_core import to_jsonable_python
from snakemake_interface_logger_plugins.common import LogEvent

from spider.common import VERSION
from spider.common.files import digest, read_json, write_text
from spider.common.formatting import redact
from spider.common.record import Record
from spider.provenance.codefiles import git_commit, packages, patch, read_note
from spider.provenance.made import (
    File,
    Job,
    Made,
    Process,
    Stat,
    Status,
    Workflow,
    edited,
    file_at,
    file_digest,
    made_path,
    read_all,
    real,
    relative,
    stat_of,
    stats,
    workflows,
)

log = logging.getLogger(__name__)

#: Bytes from which on a file is hashed last.
LARGE = 100_000_000
#: Seconds in which the note of a job on another machine (`spider.provenance.codefiles.note`) may appear here.
LATENCY = 30.0
_ERROR = re.compile(r"(?<!\w)error: (.*)")


class Turn(IntEnum):
    """When the thread does a task, those of a lower number first."""

    JOB = 0
    """A job of this workflow has begun or ended."""
    LATE = 1
    """What an earlier workflow left out, and notes that appear here with a delay."""
    LARGE = 2
    """Large files, whose digests a later job may write."""
    END = 3


class Recorder(logging.Handler):
    """The records of a results folder, which answer Snakemake's questions instead of its own.

    Snakemake documents no interface for this. Its object for records (``workflow.persistence``) has the
    methods that `METHODS` names, and those of this class take their place. Jobs of another workflow around a
    module, and outputs without a record here, are left to Snakemake. Errors come from Snakemake's logger.

    Args:
        persistence: Snakemake's object for records.
        write: False in a dry run.
        elsewhere: Whether jobs run on other machines, whose files appear here with a delay.
        config: The configuration; an invocation keeps a copy without secrets.
        snapshot: Name of the copy of the configuration that the jobs read.
        on_begin, on_end: Called before the first job, and when all is recorded.
    """

    METHODS = (
        "has_metadata",
        "has_outdated_metadata",
        "params_changed",
        "input_changed",
        "started",
        "finished",
        "cleanup",
    )

    def __init__(
        self,
        root: Path,
        persistence: Any,
        *,
        write: bool,
        elsewhere: bool,
        config: Any,
        snapshot: str,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__()
        self.root = root
        self.write, self.elsewhere = write, elsewhere
        self.config, self.snapshot = config, snapshot
        self.on_begin, self.on_end = on_begin, on_end
        self.workflow: Workflow | None = None
        self._before = {name: getattr(persistence, name) for name in self.METHODS}
        self._known: dict[Path, Made | None] = {}
        self._begun: dict[Path, Made] = {}
        self._errors: dict[int, str] = {}
        self._lock = threading.RLock()  # of the records
        self._tasks: queue.PriorityQueue[tuple[Turn, int, Callable[[], None]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        for name in self.METHODS:
            setattr(persistence, name, getattr(self, name))

    # ------------------------------------------------------------------------------- questions of Snakemake

    def has_metadata(self, job: Any) -> bool:
        """Return whether there is a record. An output without one is taken as it is, and gets a record."""
        known = self._record(job) is not None or self._before["has_metadata"](job)
        if not known:
            self._adopt(job)
        return known

    def has_outdated_metadata(self, job: Any) -> bool:
        return self._record(job) is None and self._before["has_outdated_metadata"](job)

    def params_changed(self, job: Any, file: str | None = None) -> Any:
        """Return the params that differ, in Snakemake's class for them."""
        made = self._record(job)
        if made is None:
            return self._before["params_changed"](job, file=file)
        from snakemake.persistence import ParamsChange

        old, new = set(made.params or ()), set(self._params(job))
        return ParamsChange(only_old=old - new, only_new=new - old, files=set(job.output))

    def input_changed(self, job: Any, file: str | None = None) -> Any:
        """Return the outputs if the job has other inputs by now, or other content in the user's own files."""
        path, made = self._path(job), self._record(job)
        if path is None or made is None:
            changed = self._before["input_changed"](job, file=file)
            if file is None:
                changed = list(changed)
                if not changed and not self._before["params_changed"](job):
                    self._adopt(job)
            return changed
        now = self._now(job)
        differs = now.inputs != made.inputs or bool(edited(made, now.own))
        if not differs and now.own != made.own and self.write:
            self._save(path, made.model_copy(update={"own": now.own}))  # spares the digests next time
        return differs if file is not None else list(job.output) * differs

    # ------------------------------------------------------------------------------------ events of Snakemake

    def started(self, job: Any, *arguments: Any, **options: Any) -> None:
        """Record a run of a job, with the user's own files as they are before it reads them."""
        if (path := self._path(job)) and self.write:
            if self.workflow is None:
                self._begin()
            self._begun[path] = self._now(job)
            made = self._read(path) or Made()
            number = len(made.jobs)
            self._save(path, made.model_copy(update={"jobs": [*made.jobs, self._run(job)]}))
            self._later(Turn.JOB, lambda: self._fill(path, number))
        self._before["started"](job, *arguments, **options)

    def emit(self, record: logging.LogRecord) -> None:
        """Remember the job of an error. Snakemake says nothing of it to `finished`, which it calls next."""
        if getattr(record, "event", None) == LogEvent.JOB_ERROR:
            self._errors.setdefault(vars(record)["jobid"], "it failed without a message in its log")

    def cleanup(self, job: Any) -> None:
        """Remember a job whose outputs are missing or older than its inputs."""
        self._errors[job.jobid] = "an output is missing, or older than an input"
        self._before["cleanup"](job)

    async def finished(self, job: Any) -> None:
        """Record what a job has made its outputs from, or why it failed.

        Snakemake calls this for failed jobs too, and would record the new settings. If files of earlier
        settings depend on the lost output, the next invocation would have nothing to do.
        """
        error = self._errors.pop(job.jobid, None)
        whole = all([await file.exists() for file in job.output])
        if path := self._path(job):
            with self._lock:
                made = self._read(path) or Made()
                if whole and error is None:
                    now = self._begun.pop(path, None) or self._now(job)
                    made = now.model_copy(update={"jobs": made.jobs})
                if made.jobs and made.jobs[-1].status == "running":
                    made = made.with_job(-1, ended=time.time(), **self._end(job, made.jobs[-1], error))
                    number = len(made.jobs) - 1
                    self._later(Turn.JOB, lambda: self._fill(path, number))
                self._save(path, made)
        if whole:
            await self._before["finished"](job)

    def _end(self, job: Any, run: Job, error: str | None) -> dict[str, Any]:
        """Return how a run of a job ended."""
        if error is None:
            return {"status": "finished", "outputs": [file_at(self.root, file) for file in job.output]}
        return {"status": "failed", "error": (_reason(self.root / run.log) if run.log else None) or error}

    def _begin(self) -> None:
        """Record this invocation, before its first job."""
        identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        changes = redact(patch(), settings=False)
        if changes:
            with contextlib.suppress(OSError):
                write_text(self.root / "code" / f"{digest(changes)}.patch", changes)
        self.workflow = Workflow(
            identity=identity,
            started=time.time(),
            process=Process(),
            config=redact(to_jsonable_python(self.config)),
            # In a container without an entry for this user, this is the number of the user.
            user=os.environ.get("LOGNAME") or os.environ.get("USER") or psutil.Process().username(),
            version=VERSION,
            commit=git_commit(),
            patch=digest(changes) if changes else None,
            packages=packages(),
        )
        self._write(self.root / "workflows" / f"{identity}.json", self.workflow)
        logging.getLogger("snakemake.logging").addHandler(self)
        threading.Thread(target=self._work, name="records", daemon=True).start()
        atexit.register(self.close)
        self.on_begin()

    def close(self, status: Status | None = None) -> None:
        """Wait until all is written, and close the invocation; without a status, by how its jobs ended."""
        if self.workflow is not None and self.workflow.status == "running":
            written = threading.Event()
            self._later(Turn.END, written.set)
            written.wait()
            own = [
                (path, made)
                for path, made in self._known.items()
                if made and made.jobs and made.jobs[-1].workflow == self.workflow.identity
            ]
            ends = {made.jobs[-1].status for _, made in own}
            for path, made in own:
                if made.jobs[-1].status == "running":
                    self._save(path, made.with_job(-1, **_KILLED, ended=time.time()))
            by_jobs: Status = "killed" if "running" in ends else "failed" if "failed" in ends else "finished"
            ended = {"status": status or by_jobs, "ended": time.time()}
            self.workflow = self.workflow.model_copy(update=ended)
            self._write(self.root / "workflows" / f"{self.workflow.identity}.json", self.workflow)
            self.on_end()
        super().close()

    # ----------------------------------------------------------------------------------------- in the thread

    def _later(self, turn: Turn, task: Callable[[], None]) -> None:
        self._tasks.put((turn, next(self._numbers), task))

    def _work(self) -> None:
        while True:
            *_, task = self._tasks.get()
            try:
                task()
            except Exception:  # a bug here must not stop the workflow
                log.exception("a record of a job is not complete")

    @cached_property
    def _hashes(self) -> Hashes:
        """The digests in all records. They are read once, which also shows what is incomplete."""
        known = read_all(self.root)
        self._later(Turn.LATE, lambda: self._complete(known))
        return Hashes(self.root, known.values())

    def _complete(self, known: Mapping[Path, Made]) -> None:
        """Fill in what killed workflows have left out, where this one has recorded nothing since."""
        for path, made in incomplete(self.root, known, self._hashes):
            with self._lock:
                now = self._read(path)
                if now and now.jobs == known[path].jobs:
                    self._save(path, now.model_copy(update={"jobs": made.jobs}))

    def _fill(self, path: Path, number: int, *, large: bool = False) -> None:
        """Add to a run of a job what takes time: digests, and what the job has noted."""
        job = self._job(path, number)
        update: dict[str, Any] = self._hashes.of(job, large=large)
        if job.ended and job.log and job.code is None:
            noted = read_note(self.root / job.log, job.started)
            update |= noted or {}
            if noted is None and self.elsewhere and time.time() - job.ended < LATENCY:
                time.sleep(0.1)
                self._later(Turn.LATE, lambda: self._fill(path, number))
        with self._lock:
            made = self._known[path]
            assert made is not None
            changed = made.with_job(number, **update)
            # A run that has ended in the meantime has its own call.
            if self._job(path, number).ended == job.ended and changed != made:
                self._save(path, changed)
        if (
            job.ended
            and not large
            and any(one.stat and not one.digest for one in changed.jobs[number].outputs)
        ):
            self._later(Turn.LARGE, lambda: self._fill(path, number, large=True))

    def _job(self, path: Path, number: int) -> Job:
        with self._lock:
            made = self._known[path]
        assert made is not None
        return made.jobs[number]

    # ------------------------------------------------------------------------------------------------ records

    def _save(self, path: Path, made: Made) -> None:
        with self._lock:
            if self._known.get(path) != made:
                self._known[path] = made
                self._write(path, made)

    def _write(self, path: Path, record: Record) -> None:
        """Write a record. On a full or read-only disk it is lost, but the workflow continues."""
        try:
            record.write(path)
        except OSError as error:
            log.warning("%s: cannot be written (%s), so this is not recorded", path, error)

    def _read(self, path: Path) -> Made | None:
        from snakemake.exceptions import WorkflowError

        with self._lock:
            if path not in self._known:
                try:
                    self._known[path] = Made.read(path) if path.exists() else None
                except ValueError as error:
                    raise WorkflowError(str(error)) from None
            return self._known[path]

    def _record(self, job: Any) -> Made | None:
        """Return the record of what an output was made from; None if it was never made."""
        path = self._path(job)
        made = self._read(path) if path else None
        return made if made and made.params is not None else None

    def _path(self, job: Any) -> Path | None:
        """Return the path of the record of a job; None for one without outputs in this results folder."""
        inside = bool(job.output) and Path(job.output[0]).is_relative_to(self.root)
        return made_path(self.root, str(Path(job.output[0]).relative_to(self.root))) if inside else None

    def _adopt(self, job: Any) -> None:
        """Record an output that has no record. It counts as made from what is there now."""
        path = self._path(job)
        if path and self.write and all(Path(file).exists() for file in job.output):
            jobs = (self._read(path) or Made()).jobs
            self._save(path, self._now(job).model_copy(update={"jobs": jobs}))

    def _now(self, job: Any) -> Made:
        """Return what a job would make its outputs from now."""
        files = [Path(real(file)) for file in job.input]
        own = [str(path) for path in files if not path.is_relative_to(self.root)]
        made = [path.relative_to(self.root).as_posix() for path in files if path.is_relative_to(self.root)]
        return Made(params=self._params(job), inputs=sorted(made + own), own=stats(own))

    def _input(self, file: Any) -> File:
        """Return an input of Snakemake; without its content if it is no reason to run a job (`ancient`)."""
        if getattr(file, "flags", {}).get("ancient"):
            return File(path=relative(self.root, Path(file)))
        return file_at(self.root, real(file))

    @staticmethod
    def _params(job: Any) -> list[str]:
        return sorted(map(repr, job.non_derived_params))

    def _run(self, job: Any) -> Job:
        """Return what Snakemake says about a job that starts."""
        assert self.workflow is not None
        params = {name: value for name, value in job.params.items() if name != "spider"}
        benchmark = relative(self.root, Path(job.benchmark)) if job.benchmark else None
        return Job(
            # A rule that makes the same in another way, or in a module, has the benchmarks of the original.
            rule=benchmark.split("/")[1] if benchmark else job.rule.name,
            wildcards={name: str(value) for name, value in (job.wildcards_dict or {}).items()},
            workflow=self.workflow.identity,
            params=redact(to_jsonable_python(params, fallback=str)),
            inputs=[self._input(file) for file in job.input],
            outputs=[File(path=relative(self.root, Path(file))) for file in job.output],
            command=redact(_command(job.shellcmd or "")),
            snapshot=self.snapshot,
            log=relative(self.root, Path(job.log[0])) if job.log else None,
            benchmark=benchmark,
            threads=job.threads,
            resources={name: value for name, value in job.resources.items() if name[0] != "_"},
            reason=str(job.dag.reason(job)),
            started=time.time(),
        )


def _command(shell: str) -> str:
    """Return the words of a job's command from the name of the command on (``rules/common.smk``)."""
    words = shlex.split(shell.partition("; ")[2])
    return shlex.join(words[words.index("--log") + 2 :]) if "--log" in words else shell


def _reason(log: Path) -> str | None:
    """Return the last error in the log of a job."""
    with contextlib.suppress(OSError):
        lines = log.read_text("utf-8", errors="replace").splitlines()
        errors = [match[1] for line in lines if (match := _ERROR.search(line))]
        return redact((errors or lines)[-1])[:500] if lines else None
    return None


class Hashes:
    """The digests of the files of a results folder. A file is hashed once for each size and time.

    Args:
        known: Records, whose digests need not be computed.
    """

    def __init__(self, root: Path, known: Iterable[Made]) -> None:
        self.root = root
        files = (file for made in known for job in made.jobs for file in (*job.inputs, *job.outputs))
        self._known = {
            file.model_copy(update={"digest": None}): file.digest
            for file in files
            if file.stat and file.digest
        }

    def of(self, job: Job, *, large: bool = True) -> dict[str, list[File]]:
        """Return the inputs and outputs of a job with digests. Without ``large``, large files have none."""
        lists = {"inputs": job.inputs, "outputs": job.outputs}
        return {name: [self._hashed(file, large) for file in files] for name, files in lists.items()}

    def _hashed(self, file: File, large: bool) -> File:
        path = self.root / file.path
        if file.stat is None or file.digest is not None:
            return file
        if file not in self._known and stat_of(path) == file.stat:
            found = _described(path, file.stat)
            if found is None and (large or file.stat[0] < LARGE):
                found = file_digest(path)
            if found is not None and stat_of(path) == file.stat:  # it was not replaced in the meantime
                self._known[file] = found
        return file.model_copy(update={"digest": self._known.get(file)})


def _described(path: Path, stat: Stat) -> str | None:
    """Return the digest of raw text or a shard that the JSON beside it, or that of its dataset, holds."""
    found = None
    if path.suffix == ".parquet" and _is_newer(name := path.with_suffix(".json"), stat):
        plain = read_json(name)
        found = plain.get("sha256") if plain.get("bytes") == stat[0] else None
    elif path.suffix == ".bin" and _is_newer(name := path.parent.parent / "metadata.json", stat):
        shards = [one for split in read_json(name)["splits"].values() for one in split["shards"]]
        own = f"{path.parent.name}/{path.name}"
        found = next((one["sha256"] for one in shards if one["file"] == own), None)
    return f"sha256:{found}" if found else None


def _is_newer(path: Path, stat: Stat) -> bool:
    other = stat_of(path)
    return other is not None and other[1] >= stat[1]


#: What is recorded of a job whose workflow ended before it.
_KILLED = {
    "status": "killed",
    "error": "the workflow was stopped before its end (killed, or the machine stopped)",
}


def incomplete(root: Path, known: Mapping[Path, Made], hashes: Hashes) -> Iterator[tuple[Path, Made]]:
    """Mark workflows that were killed; yield those of the known records that they left incomplete, completed.

    Records that a workflow may still write are left out.
    """
    invocations = workflows(root).values()
    for one in invocations:
        if one.status == "running" and not one.lives:
            ended = {"status": "killed", "ended": one.started}
            one.model_copy(update=ended).write(root / "workflows" / f"{one.identity}.json")
    live = {one.identity for one in invocations if one.lives}
    for path, made in known.items():
        if any(job.workflow in live for job in made.jobs):
            continue
        done = made
        for number, job in enumerate(made.jobs):
            if job.status == "running":
                last = stat_of(root / job.log) if job.log else None
                done = done.with_job(number, **_KILLED, ended=last[1] / 1e9 if last else job.started)
            if number == len(made.jobs) - 1:
                done = done.with_job(number, **hashes.of(done.jobs[number]))
        if done != made:
            yield path, done


def complete(root: Path) -> None:
    """Write the records that `incomplete` yields."""
    known = read_all(root)
    for path, made in incomplete(root, known, Hashes(root, known.values())):
        made.write(path)
