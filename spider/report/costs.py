"""Add up the seconds, the processor time and the memory of the jobs that made a run.

The records of jobs say which jobs these are (`spider.provenance.lineage`), so a new rule needs no entry here.
The figures are those of the benchmark file that Snakemake writes for each job, of its last attempt. A job
that made a dataset counts in full for each run that uses the dataset.
"""

from __future__ import annotations

import csv
import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from spider.provenance.lineage import Lineage
from spider.provenance.made import Job


class RuleCost(NamedTuple):
    """All jobs of one rule that this run needed. A value that nothing measured is None."""

    rule: str
    jobs: int
    seconds: float
    cpu_seconds: float | None
    peak_mb: float | None
    """The peak of the largest job."""


def jobs_of(root: Path, run: str, stages: Iterable[str]) -> list[Job]:
    """Return the jobs that made a run with these stages and all that it was made from, in their order."""
    lineage = Lineage(root)
    folders = {
        f"runs/{run}",
        *(f"runs/{run}/{stage}{inside}" for stage in stages for inside in ("", "/compressed")),
    }
    return lineage.behind(path for path in lineage.newest if str(Path(path).parent) in folders)


def commands(jobs: Sequence[Job], run: str) -> list[str]:
    """Return the commands of a run's jobs, one command for all parts of a dataset.

    Runs share n-gram indexes, so a job may name another run with the same settings. The name of this run
    replaces that one.
    """
    groups = defaultdict[tuple[str, Path], dict[Path, Job]](dict)
    for job in (one for one in jobs if one.command):
        made = Path(job.outputs[0].path)
        groups[job.rule, made.parent if made.stem.isdecimal() else made][made] = job
    lines = []
    for (rule, _), alike in groups.items():
        words = shlex.split(alike[min(alike)].command)
        if rule in ("count_ngrams", "build_ngrams"):
            words[words.index(rule.replace("_", "-")) + 1] = run
        more = f"   # and so on, to {max(alike).stem}" if len(alike) > 1 else ""
        lines.append(f"spider --config run.yaml {shlex.join(words)}{more}")
    return list(dict.fromkeys(lines))


def costs(root: Path, jobs: Iterable[Job]) -> list[RuleCost]:
    """Return one row for each rule of these jobs that left benchmark files, in the order of the jobs."""
    files = defaultdict[str, list[Path]](list)
    for job in jobs:
        if job.benchmark and (path := root / job.benchmark).exists():
            files[job.rule].append(path)
    return [_cost(rule, paths) for rule, paths in files.items()]


def _cost(rule: str, paths: Sequence[Path]) -> RuleCost:
    """Return the cost of the jobs of a rule that left these benchmark files."""
    rows = [row for path in paths for row in attempts(path)]
    cpu = [row["cpu_time"] for row in rows if "cpu_time" in row]
    return RuleCost(
        rule=rule,
        jobs=len(paths),
        seconds=sum(row["s"] for row in rows),
        cpu_seconds=sum(cpu) if cpu else None,
        peak_mb=max((row["max_rss"] for row in rows if "max_rss" in row), default=None),
    )


def seconds_by_rule(benchmarks: Path) -> dict[str, float]:
    """Return the wall seconds of all jobs of each rule, most expensive first."""
    seconds = defaultdict[str, float](float)
    for path in sorted(benchmarks.rglob("*.tsv")):
        seconds[path.relative_to(benchmarks).parts[0]] += sum(row["s"] for row in attempts(path))
    return {rule: round(s, 2) for rule, s in sorted(seconds.items(), key=lambda item: -item[1])}


def attempts(path: Path) -> list[dict[str, float]]:
    """Return what Snakemake measured of each attempt, without the values that it wrote as NA."""
    with open(path, encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f, delimiter="\t"))
    measured = []
    for row in rows:
        try:
            values = {
                name: float(row[name])
                for name in ("cpu_time", "max_rss")
                if row.get(name, "NA") not in ("NA", "-", "")
            }
            measured.append({"s": float(row["s"]), **values})
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: not a Snakemake benchmark file (no seconds in column s)") from None
    return measured
