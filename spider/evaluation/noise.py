"""Runs of a results folder that differ by their seed alone, and how much a seed moves their score.

The recipe of a run is the digest of the settings of its stages without its name and its seed. Runs of one
recipe, trained on the same data and scored on the same text, differ by their seed alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spider.common import files
from spider.common.results import Results
from spider.config import Config, StageSpec
from spider.config.spec import recut

#: Keys of a stage's settings that are not a part of its recipe.
_OWN = ("run", "seed")
#: Keys of an evaluation that a score depends on.
_SCORING = ("text_sha256", "seq_len", "overlap", "n_loops", "precision")
#: Standard deviations in half of a 95% interval.
_Z = 1.96


@dataclass(frozen=True)
class Scored:
    """The last scored stage of a run, read from its records."""

    run: str
    recipe: str
    seed: int
    bpb: float
    weights: str
    text: str
    """SHA-256 of the held-out text."""
    scoring: str
    """Digest of the held-out text and of how it was read."""
    data: str
    """Digest of the data of all stages."""
    seconds: float
    """Seconds of the training of all stages."""


@dataclass(frozen=True)
class Noise:
    """How much seeds alone have moved bits per byte."""

    deviation: float
    """Standard deviation of a run, in bits per byte, pooled over recipes with several seeds."""
    freedom: int
    """Degrees of freedom: seeds beyond the first of each recipe."""

    def hides(self, difference: float, models: int) -> bool:
        """Return whether a difference of two scores, one or both of models, is within the noise."""
        return abs(difference) <= _Z * math.sqrt(models) * self.deviation


def recipe(stages: Iterable[Mapping[str, Any]]) -> str:
    """Return the recipe of a run, given the settings of its stages (`StageSpec.deciding`, or an origin)."""
    kept = [
        {key: value for key, value in recut(one).items() if key in StageSpec.model_fields and key not in _OWN}
        for one in stages
    ]
    return files.digest(kept)


def recipe_of(config: Config, run: str) -> str:
    """Return the recipe of a run of a configuration."""
    return recipe(config.stage(run, stage.name).deciding() for stage in config.run(run).stages)


def scored_run(results: Results, run: str) -> Scored | None:
    """Return the last stage of a run with its score, or None if its training or its score is missing."""
    stages = []
    for folder in results.stages(run):
        if folder.origin.is_file():
            stages.append((files.read_json(folder.origin)["fields"], folder))
    stages.sort(key=lambda one: one[0]["index"])
    if not stages:
        return None
    needed = [stages[-1][1].evaluation, *(folder.receipt for _, folder in stages)]
    if not all(path.is_file() for path in needed):
        return None
    evaluation, *trained = map(files.read_json, needed)
    if evaluation["weights"] != (trained[-1]["averaged_weights"] or trained[-1]["weights"]):
        return None
    return Scored(
        run=run,
        recipe=recipe(fields for fields, _ in stages),
        seed=stages[-1][0].get("seed", StageSpec.model_fields["seed"].default),
        bpb=evaluation["bpb"],
        weights=evaluation["weights"],
        text=evaluation["text_sha256"],
        scoring=files.digest([evaluation[key] for key in _SCORING]),
        data=files.digest([one["data_digest"] for one in trained]),
        seconds=sum(one["seconds"] for one in trained),
    )


def scored_runs(results: Results) -> list[Scored]:
    """Return all runs of a results folder that are trained and scored, sorted by name."""
    return [found for run in results.runs if (found := scored_run(results, run)) is not None]


def noise(runs: Iterable[Scored]) -> Noise | None:
    """Return the noise of a seed in some runs, or None if no recipe has two seeds."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for one in runs:
        groups[one.recipe, one.scoring, one.data].append(one.bpb)
    return pooled([*groups.values()])


def pooled(groups: Sequence[Sequence[float]]) -> Noise | None:
    """Return the noise of a seed, given the scores of each group of runs that differ by their seed."""
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < 1:
        return None
    squares = [(value - math.fsum(group) / len(group)) ** 2 for group in groups for value in group]
    return Noise(math.sqrt(math.fsum(squares) / freedom), freedom)


def undecided(scores: Iterable[tuple[str, float, bool]], noise: Noise | None) -> str | None:
    """Return the sentence that says why a table marks no model as the best, or None if it marks one.

    Args:
        scores: name and bits per byte of each row, and whether it is a model.
    """
    ranked = sorted(scores, key=lambda one: one[1])[:2]
    models = sum(is_model for *_, is_model in ranked)
    if noise is None or len(ranked) < 2 or not models:
        return None
    (best, least, _), (other, next_least, _) = ranked
    if not noise.hides(next_least - least, models):
        return None
    return (
        f"No model is marked as the best: {best} and {other} differ by no more than seeds alone move a score "
        f"({noise.deviation:.4f} bits per byte, one standard deviation). `spider compare` pairs them."
    )


@dataclass(frozen=True)
class Paired:
    """The difference of two models, in bits per byte, by a paired t test."""

    difference: float
    """The second minus the first. It is less than 0 if the second is better."""
    low: float
    high: float
    """95% interval."""
    p: float
    """Probability of a difference as large as this or larger, if there is none."""
    count: int
    pairs: str

    def __str__(self) -> str:
        interval = f"({self.low:+.4f} to {self.high:+.4f}, 95%)"
        return f"{self.difference:+.4f} {interval}, p = {self.p:.2g}, over {self.count:,} {self.pairs}"


def paired(one: Sequence[float], other: Sequence[float], scale: float, pairs: str) -> Paired:
    """Return what pairs of values show, whose differences are multiplied by ``scale``."""
    from scipy import stats

    test = stats.ttest_rel(other, one)
    low, high = (float(bound) * scale for bound in test.confidence_interval())
    difference = (math.fsum(other) - math.fsum(one)) / len(one) * scale
    return Paired(difference, low, high, float(test.pvalue), len(one), pairs)


def paired_by_seed(results: Results, one: str, other: str) -> list[Paired]:
    """Return what two runs show over the seeds that both were trained with, if those are several."""
    known = scored_runs(results)
    runs = {found.run: found for found in known}
    if one not in runs or other not in runs or runs[one].recipe == runs[other].recipe:
        return []
    sides = []
    for of in (runs[one], runs[other]):
        alike = [run for run in known if (run.recipe, run.text, run.data) == (of.recipe, of.text, of.data)]
        sides.append({run.seed: run.bpb for run in alike})
    seeds = sorted(sides[0].keys() & sides[1].keys())
    first, second = ([side[seed] for seed in seeds] for side in sides)
    return [paired(first, second, 1.0, "seeds")] if len(seeds) > 1 else []
