"""Compare the code and the packages that made each link of a score with those that stand here now.

Other code is not a failure, because a fixed version of Spider has other code too. The details name it. A
record of code that is missing or was edited is a failure. Cost: hashing the project's code.
"""

from __future__ import annotations

from collections.abc import Iterator

from spider.common.files import digest, read_json
from spider.provenance.codefiles import packages
from spider.provenance.lineage import by_rule
from spider.provenance.made import Job
from spider.verify.claim import Claim, Finding


def check(claim: Claim, quick: bool) -> Finding:
    """Compare the code of all jobs that led to the score of a claim with the code here."""
    lineage = claim.lineage
    end = lineage.of(claim.folder.evaluation)
    made = [one for one in (end, *lineage.ancestry(end)) if one.job]
    jobs = [one.job for one in made if one.job and one.job.code]
    if not jobs:
        reason = "no job recorded its code: it was untracked, or run by an earlier version of Spider"
        return Finding("skipped", reason)
    if broken := list(dict.fromkeys(line for job in jobs for line in _damage(claim, job))):
        return Finding("failed", broken[0], broken)
    edited = by_rule((job.rule, names) for job in jobs if (names := lineage.edited(job)))
    now = packages()
    differing = {
        f"package {name}: {version} then, {now.get(name, 'not installed')} now"
        for job in jobs
        for name, version in lineage.packages(job).items()
        if now.get(name) != version
    }
    details = [*edited, *sorted(differing)]
    if unknown := len(made) - len(jobs):
        details.append(f"{unknown} jobs of earlier versions of Spider did not record their code")
    reason = f"the code and packages of {len(jobs)} jobs are those that stand here"
    if details:
        reason = f"other code or packages made {len(edited)} kinds of files; {details[0]}"
    return Finding("passed", reason, details)


def _damage(claim: Claim, job: Job) -> Iterator[str]:
    """Yield what is wrong with the record of the code of a job."""
    path = claim.results.root / "code" / f"{job.code}.json"
    if not path.is_file() or digest(read_json(path)) != job.code:
        yield f"{path}: is missing or was edited, so the code of `{job.name}` is unknown"
