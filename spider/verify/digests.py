"""Hash the files again that jobs read and wrote, and compare them with the records of these jobs.

A link is broken if a file is not the one that a job read or wrote, or if a checkpoint or an index does not
have the files that it lists. The details say which files depend on it. A file that is gone breaks nothing:
raw text may be deleted (``temp: true``), and so may earlier checkpoints.

Cost: reading all files. A quick check reads at most 500 MB, and leaves out larger files.
"""

from __future__ import annotations

from pathlib import Path

from spider.checkpoints.records import MANIFEST
from spider.provenance.lineage import Lineage, Links
from spider.provenance.made import Job, relative
from spider.verify.claim import Claim, Finding


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
    return _finding(links)


def check_folder(root: Path, quick: bool) -> Finding:
    """Compare all files of a results folder with the records of the jobs that made them last."""
    links = Links(root, quick)
    links.compare({job.outputs[0].path: job for job in Lineage(root).newest.values()}.values())
    for path in sorted(root.glob(f"runs/*/*/checkpoints/*/{MANIFEST}")):
        links.whole(path)
    return _finding(links)


def _finding(links: Links) -> Finding:
    if not links.problems:
        return Finding("passed", links.unbroken, links.notes)
    name, (first, *_) = next(iter(links.problems.items()))
    what = "a broken link" if len(links.broken) == 1 else f"{len(links.broken)} broken links, the first"
    return Finding("failed", f"{what}: {name}: {first}", links.broken + links.notes)
