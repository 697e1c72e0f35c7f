"""Hash the files again that jobs read and wrote, and compare them with the records of these jobs.

A link is broken if a file is not the one that a job read or wrote, or if a checkpoint or an index does not
have the files that it lists. The details say which files depend on it. A file that is gone breaks nothing:
raw text may be deleted (``temp: true``), and so may earlier checkpoints.

Cost: reading all files. A quick check reads at most `QUICK_BYTES`, and leaves out larger files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from spider.checkpoints.records import MANIFEST
from spider.common.files import read_json
from spider.common.sealed import SealedFile, content_digest, damage
from spider.provenance.lineage import Lineage
from spider.provenance.made import Job, file_digest, relative
from spider.verify.claim import Claim, Finding

#: Bytes that a quick check reads.
QUICK_BYTES = 500_000_000
#: The files that list the other files of their folder, with sizes and digests.
_LISTS = (MANIFEST, "index.json")


def check(claim: Claim, quick: bool) -> Finding:
    """Compare the files that led to a score with the records of the jobs."""
    folders = [claim.results.stage(spec.run, spec.stage) for spec in claim.specs]
    shards = [*claim.datasets.values(), claim.results.shards(claim.held_out)]
    ends = [claim.folder.evaluation, claim.folder.receipt, *(one.receipt for one in folders)]
    ends += [path for one in shards for path in one.glob("*.json")]  # trainings do not record all they read
    newest = claim.lineage.newest
    waiting = [newest.get(relative(claim.results.root, path)) for path in ends]
    jobs: dict[str, Job] = {}
    for job in waiting:  # grows
        if job and job.outputs[0].path not in jobs:
            jobs[job.outputs[0].path] = job
            waiting += [claim.lineage.made(file).job for file in job.inputs]
    links = Links(claim.results.root, quick)
    links.compare(jobs.values())
    for path in (path for folder in folders for path in folder.checkpoints.glob(f"*/{MANIFEST}")):
        links.whole(path)
    if relative(links.root, ends[0]) not in newest and not links.problems:
        return Finding("skipped", f"no job recorded {ends[0]}, so an edit of it cannot be found", links.notes)
    return links.finding()


def check_folder(root: Path, quick: bool) -> Finding:
    """Compare all files of a results folder with the records of the jobs that made them last."""
    links = Links(root, quick)
    links.compare({job.outputs[0].path: job for job in Lineage(root).newest.values()}.values())
    for path in sorted(root.glob(f"runs/*/*/checkpoints/*/{MANIFEST}")):
        links.whole(path)
    return links.finding()


class Links:
    """Files that were compared with records, and what is wrong with them."""

    def __init__(self, root: Path, quick: bool) -> None:
        self.root = root
        self.left = QUICK_BYTES if quick else None
        self.problems: dict[str, list[str]] = {}
        """What is wrong with a file or folder, by its path in the results folder."""
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
                    self.broken(name, f"is not {what} ({short}, now {short_now})")
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
            return self.broken(name, f"{path.name} cannot be read: {error}")
        affordable = self._affordable(name, *(path.parent / file for file in listed))
        for line in damage(path.parent, listed, quick=not affordable):
            self.broken(name, line)
        if plain["digest"] != content_digest(plain):
            self.broken(name, f"{path.name} was edited, its digest does not match")

    def broken(self, name: str, problem: str) -> None:
        """Add a broken link."""
        if problem not in (known := self.problems.setdefault(name, [])):
            known.append(problem)

    def finding(self) -> Finding:
        """Return what was found, with the files that depend on each broken link."""
        links = [(name, problem) for name, known in self.problems.items() for problem in known]
        if not links:
            reason = f"{len(self.hashed):,} files are those that the jobs read and wrote"
            return Finding("passed", reason, self.notes)
        what = "a broken link" if len(links) == 1 else f"{len(links)} broken links, the first"
        details = [f"{name}: {problem}{self._decides(name)}" for name, problem in links]
        return Finding("failed", f"{what}: {': '.join(links[0])}", details + self.notes)

    def _decides(self, name: str) -> str:
        """Return a clause about the files that were made from a file; empty without any."""
        found = [name]
        for one in found:  # grows
            found += sorted(self._users[one] - {*found})
        return f"; it decides {', '.join(found[1:])}" if found[1:] else ""

    @property
    def notes(self) -> list[str]:
        """What was not hashed."""
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
