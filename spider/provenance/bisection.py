"""Find the cause that moves a metric between two runs, by training runs between them.

A hybrid is the first run with half of the suspects as in the second run. If it moves the metric by more than
half of the difference, the cause is in this half, or else in the other. The last training confirms it. With n
suspects these are at most ceil(log2 n) + 1 trainings, if each half is a valid configuration.

The workflow trains the hybrids in the results folder of both runs. So it takes datasets, tokenizers and
n-gram indexes from there. The name of a hybrid has the digest of its settings, so a repeated search finds it
trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spider.config import Config, ConfigError, load_config
from spider.config.block import none_such
from spider.evaluation.records import Evaluation
from spider.evaluation.result import metrics
from spider.files import digest
from spider.provenance.differences import Comparison
from spider.provenance.hybrids import (
    Suspect,
    block_of,
    hybrid,
    named,
    order_of,
    run_of,
    settings_between,
    suspects_of,
)
from spider.provenance.lineage import Lineage, Made
from spider.provenance.stale import by_rule
from spider.provenance.workflow import run_workflow
from spider.results import Results, StageFolder
from spider.tracking.records import file_digest
from spider.training.metrics import read_rows

#: Kinds of differences that a hybrid cannot have.
_FIXED = ("module", "package", "threads", "processor")


@dataclass(frozen=True)
class Search:
    """Two values of a metric, and those that were measured between them."""

    one: float
    other: float
    measured: list[tuple[list[Suspect], float]] = field(default_factory=list)

    def share(self, value: float) -> float:
        """Return which share of the difference lies between the first value and this one."""
        return (value - self.one) / (self.other - self.one)

    def find(
        self,
        suspects: Sequence[Suspect],
        measure: Callable[[list[Suspect]], float],
        valid: Callable[[Sequence[Suspect]], bool],
    ) -> Suspect:
        """Return the suspect that is left after halving, and measure it alone.

        Args:
            measure: returns the metric of a hybrid.
            valid: returns whether the configuration of a hybrid is valid, as that of each single suspect is.
        """
        left = list(suspects)
        while len(left) > 1:
            half = _half(left, valid)
            inside = self._measured(half, measure)
            left = half if inside else [one for one in left if one not in half]
        if left not in [chosen for chosen, _ in self.measured]:
            self._measured(left, measure)
        return left[0]

    def _measured(self, chosen: list[Suspect], measure: Callable[[list[Suspect]], float]) -> bool:
        """Measure a hybrid. Return whether it moves the metric by more than half of the difference."""
        value = measure(chosen)
        self.measured.append((chosen, value))
        return self.share(value) > 0.5

    def value(self, suspect: Suspect) -> float:
        """Return the value that was measured for a suspect alone."""
        return next(value for chosen, value in self.measured if chosen == [suspect])

    def smallest(self) -> tuple[list[Suspect], float] | None:
        """Return the fewest suspects that moved the metric by more than half, if any did."""
        moved = [(chosen, value) for chosen, value in self.measured if self.share(value) > 0.5]
        return min(moved, key=lambda one: len(one[0]), default=None)


def _half(suspects: list[Suspect], valid: Callable[[Sequence[Suspect]], bool]) -> list[Suspect]:
    """Return as near to half of the suspects as possible, so that their hybrid is valid."""
    around = suspects + suspects
    halves = (
        around[begin : begin + size]
        for size in range(len(suspects) // 2, 0, -1)
        for begin in range(len(suspects))
    )
    return next(half for half in halves if valid(half))


class Bisection:
    """The hybrids of two stages in one results folder.

    Raises:
        ValueError: the stages are not of two runs of one folder, their text has changed, or the metric does
            not exist or is the same.
    """

    def __init__(self, lineage: Lineage, made: tuple[Made, Made], metric: str) -> None:
        self.lineage = lineage
        self.made = made
        self.metric = metric
        places = [Path(one.path).parts for one in made]
        if any(len(parts) != 4 or parts[0] != "runs" for parts in places) or places[0][1] == places[1][1]:
            raise ValueError(f"{made[0].path} and {made[1].path}: bisection needs stages of two runs")
        self.runs = [parts[1] for parts in places]
        self.stages = [parts[2] for parts in places]
        jobs = [one.job for one in made if one.job]
        self.configs = [load_config(lineage.configuration(job)) for job in jobs]
        older = min((0, 1), key=lambda i: jobs[i].started)
        self._by_age = self.configs[older], self.configs[1 - older]
        self._check_text()
        self.search = Search(*self._values())
        blocks = zip(self.configs, self.runs, self.stages, strict=True)
        self.one, self.other = (block_of(config, run, stage) for config, run, stage in blocks)
        self.order = order_of([*self.one["stages"]], [*self.other["stages"]])
        self.suspects = suspects_of(settings_between(self.one, self.other), self.problem)
        if not self.suspects:
            raise ValueError(
                f"{self.runs[0]} and {self.runs[1]}: no setting differs that decides weights or scores, so "
                "there is nothing to bisect; spider diff without --bisect names other causes"
            )
        self._hybrids: dict[str, dict[str, Any]] = {}

    @property
    def file(self) -> Path:
        """The configuration with the hybrids."""
        return Results(self.lineage.root.resolve()).bisection(*self.runs)

    @property
    def most(self) -> int:
        """Number of trainings after which the search ends, if each half is a valid configuration."""
        return math.ceil(math.log2(len(self.suspects))) + 1

    def problem(self, suspects: Sequence[Suspect]) -> str:
        """Return what is wrong with the configuration of a hybrid, or nothing if it is valid."""
        try:
            load_config(self._configuration({"hybrid": run_of(hybrid(self.one, suspects), self.order)}))
        except ConfigError as error:
            return str(error)
        return ""

    def name(self, suspects: Sequence[Suspect]) -> str:
        """Return the name of a hybrid."""
        values = {setting.name: setting.other for one in suspects for setting in one}
        return f"{self.runs[0]}-with-{digest(values)}"

    def first(self) -> list[Suspect]:
        """Return the suspects of the first hybrid."""
        return self.suspects if len(self.suspects) == 1 else _half(self.suspects, self._valid)

    def find(self, options: Sequence[str], report: Callable[[str], None]) -> Suspect:
        """Train hybrids until one suspect is left, and return it.

        Args:
            options: further options of Snakemake.
            report: takes a line about each hybrid when it is trained.
        """

        def measure(suspects: list[Suspect]) -> float:
            value = self._measure(suspects, options)
            report(f"{named(suspects)}: {self.metric} {value:.5g} ({self._both()})")
            return value

        return self.search.find(self.suspects, measure, self._valid)

    def verdict(self, suspect: Suspect) -> list[str]:
        """Return what the search has found about a suspect, in words."""
        search = self.search
        value = search.value(suspect)
        moved = f"{self.metric} by {value - search.one:.3g} of {search.other - search.one:.3g}"
        trained = f"{len(search.measured)} training{'s' if len(search.measured) > 1 else ''}"
        if search.share(value) > 0.5:
            return [f"{', '.join(map(str, suspect))} moves {moved} ({trained})"]
        smallest = search.smallest()
        found = "no hybrid"
        if smallest:
            found = f"{named(smallest[0])} ({self.metric} {smallest[1]:.5g})"
        return [
            f"no single cause: {named([suspect])} alone moves {moved} ({trained})",
            f"several causes together move {self.metric} by more than half of it; the smallest set that was "
            f"found to do so: {found}",
        ]

    def warnings(self) -> list[str]:
        """Return a line for each difference that a hybrid cannot have, and for code that has changed."""
        causes = Comparison(self.lineage, self.lineage).causes(*self.made)
        lines = [f"{cause.kind} {cause.what}".strip() for cause in causes if cause.kind in _FIXED]
        lines = [f"{line} differs too; no hybrid shows what it does" for line in lines]
        jobs = [one.job for made in self.made for one in (made, *self.lineage.ancestry(made)) if one.job]
        edited = [(job.tags["spider.rule"], self.lineage.edited(job)) for job in jobs]
        return lines + by_rule(one for one in edited if one[1])

    def as_json(self, suspect: Suspect) -> dict[str, Any]:
        """Return the outcome for programs."""
        value = self.search.value(suspect)
        return {
            "metric": self.metric,
            "values": dict(zip(self.runs, (self.search.one, self.search.other), strict=True)),
            "causes": [[setting.name for setting in one] for one in self.suspects],
            "measured": [
                {"run": self.name(chosen), "settings": [s.name for one in chosen for s in one], "value": got}
                for chosen, got in self.search.measured
            ],
            "found": [setting.name for setting in suspect],
            "share": self.search.share(value),
            "confirmed": self.search.share(value) > 0.5,
        }

    def _valid(self, suspects: Sequence[Suspect]) -> bool:
        return not self.problem(suspects)

    def _both(self) -> str:
        values = zip(self.runs, (self.search.one, self.search.other), strict=True)
        return ", ".join(f"{run} {value:.5g}" for run, value in values)

    def _values(self) -> tuple[float, float]:
        """Return the metric of both stages."""
        results = Results(self.lineage.root)
        places = list(zip(self.runs, self.stages, strict=True))
        one, other = (_figure(results.stage(*place), self.metric) for place in places)
        if one == other:
            raise ValueError(f"{self.metric} is {one:.6g} in both runs, so no setting moves it")
        return one, other

    def _check_text(self) -> None:
        """Refuse runs whose datasets or own files are other ones by now, because hybrids would read these."""
        for made in self.made:
            for one in self.lineage.ancestry(made):
                now = file_digest(self.lineage.root / one.path)
                if one.job is None and one.digest not in (None, now):
                    state = "is gone" if now is None else "has changed"
                    raise ValueError(
                        f"{one.path}: {state} since {made.path} was made from it; bring it back, or train "
                        "both runs again"
                    )
        older, newer = self._by_age
        used = [
            name
            for config, run, stage in zip(self.configs, self.runs, self.stages, strict=True)
            for name in (*config.learned(run, stage), config.stage(run, stage).evaluation.data)
            if name in older.datasets and name in newer.datasets
        ]
        for name in used:
            if _meaning(older, name) != _meaning(newer, name):
                raise ValueError(
                    f"datasets.{name}: is not the same for {self.runs[0]} and {self.runs[1]}; "
                    "give one of them another name, and train that run again"
                )

    def _configuration(self, hybrids: dict[str, Any], *, all_runs: bool = False) -> dict[str, Any]:
        """Return a configuration with hybrids, and if wanted with all runs of both configurations.

        The other runs do matter: held-out text of all runs is kept out of a dataset with ``decontaminate``.
        """
        older, newer = (config.written for config in self._by_age)
        plain = {key: value for key, value in newer.items() if key not in ("ladders", "foreign")}
        for key in ("datasets", "tokenizers"):
            plain[key] = {**older.get(key, {}), **newer.get(key, {})}
        runs = {**older["runs"], **newer["runs"]} if all_runs else {}
        own = {run: config.written["runs"][run] for run, config in zip(self.runs, self.configs, strict=True)}
        return {**plain, "runs": {**runs, **(own if all_runs else {}), **hybrids}}

    def _measure(self, suspects: list[Suspect], options: Sequence[str]) -> float:
        """Train and evaluate a hybrid by the workflow, and return its metric."""
        name = self.name(suspects)
        block = run_of(hybrid(self.one, suspects), self.order)
        self._hybrids[name] = block
        plain = self._configuration(self._hybrids, all_runs=True)
        stage = block["stages"][-1]["name"]
        results = Path(plain.get("results", "results"))
        target = Results(results).stage(name, stage).evaluation
        if status := run_workflow(plain, self.file, [target], options, self.lineage.base(plain)):
            raise ValueError(
                f"{name}: Snakemake ended with status {status}; its output says why. The same command goes "
                "on from there"
            )
        return _figure(Results(self.lineage.root).stage(name, stage), self.metric)


def _meaning(config: Config, dataset: str) -> list[Any]:
    """Return what decides the ids of a dataset: its settings and those of its tokenizer."""
    block = config.dataset(dataset)
    return [block, config.tokenizers.get(block.tokenizer or "")]


def _figure(folder: StageFolder, metric: str) -> float:
    """Return a figure of a stage's evaluation, or the last one that its training logged under a name.

    Raises:
        ValueError: the stage is not evaluated, or lacks a finite figure of this name.
    """
    if not folder.evaluation.is_file():
        raise ValueError(f"{folder.path}: is not evaluated; run the workflow to its end first")
    evaluation = Evaluation.read(folder.evaluation)
    found: dict[str, Any] = {
        name: one for row in read_rows(folder.metrics) for name, one in row.metrics.items()
    }
    found |= evaluation.model_dump(include={*Evaluation.model_fields} - {"results"}) | metrics(
        evaluation.results
    )
    numbers = {name: value for name, value in found.items() if type(value) in (int, float)}
    if metric not in numbers:
        raise ValueError(f"{folder.path}: {none_such('figure', metric, numbers)}")
    if not math.isfinite(numbers[metric]):
        raise ValueError(f"{folder.path}: {metric} is {numbers[metric]}, which cannot be bisected")
    return float(numbers[metric])
