"""``verdicts.jsonl``: a row for each verdict and each failure, with the digests of what it compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from filelock import FileLock
from pydantic import BaseModel, ValidationError

from spider.common import files
from spider.common.results import Results
from spider.config import Config
from spider.evaluation.noise import recipe_of
from spider.evaluation.result import SECONDS, Number, Result, Row

Outcome = Literal["better", "worse", "not shown", "failed"]


class Pair(BaseModel, frozen=True):
    """Two runs with the same seed: names, digests of the scored weights, and bits per byte."""

    seed: int
    runs: tuple[str, str]
    weights: tuple[str, str]
    bpb: tuple[float, float]


class Verdict(BaseModel, frozen=True):
    """The answer whether a candidate is better than a baseline."""

    time: float
    """When the verdict fell, in seconds since 1970."""
    baseline: str
    """Name of a run. ``candidate`` is alike."""
    candidate: str
    change: list[str]
    """Settings of the candidate that differ from the baseline, as `spider try` was given them."""
    baseline_recipe: str
    """Digest of the settings without the seed. ``candidate_recipe`` is alike."""
    candidate_recipe: str
    data: dict[str, str]
    """Digest of each dataset that either is trained or scored on."""
    outcome: Outcome
    reason: str
    difference: float | None = None
    """Mean of candidate minus baseline, in bits per byte."""
    interval: tuple[float, float] | None = None
    pairs: list[Pair] = []
    noise: float | None = None
    """Standard deviation of a run over seeds, as earlier runs have shown it."""
    trainings: int = 0
    """Runs that were trained for this verdict. Others were there before."""
    seconds: float = 0.0
    """Seconds of these trainings."""

    @property
    def final(self) -> bool:
        """Whether more pairs are of no use, so that the verdict is not sought again."""
        return self.reason != BUDGET

    def changed(self, data: dict[str, str]) -> str | None:
        """Return a dataset whose digest is another one than at the time of the verdict, or None."""
        return next((name for name, now in data.items() if self.data.get(name, now) != now), None)


#: Reason of a verdict that more time could change.
BUDGET = "the budget is spent"


def verdicts_of(results: Results) -> Path:
    """Return the file of all verdicts."""
    return results.root / "verdicts.jsonl"


def read_verdicts(path: Path) -> list[Verdict]:
    """Return the rows of ``verdicts.jsonl``, the oldest first; none if there is no file.

    Raises:
        ValueError: a row is malformed.
    """
    found = []
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            found.append(Verdict.model_validate(json.loads(line)))
        except (ValidationError, json.JSONDecodeError):
            raise ValueError(f"{path}:{number}: is not a verdict; remove the line") from None
    return found


def add_verdict(path: Path, verdict: Verdict) -> None:
    """Add a row to ``verdicts.jsonl``, and write the table of all rows where the comparison finds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        before = path.read_text("utf-8") if path.is_file() else ""
        files.write_text(path, before + verdict.model_dump_json() + "\n")
        shown = as_result(read_verdicts(path)).model_dump(mode="json")
        files.write_json(Results(path.parent).report / "verdicts.json", {"result": shown})


def as_result(verdicts: list[Verdict]) -> Result:
    """Return the table of some verdicts."""
    rows = [
        Row(
            name=one.candidate,
            label=f"{' '.join(one.change) or one.candidate} against {one.baseline}",
            value=None,
            text=one.outcome,
            columns={
                "bits per byte": Number(
                    value=None, text="" if one.difference is None else f"{one.difference:+.4f}"
                ),
                "95% interval": Number(
                    value=None, text="{:+.4f} to {:+.4f}".format(*one.interval) if one.interval else ""
                ),
                "pairs": Number(value=len(one.pairs)),
                "trainings": Number(value=one.trainings),
                "time": Number(value=one.seconds, unit=SECONDS),
            },
        )
        for one in verdicts
    ]
    return Result(title="Verdicts", value="outcome", rows=rows)


def data_of(config: Config, results: Results, *runs: str) -> dict[str, str]:
    """Return the digest of each encoded dataset that some runs are trained or scored on, as it is now."""
    names: list[str] = []
    for run in runs:
        last = config.stage(run, config.run(run).stages[-1].name)
        names += [*config.learned(run, last.stage), last.evaluation.data or last.data]
    paths = {name: results.shards(name) / "metadata.json" for name in names}
    return {name: files.read_json(path)["digest"] for name, path in paths.items() if path.is_file()}


def moved(verdict: Verdict, config: Config, results: Results) -> str | None:
    """Return what has changed since a verdict, so that it does not hold today; None if nothing has."""
    if verdict.baseline not in config.runs:
        return f"{verdict.baseline} is not in the configuration"
    if recipe_of(config, verdict.baseline) != verdict.baseline_recipe:
        return f"the baseline {verdict.baseline} has moved"
    changed = verdict.changed(data_of(config, results, verdict.baseline))
    return f"the dataset {changed} has changed" if changed else None
