"""Compare the code and the packages that made each link of a score with those that stand here now.

Other code is not a failure, because a fixed version of Spider has other code too. The details name it. A
record of code that is missing or was edited is a failure. Cost: hashing the project's code.
"""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import distributions
from pathlib import Path

from spider.audit.claim import Claim
from spider.audit.record import Finding
from spider.files import digest, read_json
from spider.provenance.stale import by_rule
from spider.tracking.records import Run


def check(claim: Claim, quick: bool) -> Finding:
    """Compare the code of all jobs that led to the score of a claim with the code here."""
    lineage = claim.lineage
    end = lineage.of(claim.folder.evaluation)
    made = [one for one in (end, *lineage.ancestry(end)) if one.job]
    jobs = [one.job for one in made if one.job and lineage.code_name(one.job)]
    if not jobs:
        reason = "no job recorded its code: it was untracked, or run by an earlier version of Spider"
        return Finding(check="code", status="skipped", reason=reason)
    broken = list(dict.fromkeys(line for job in jobs for line in _damage(claim, job)))
    if broken:
        return Finding(check="code", status="failed", reason=broken[0], details=broken)
    edited = by_rule((job.tags["spider.rule"], names) for job in jobs if (names := lineage.edited(job)))
    now = {one.name: one.version for one in distributions()} | {"Python": platform.python_version()}
    packages = {
        f"{name}: {version} then, {now.get(name, 'not installed')} now"
        for job in jobs
        for name, version in lineage.packages(job).items()
        if now.get(name) != version
    }
    details = [*edited, *(f"package {line}" for line in sorted(packages))]
    unknown = len(made) - len(jobs)
    details += [f"{unknown} jobs of earlier versions of Spider did not record their code"] * bool(unknown)
    if details:
        reason = f"other code or packages made {len(edited)} kinds of files; {details[0]}"
    else:
        reason = f"the code and packages of {len(jobs)} jobs are those that stand here"
    return Finding(check="code", status="passed", reason=reason, details=details)


def _damage(claim: Claim, job: Run) -> list[str]:
    """Return what is wrong with the record of the code of a job."""
    folder = claim.results.root / "tracking" / "code"
    name = claim.lineage.code_name(job)
    path = folder / f"{name}.json"
    if not path.is_file():
        return [f"{path}: is missing, so the code of `{job.name}` is unknown"]
    plain = read_json(path)
    if digest(plain) != name:
        return [f"{path}: was edited, so the code of `{job.name}` is unknown"]
    return _damaged_patch(folder / f"{plain['patch']}.patch", job) if plain.get("patch") else []


def _damaged_patch(path: Path, job: Run) -> list[str]:
    if not path.is_file():
        return [f"{path}: the changes of the code of `{job.name}` are missing"]
    if hashlib.sha256(path.read_bytes()).hexdigest()[:16] != path.stem:
        return [f"{path}: the changes of the code of `{job.name}` were edited"]
    return []
