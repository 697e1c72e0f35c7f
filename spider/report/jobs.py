"""The jobs that made a run: their files, what they cost, and their commands.

The records of jobs say which jobs these are (`spider.provenance.lineage`), so a new rule needs no entry here.
Costs are those of the benchmark file that Snakemake writes for each job, of its last attempt. A job that made
a dataset counts in full for each run that uses the dataset.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from spider.evaluation.result import SECONDS, SIZE, Number, Row, Table
from spider.provenance.lineage import Lineage
from spider.provenance.made import Job, attempts


def jobs_of(lineage: Lineage, run: str, stages: Iterable[str]) -> list[Job]:
    """Return the jobs that made a run with these stages and all that it was made from, in their order."""
    folders = {
        f"runs/{run}",
        *(f"runs/{run}/{stage}{inside}" for stage in stages for inside in ("", "/compressed")),
    }
    return lineage.behind(path for path in lineage.newest if str(Path(path).parent) in folders)


def grouped(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return jobs in their order, those for all parts of a dataset together."""
    groups = defaultdict[tuple[str, Path], list[Job]](list)
    for job in jobs:
        made = Path(job.outputs[0].path)
        groups[job.rule, made.parent if made.stem.isdecimal() else made].append(job)
    return [sorted(alike, key=lambda job: job.outputs[0].path) for alike in groups.values()]


def commands(jobs: Sequence[Job], run: str) -> list[str]:
    """Return the commands of a run's jobs, one command for all parts of a dataset.

    Runs share n-gram indexes, so a job may name another run with the same settings. The name of this run
    replaces that one.
    """
    lines = []
    for alike in grouped(job for job in jobs if job.command):
        first, last = alike[0], alike[-1]
        words = shlex.split(first.command)
        if first.rule in ("count_ngrams", "build_ngrams"):
            words[words.index(first.rule.replace("_", "-")) + 1] = run
        more = f"   # and so on, to {Path(last.outputs[0].path).stem}" if last is not first else ""
        lines.append(f"spider --config run.yaml {shlex.join(words)}{more}")
    return list(dict.fromkeys(lines))


def costs(root: Path, jobs: Iterable[Job]) -> Table:
    """Return the table of what the jobs of each rule cost, in the order of the jobs, and of all together."""
    files = defaultdict[str, list[Path]](list)
    for job in jobs:
        if job.benchmark and (path := root / job.benchmark).exists():
            files[job.rule].append(path)
    rows, seconds = [], 0.0
    for rule, paths in files.items():
        measured = [row for path in paths for row in attempts(path)]
        cpu = [row["cpu_time"] for row in measured if "cpu_time" in row]
        peak = max((row["max_rss"] for row in measured if "max_rss" in row), default=None)
        seconds += (own := sum(row["s"] for row in measured))
        columns = {
            "time": Number(value=own, unit=SECONDS),
            "processor time": Number(value=sum(cpu) if cpu else None, unit=SECONDS, text="?"),
            "peak memory": Number(value=peak and peak * 1e6, unit=SIZE, text="?"),
        }
        rows.append(Row(name=rule, label=rule, value=len(paths), columns=columns))
    if rows:
        count = sum(map(len, files.values()))
        time = {"time": Number(value=seconds, unit=SECONDS)}
        rows.append(Row(name="all", label="all", value=count, columns=time))
    note = (
        "Wall time of the last attempt of each job, summed over jobs. The times of stages above count all "
        "attempts. Comparing the runs and writing this page are not counted."
    )
    return Table(title="", head="rule", value="jobs", rows=rows, notes=[note])


def seconds_by_rule(benchmarks: Path) -> dict[str, float]:
    """Return the wall seconds of all jobs of each rule, most expensive first."""
    seconds = defaultdict[str, float](float)
    for path in sorted(benchmarks.rglob("*.tsv")):
        seconds[path.relative_to(benchmarks).parts[0]] += sum(row["s"] for row in attempts(path))
    return {rule: round(s, 2) for rule, s in sorted(seconds.items(), key=lambda item: -item[1])}
