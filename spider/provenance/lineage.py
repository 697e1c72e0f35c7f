"""The lineage of a file: the job that made it, the jobs that made that job's inputs, and so on.

A record of a job has the digests of its inputs and outputs (`spider.provenance.made`). A file belongs to the
job that recorded the same path with the same digest. After an edit a file does not belong to any job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spider.checkpoints.records import MANIFEST
from spider.common.files import read_json, sha256
from spider.common.results import StageFolder
from spider.common.sealed import SealedFile, content_digest, damage
from spider.provenance.codefiles import code_files, short_digest
from spider.provenance.made import File, Job, Workflow, file_digest, jobs, relative, workflows

#: Bytes that a quick check reads.
QUICK_BYTES = 500_000_000
#: The files that list the other files of their folder, with sizes and digests.
_LISTS = (MANIFEST, "index.json")


@dataclass(frozen=True)
class Made:
    """A file as it was at some time, and the job that made it."""

    path: str
    digest: str | None
    job: Job | None
    """None: no job of this results folder made it, so it is an origin."""


class Lineage:
    """The records of all jobs of a results folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._codes: dict[str | None, dict[str, Any]] = {}

    @cached_property
    def jobs(self) -> list[Job]:
        """All finished runs of jobs, the oldest first."""
        return [job for job in jobs(self.root) if job.status == "finished"]

    @cached_property
    def workflows(self) -> dict[str, Workflow]:
        """All invocations of the workflow, by identity."""
        return workflows(self.root)

    @cached_property
    def _makers(self) -> dict[tuple[str, str | None], Job]:
        """The newest job that made each file, by path and digest."""
        return {(file.path, file.digest): job for job in self.jobs for file in job.outputs}

    @cached_property
    def newest(self) -> dict[str, Job]:
        """The newest job that made each file, by path."""
        return {file.path: job for job in self.jobs for file in job.outputs}

    def made(self, file: File) -> Made:
        """Return a recorded file with its job."""
        return Made(file.path, file.digest, self._makers.get((file.path, file.digest)))

    def of(self, path: Path) -> Made:
        """Return a file as it is now, with its job.

        Raises:
            ValueError: the file is missing.
        """
        digest = file_digest(path)
        if digest is None:
            raise ValueError(f"{path}: no such file")
        return self.made(File(path=relative(self.root, path), digest=digest))

    def inputs(self, made: Made) -> list[Made]:
        """Return what the job of a file read."""
        return [self.made(file) for file in made.job.inputs] if made.job else []

    def ancestry(self, made: Made) -> Iterator[Made]:
        """Yield the inputs of a file's job, their inputs and so on, each once, the nearest first."""
        seen, waiting = {(made.path, made.digest)}, [made]
        while waiting:
            for one in self.inputs(waiting.pop(0)):
                if (one.path, one.digest) not in seen:
                    seen.add((one.path, one.digest))
                    waiting.append(one)
                    yield one

    def behind(self, paths: Iterable[str]) -> list[Job]:
        """Return the newest jobs that made these files and all that these read, by the time of their end."""
        found: dict[str, Job] = {}
        waiting = [*paths]
        while waiting:
            job = self.newest.get(waiting.pop())
            if job is not None and job.outputs[0].path not in found:
                found[job.outputs[0].path] = job
                waiting += [file.path for file in job.inputs]
        return sorted(found.values(), key=lambda job: job.ended or 0.0)

    def content(self, made: Made) -> object:
        """Return what files of the same content share: the digest, or that of the weights or the text.

        Receipts, descriptions and evaluations also hold times and paths, which differ between equal models.
        """
        path = self.root / made.path
        if path.suffix == ".json" and path.is_file() and f"sha256:{sha256(path)}" == made.digest:
            plain = read_json(path)
            if isinstance(plain, dict) and "results" in plain:
                rows = [row for result in plain["results"].values() for row in result["rows"]]
                scores = [(row["name"], row.get("value"), row.get("carried")) for row in rows]
                return [plain.get("bpb"), *scores]
            if isinstance(plain, dict):
                return plain.get("weights") or plain.get("digest") or made.digest
        return made.digest

    def code(self, job: Job) -> dict[str, Any]:
        """Return the record of the code of a job, or an empty one if it left none."""
        if job.code not in self._codes:
            path = self.root / "code" / f"{job.code}.json"
            self._codes[job.code] = read_json(path) if job.code and path.is_file() else {}
        return self._codes[job.code]

    def edited(self, job: Job) -> list[str]:
        """Return the modules that a job imported, and that are different now."""
        now = dict(code_files())
        modules = self.code(job).get("modules", {})
        users = [name for name in modules if Path(name).is_absolute() and Path(name).is_file()]
        now |= {name: short_digest(Path(name)) for name in users}
        return [name for name, digest in modules.items() if now.get(name, digest) != digest]

    def packages(self, job: Job) -> dict[str, str]:
        """Return the versions of Python and of the packages that were installed, as far as recorded."""
        workflow = self.workflows.get(job.workflow)
        return workflow.packages if workflow else {}


