"""Find the jobs that made a run, and add up their seconds, processor time, memory, and energy of GPUs.

A job is found by its benchmark file, which Snakemake writes, and by its tracking record, which holds its
command line. Seconds, processor time and memory are Snakemake's, of the job's last attempt. Energy is in the
tracking record of a job whose GPUs count joules (``system/gpu_energy_joules``); that of a processor is never
estimated. Jobs of a dataset are counted in full for each run that uses it.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spider.config import Config
from spider.results import Results

#: What a job of each rule makes a part of, in the order of the flow.
FLOW: dict[str, Literal["raw", "tokenizer", "dataset", "run"]] = {
    "download": "raw",
    "tokenizer": "tokenizer",
    "encode": "dataset",
    "index": "dataset",
    "pack": "dataset",
    "count_ngrams": "dataset",
    "build_ngrams": "dataset",
    "warmup": "run",
    "train": "run",
    "evaluate": "run",
    "sample": "run",
    "draw": "run",
    "harness": "run",
    "compress": "run",
    "evaluate_compressed": "run",
    "sample_compressed": "run",
}
#: Rules of the whole results folder, and of the page that shows the costs.
SHARED = ("compare", "scaling", "report")
#: Rules with a job for each part of a dataset.
_OF_PARTS = ("download", "encode", "count_ngrams")


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
    """The names of what a run is made from; they tell its jobs from those of other runs."""

    run: str
    stages: tuple[str, ...]
    datasets: frozenset[str]
    """Datasets that it trains on or is scored on."""
    tokenizers: frozenset[str]
    raw: frozenset[str]
    """Datasets whose downloaded parts it needs."""
    rows: frozenset[str]
    """``dataset/seq_len`` of its packed rows."""
    counted: str
    """Digest of the settings of its n-gram index; empty if it has none or is not in the configuration."""

    @classmethod
    def of(
        cls, config: Config, run: str, specs: Sequence[tuple[str, dict[str, Any]]], datasets: Iterable[str]
    ) -> Needed:
        """Return what a run needs, from the names and specs of its stages, as JSON, and its datasets."""
        used = frozenset(datasets)
        known = {name: config.datasets[name] for name in used if name in config.datasets}
        tokenizers = frozenset(one.tokenizer for one in known.values() if one.tokenizer)
        sources = used | {config.tokenizers[name].data for name in tokenizers}
        likes = {name: config.datasets[name].like for name in sources if name in config.datasets}
        packed = [spec for _, spec in specs if spec["settings"].get("packing") == "best_fit"]
        ngram = config.runs[run].model.ngram if run in config.runs else None
        return cls(
            run=run,
            stages=tuple(name for name, _ in specs),
            datasets=used,
            tokenizers=tokenizers,
            raw=frozenset(likes.get(name) or name for name in sources),
            rows=frozenset(f"{spec['data']}/{spec['settings']['seq_len']}" for spec in packed),
            counted=ngram.counted if ngram else "",
        )

    def includes(self, rule: str, name: str) -> bool:
        """Return whether the job ``name`` of a rule, ``owner/part``, is one that the run needs."""
        owner, _, part = name.partition("/")
        if rule in SHARED:
            return False
        if rule == "pack":
            return name in self.rows
        kind = FLOW.get(rule, "run")
        if kind == "run":
            return owner == self.run and (rule == "warmup" or part in self.stages)
        return owner in {"raw": self.raw, "tokenizer": self.tokenizers, "dataset": self.datasets}[kind]

    def jobs(self, records: Iterable[dict[str, Any]]) -> list[Job]:
        """Return the jobs of the run among tracking records, in the order of the flow."""
        jobs = [Job.read(record) for record in records]
        own = [job for job in jobs if self.includes(job.rule, job.name) and self._counts(job)]
        return sorted(own, key=self._place)

    def _counts(self, job: Job) -> bool:
        """Return False for counts with the settings of another run."""
        return job.rule not in ("count_ngrams", "build_ngrams") or any(
            f"/{self.counted}/" in path for path in job.outputs
        )

    def _place(self, job: Job) -> tuple[int, int, str, float]:
        """Return where a job stands: datasets rule by rule, then the run stage by stage."""
        rules, stage = [*FLOW], job.name.partition("/")[2]
        rule = rules.index(job.rule) if job.rule in FLOW else len(rules)
        of_stage = self.stages.index(stage) + 1 if stage in self.stages else 0
        return of_stage, rule, job.name, job.started


@dataclass(frozen=True)
class Job:
    """One job, as its tracking record has it."""

    rule: str
    name: str
    """``owner/part``: the dataset, tokenizer or run, and what of it."""
    command: str | None
    """Command line; None for a job that was recorded without one."""
    commit: str | None
    started: float
    finished: bool
    outputs: tuple[str, ...]
    joules: float
    """The energy of the GPUs; 0 if it was not counted."""

    @classmethod
    def read(cls, record: dict[str, Any]) -> Job:
        """Return the job of a record."""
        rule, name = record["tags"].get("spider.rule", ""), record["tags"].get("spider.name", "")
        if rule == "harness":  # its name is a path: runs/demo/main/train.json
            name = "/".join(name.split("/")[1:3])
        energy = [one["value"] for one in record["metrics"] if one["key"] == "system/gpu_energy_joules"]
        return cls(
            rule=rule,
            name=name,
            command=record.get("command"),
            commit=record["tags"].get("git.commit"),
            started=record.get("started", 0.0),
            finished=record.get("status") == "finished",
            outputs=tuple(file["path"] for file in record.get("outputs", ())),
            joules=sum(energy),
        )


def commands(jobs: Sequence[Job], run: str) -> list[str]:
    """Return the commands of a run's finished jobs, one job for all parts of a dataset.

    Runs share n-gram indexes, so ``count_ngrams`` and ``build_ngrams`` may have been started for another run
    with the same settings. They are shown for this one.
    """
    # A later job of the same name takes the place of an earlier one.
    newest = {(job.rule, job.name): job for job in jobs if job.finished and job.command}
    groups = defaultdict[tuple[str, str], list[Job]](list)
    for job in newest.values():
        of_parts = job.rule in _OF_PARTS
        groups[job.rule, job.name.partition("/")[0] if of_parts else job.name].append(job)
    lines = []
    for (rule, _), alike in groups.items():
        words = shlex.split(alike[0].command or "")
        if rule in ("count_ngrams", "build_ngrams"):
            words[2] = run  # data count-ngrams RUN ...
        more = f"   # and so on, to {alike[-1].name.partition('/')[2]}" if len(alike) > 1 else ""
        lines.append(f"spider --config run.yaml {shlex.join(words)}{more}")
    return list(dict.fromkeys(lines))


def costs(results: Results, needed: Needed, jobs: Iterable[Job]) -> list[RuleCost]:
    """Return one row for each rule that left benchmark files of jobs of the run, in the order of the flow."""
    joules: dict[str, float] = defaultdict(float)
    for job in jobs:
        joules[job.rule] += job.joules
    table = []
    for rule in _timed(results):
        folder = results.root / "benchmarks" / rule
        paths = [path for path in sorted(folder.rglob("*.tsv")) if _is_of(needed, rule, path, folder)]
        if rows := [row for path in paths for row in _rows(path)]:
            cpu, peak = ([row[name] for row in rows if name in row] for name in ("cpu_time", "max_rss"))
            table.append(
                RuleCost(
                    rule=rule,
                    jobs=len(paths),
                    seconds=sum(row["s"] for row in rows),
                    cpu_seconds=sum(cpu) if cpu else None,
                    peak_mb=max(peak, default=None),
                    joules=joules[rule] or None,
                )
            )
    return table


def _timed(results: Results) -> list[str]:
    """Return the rules that left benchmark files, in the order of the flow, rules of others at the end."""
    found = {path.name for path in (results.root / "benchmarks").glob("*/")}
    return [rule for rule in FLOW if rule in found] + sorted(found - FLOW.keys())


def _is_of(needed: Needed, rule: str, path: Path, folder: Path) -> bool:
    """Return whether a benchmark file is of a job that the run needs."""
    name = path.relative_to(folder).with_suffix("").as_posix()
    if rule in ("count_ngrams", "build_ngrams"):  # dataset/settings-part
        owner, _, part = name.partition("/")
        return needed.includes(rule, owner) and part.startswith(f"{needed.counted}-")
    if rule == "pack":  # dataset-seq_len
        name = re.sub(r"-(\d+)$", r"/\1", name)
    return needed.includes(rule, name)


def seconds_by_rule(benchmarks: Path) -> dict[str, float]:
    """Wall seconds of all jobs of each rule, most expensive first, from ``{benchmarks}/{rule}/**.tsv``."""
    seconds: dict[str, float] = defaultdict(float)
    for path in sorted(benchmarks.glob("*/**/*.tsv")):
        seconds[path.relative_to(benchmarks).parts[0]] += sum(row["s"] for row in _rows(path))
    return {rule: round(s, 2) for rule, s in sorted(seconds.items(), key=lambda item: -item[1])}


def _rows(path: Path) -> list[dict[str, float]]:
    """Return what Snakemake measured of each attempt, without the values that it wrote as NA."""
    with open(path, encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f, delimiter="\t"))
    try:
        return [
            {name: float(row[name]) for name in ("s", "cpu_time", "max_rss")
             if name == "s" or row.get(name, "NA") not in ("NA", "-", "")}
            for row in rows
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: not a Snakemake benchmark file (no seconds in column s)") from None
