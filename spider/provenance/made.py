"""Records of what each output was made from, in the results folder: ``made/{path of the output}.json``.

Snakemake keeps such records in ``.snakemake``, where it was started. They are lost with that folder, another
checkout does not have them, and the user's own files are compared by time only. So the workflow asks these
records first (`Memory`). An own file is compared by its size and time, and by its digest if these differ. The
digest is in the record of the job that read the file (`spider.tracking`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from spider.record import Record
from spider.tracking import spool
from spider.tracking.records import file_digest

#: Flag of an input of Snakemake that stands for a file of the user, whose name Snakemake cannot take.
STANDS_FOR = "spider_stands_for"

#: Size of a file in bytes, and its time in nanoseconds.
Stat = tuple[int, int]


class Made(Record):
    """The settings and files that an output was made from."""

    WHAT = "a record of what an output was made from"
    REMEDY = "delete it; its output then counts as made from the settings and files of now"

    format: int = 1
    params: list[str]
    """The params of the job, as Python writes them."""
    inputs: list[str]
    """The inputs. Those in the results folder are relative to it, so that it can move."""
    own: dict[str, Stat]
    """The user's own files among them."""


class Memory:
    """The records of a results folder, which answer Snakemake's questions instead of its own.

    Snakemake documents no interface for this. Its object for records (``workflow.persistence``) has the
    methods that `METHODS` names, and those of this class take their place. Jobs of another workflow around a
    module, and outputs without a record here, are left to Snakemake.
    """

    METHODS = (
        "has_metadata",
        "has_outdated_metadata",
        "params_changed",
        "input_changed",
        "started",
        "finished",
    )

    def __init__(self, root: Path, persistence: Any, *, write: bool) -> None:
        """Take the place of the methods of ``persistence``; ``write`` is False in a dry run."""
        self.root = root
        self.write = write
        self._before = {name: getattr(persistence, name) for name in self.METHODS}
        self._files = OwnFiles(root)
        self._read: dict[Path, Made | None] = {}
        self._begun: dict[Path, Made] = {}
        for name in self.METHODS:
            setattr(persistence, name, getattr(self, name))

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

        old, new = set(made.params), set(self._params(job))
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
        differs = now.inputs != made.inputs or bool(self._files.edited(self._output(job), made, now.own))
        if not differs and now.own != made.own and self.write:
            made.model_copy(update={"own": now.own}).write(path)  # spares the digests next time
        return differs if file is not None else list(job.output) * differs

    def started(self, job: Any, *arguments: Any, **options: Any) -> None:
        """Remember the user's own files as they are before a job reads them."""
        if path := self._path(job):
            self._begun[path] = self._now(job)
        self._before["started"](job, *arguments, **options)

    async def finished(self, job: Any) -> None:
        """Record what a job has made its outputs from.

        Snakemake calls this for failed jobs too, and would record the new settings. If files of earlier
        settings depend on the lost output, the next invocation would have nothing to do.
        """
        if not all([await file.exists() for file in job.output]):
            return
        if path := self._path(job):
            self._read[path] = (self._begun.pop(path, None) or self._now(job)).write(path)
        await self._before["finished"](job)

    def _path(self, job: Any) -> Path | None:
        """Return the path of the record of a job; None for one without outputs in this results folder."""
        inside = bool(job.output) and Path(job.output[0]).is_relative_to(self.root)
        return made_path(self.root, self._output(job)) if inside else None

    def _output(self, job: Any) -> str:
        return str(Path(job.output[0]).relative_to(self.root))

    def _record(self, job: Any) -> Made | None:
        from snakemake.exceptions import WorkflowError

        path = self._path(job)
        if path is not None and path not in self._read:
            try:
                self._read[path] = Made.read(path) if path.exists() else None
            except ValueError as error:
                raise WorkflowError(str(error)) from None
        return self._read[path] if path else None

    def _adopt(self, job: Any) -> None:
        """Record an output that has no record. It counts as made from what is there now."""
        path = self._path(job)
        if path and self.write and all(Path(file).exists() for file in job.output):
            self._read[path] = self._now(job).write(path)

    @staticmethod
    def _params(job: Any) -> list[str]:
        return sorted(map(repr, job.non_derived_params))

    def _now(self, job: Any) -> Made:
        """Return what a job would make its outputs from now."""
        files = [Path(real(file)) for file in job.input]
        own = [str(path) for path in files if not path.is_relative_to(self.root)]
        made = [path.relative_to(self.root).as_posix() for path in files if path.is_relative_to(self.root)]
        return Made(params=self._params(job), inputs=sorted(made + own), own=stats(own))


class OwnFiles:
    """The user's own files, as the jobs of a results folder have read them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def edited(self, output: str, made: Made, now: Mapping[str, Stat]) -> list[str]:
        """Return the files whose content differs from what the job of an output has read.

        Without a digest in the record of the job, another time counts as another content.
        """
        return [
            name
            for name, stat in now.items()
            if stat != made.own.get(name) and not self._same(output, name, made)
        ]

    def _same(self, output: str, name: str, made: Made) -> bool:
        if name not in made.own or made.own[name][0] != Path(name).stat().st_size:
            return False
        read = self._digests.get(output, {})
        digests = {digest for path, digest in read.items() if path.endswith(f"/{name.lstrip('/')}")}
        return bool(digests) and file_digest(Path(name)) in digests

    @cached_property
    def _digests(self) -> dict[str, dict[str, str | None]]:
        """The digests of the inputs of the newest job that made each output, by their paths."""
        found = (spool.read_run(path) for _, path in spool.records(self.root, ["jobs"]))
        jobs = sorted(filter(None, found), key=lambda job: job.started)
        return {
            file.path: {one.path: one.digest for one in job.inputs} for job in jobs for file in job.outputs
        }

    def edited_since(self, dataset: str) -> list[str]:
        """Return the files of a dataset that were edited since it was encoded."""
        edited: list[str] = []
        for path in sorted((self.root / "made/shards" / dataset).glob("*/*.json")):
            for name in Made.read(path).inputs:
                if (raw := made_path(self.root, name)).exists():
                    made = Made.read(raw)
                    edited += self.edited(name, made, stats(made.own))
        return edited


def made_path(root: Path, output: str) -> Path:
    """Return the path of the record of an output, whose path is relative to the results folder."""
    return root / "made" / f"{output}.json"


def stats(files: Iterable[str]) -> dict[str, Stat]:
    """Return the size and the time of each file that exists."""
    found = {}
    for file in files:
        with contextlib.suppress(OSError):
            one = os.stat(file)
            found[file] = one.st_size, one.st_mtime_ns
    return found


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