def other_code(root: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the outputs of a results folder whose modules were edited since, with their rule and modules.

    A module counts if the job that made an output had imported it. Outputs of jobs without a record of their
    code are left out.
    """
    lineage = Lineage(root)
    edited = {path: (job.rule, lineage.edited(job)) for path, job in lineage.newest.items()}
    return {path: (rule, modules) for path, (rule, modules) in edited.items() if modules}


def by_rule(made: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Return a line for each rule: ``encode: made by other code (spider/data/encode.py)``.

    A line names at most three modules.
    """
    rules: dict[str, dict[str, None]] = {}
    for rule, modules in made:
        rules.setdefault(rule, {}).update(dict.fromkeys(modules))
    named = {rule: [*modules][:3] + ["..."] * (len(modules) > 3) for rule, modules in rules.items()}
    return [f"{rule}: made by other code ({', '.join(modules)})" for rule, modules in named.items()]


def result_of(folder: Path) -> Path:
    """Return the file that a stage ends with: its evaluation, or else its receipt.

    Raises:
        ValueError: the folder has neither.
    """
    stage = StageFolder(folder)
    for path in (stage.evaluation, stage.receipt):
        if path.is_file():
            return path
    raise ValueError(f"{folder}: neither an evaluation nor a receipt (train.json); train this stage first")


class Links:
    """Files that were compared with records, and what is wrong with them."""

    def __init__(self, root: Path, quick: bool) -> None:
        self.root = root
        self.left = QUICK_BYTES if quick else None
        self.problems: dict[str, list[str]] = {}
        """Reasons why a file or folder is wrong, by its path in the results folder."""
        self.hashed: set[str] = set()
        self.gone: set[str] = set()
        self.left_out: set[str] = set()
        self._users: dict[str, set[str]] = defaultdict(set)

    def compare(self, jobs: Iterable[Job]) -> None:
        """Compare what jobs read and wrote with the files that are here now."""
        known: dict[tuple[str, str], str] = {}
        for job in jobs:
            for did, files in (("read", job.inputs), ("wrote", job.outputs)):
                for file in files:
                    known.setdefault((file.path, file.digest or ""), f"the one that `{job.name}` {did}")
            for file in job.inputs:
                self._users[file.path] |= {one.path for one in job.outputs}
        for (name, recorded), what in known.items():
            path = self.root / name
            if path.exists() and recorded and self._affordable(name, path):
                now = file_digest(path) or ""
                if now != recorded:
                    short, short_now = (one.rpartition(":")[2][:16] for one in (recorded, now))
                    self.add(name, f"is not {what} ({short}, now {short_now})")
                elif path.name in _LISTS:
                    self.whole(path)
            elif recorded and not path.exists():
                self.gone.add(name)

    def whole(self, path: Path) -> None:
        """Compare the files of a folder with the list of them at ``path``."""
        name = relative(self.root, path.parent)
        try:
            plain = read_json(path)
            listed = {file: SealedFile(**one) for file, one in plain["files"].items()}
        except (ValueError, LookupError) as error:
            return self.add(name, f"{path.name} cannot be read: {error}")
        affordable = self._affordable(name, *(path.parent / file for file in listed))
        for line in damage(path.parent, listed, quick=not affordable):
            self.add(name, line)
        if plain["digest"] != content_digest(plain):
            self.add(name, f"{path.name} was edited, its digest does not match")

    def add(self, name: str, problem: str) -> None:
        """Add a broken link."""
        if problem not in (known := self.problems.setdefault(name, [])):
            known.append(problem)

    @property
    def unbroken(self) -> str:
        """Return a clause about the files that were hashed, for links without problems."""
        return f"{len(self.hashed):,} files are those that the jobs read and wrote"

    @property
    def broken(self) -> list[str]:
        """Return a sentence about each broken link, with the files that depend on it."""
        found = [(name, problem) for name, known in self.problems.items() for problem in known]
        return [f"{name}: {problem}{self._decides(name)}" for name, problem in found]

    def _decides(self, name: str) -> str:
        """Return a clause about the files that were made from a file; empty without any."""
        found = [name]
        for one in found:  # grows
            found += sorted(self._users[one] - {*found})
        return f"; it decides {', '.join(found[1:])}" if found[1:] else ""

    @property
    def notes(self) -> list[str]:
        """Return sentences on what was not hashed."""
        kinds = {"not here any more": self.gone, "left out by the quick check": self.left_out}
        return [
            f"{what}: {', '.join(sorted(names)[:5])}" + f", and {len(names) - 5} more" * (len(names) > 5)
            for what, names in kinds.items()
            if names
        ]

    def _affordable(self, name: str, *paths: Path) -> bool:
        """Return whether these files may be read, which a quick check does up to a limit."""
        size = sum(path.stat().st_size for path in paths if path.is_file())
        if self.left is not None and size > self.left:
            self.left_out.add(name)
            return False
        self.left = None if self.left is None else self.left - size
        self.hashed.add(name)
        return True
