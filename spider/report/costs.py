"""Find the jobs that made a run, and add up their seconds, processor time, memory, and energy of GPUs.

A job belongs to a run if its output lies where the files of the run lie (`Needed`), so a new rule needs no
entry here. Snakemake writes the benchmark file of a job, which has the path of the job's first output:
``benchmarks/{rule}/{path}.tsv``. The tracking record of a job lists all its outputs.

Seconds, processor time and memory are Snakemake's, of the last attempt. Energy is in the tracking record of a
job whose GPUs count joules (``system/gpu_energy_joules``). The energy of a processor is never estimated.
A job that made a dataset counts in full for each run that uses the dataset.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spider.config import Config
from spider.config.scored import baselines_name, overlap_name
from spider.config.spec import sources_of
from spider.results import Results
from spider.tracking.records import Run


class RuleCost(NamedTuple):
    """All jobs of one rule that this run needed. A value that nothing measured is None."""

    rule: str
    jobs: int
    seconds: float
    cpu_seconds: float | None
    peak_mb: float | None
    """The peak of the largest job."""
    joules: float | None
    """The energy of the GPUs."""


@dataclass(frozen=True)
class Needed:
    """The files that a run is made from."""

    run: str
    paths: tuple[str, ...]
    """Regular expressions for the beginning of paths in the results folder, in the order of the flow."""

    @classmethod
    def of(
        cls, config: Config, run: str, specs: Sequence[tuple[str, dict[str, Any]]], datasets: Iterable[str]
    ) -> Needed:
        """Return what a run needs, from the names and specs of its stages, as JSON, and its datasets."""
        used = sorted(set(datasets))
        known = {name: config.datasets[name] for name in used if name in config.datasets}
        tokenizers = sorted({dataset.tokenizer for dataset in known.values() if dataset.tokenizer})
        sources = sorted({*used, *(config.tokenizers[name].data for name in tokenizers)})
        raw = dict.fromkeys(
            (config.datasets[name].like or name) if name in config.datasets else name for name in sources
        )
        rows = dict.fromkeys(
            f"{name}/packed-{spec['settings']['seq_len']}"
            for _, spec in specs
            if spec["settings"].get("packing") == "best_fit"
            for name in sources_of(spec)
        )
        ngram = config.runs[run].model.ngram if run in config.runs else None
        protected = [one for name in raw if name in config.datasets for one in config.protected(name)]
        compared = dict.fromkeys([*raw, *config.compared(raw), *protected])
        paths = [f"raw/{name}/" for name in compared]
        paths += [f"tokenizers/{name}/" for name in tokenizers]
        paths += [f"cleaning/{name}/" for name in reversed(compared)]
        paths += [f"shards/{name}/(?!packed-)" for name in used]
        paths += [rf"shards/{name}\." for name in rows]
        paths += [f"text/{name}/" for name in used]
        if run in config.runs:
            scored = [config.stage(run, stage.name) for stage in config.runs[run].stages]
            paths += [f"overlap/{overlap_name(config, spec)}" for spec in scored]
            paths += [f"baselines/{baselines_name(config, spec)}" for spec in scored]
        if ngram:
            paths += [f"ngram/{name}/{ngram.counted}/" for name in used]
        paths += [f"runs/{run}/[^/]+$"]
        paths += [f"runs/{run}/{stage}/" for stage, _ in specs]
        return cls(run=run, paths=tuple(paths))

    def position(self, made: Sequence[str]) -> int | None:
        """Return the place in the flow of a job that made these files, or None for a job of others."""
        for i, pattern in enumerate(self.paths):
            if any(re.match(pattern, path) for path in made):
                return i
        return None

    def jobs(self, records: Iterable[Run]) -> list[Run]:
        """Return the jobs of the run among tracking records, in the order of the flow."""
        own = []
        for job in records:
            place = self.position([file.path for file in job.outputs])
            # The inputs of a job existed when its first attempt ended, so these times order jobs.
            ended = min((one.time for one in job.metrics if one.key == "seconds"), default=job.started)
            if place is not None:
                own.append((place, ended, job))
        return [job for *_, job in sorted(own, key=lambda one: one[:2])]


def commands(jobs: Sequence[Run], run: str) -> list[str]:
    """Return the commands of a run's finished jobs, one command for all parts of a dataset.

    Runs share n-gram indexes, so a job may name another run with the same settings. The name of this run
    replaces that one.
    """
    finished = [job for job in jobs if job.status == "finished" and job.command]
    newest = {_made_by(job): job for job in sorted(finished, key=lambda job: job.started)}
    groups = defaultdict[tuple[str, Path], dict[Path, Run]](dict)
    for job in finished:
        rule, made = _made_by(job)
        if newest[rule, made] is job:
            groups[rule, made.parent if made.stem.isdecimal() else made][made] = job
    lines = []
    for (rule, _), alike in groups.items():
        words = shlex.split(alike[min(alike)].command or "")
        if rule in ("count_ngrams", "build_ngrams"):
            words[words.index(rule.replace("_", "-")) + 1] = run
        more = f"   # and so on, to {max(alike).stem}" if len(alike) > 1 else ""
        lines.append(f"spider --config run.yaml {shlex.join(words)}{more}")
    return list(dict.fromkeys(lines))


def _made_by(job: Run) -> tuple[str, Path]:
    """Return the rule and the first output of a job."""
    return job.tags["spider.rule"], Path(job.outputs[0].path)


def costs(results: Results, needed: Needed, jobs: Iterable[Run]) -> list[RuleCost]:
    """Return one row for each rule that left benchmark files of jobs of the run, in the order of the flow."""
    folder = results.root / "benchmarks"
    found = []
    for path in folder.rglob("*.tsv"):
        rule, _, made = path.relative_to(folder).as_posix().partition("/")
        place = needed.position([made])
        if place is not None:
            found.append((place, path.stat().st_mtime, rule, path))
    files = defaultdict[str, list[Path]](list)
    for *_, rule, path in sorted(found):
        files[rule].append(path)
    energy = defaultdict[str, float](float)
    for job in jobs:
        joules = (one.value for one in job.metrics if one.key == "system/gpu_energy_joules")
        energy[job.tags["spider.rule"]] += sum(joules)
    return [_cost(rule, paths, energy[rule]) for rule, paths in files.items()]


def _cost(rule: str, paths: Sequence[Path], joules: float) -> RuleCost:
    """Return the cost of the jobs of a rule that left these benchmark files."""
    rows = [row for path in paths for row in attempts(path)]
    cpu = [row["cpu_time"] for row in rows if "cpu_time" in row]
    return RuleCost(
        rule=rule,
        jobs=len(paths),
        seconds=sum(row["s"] for row in rows),
        cpu_seconds=sum(cpu) if cpu else None,
        peak_mb=max((row["max_rss"] for row in rows if "max_rss" in row), default=None),
        joules=joules or None,
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
