"""``forecast.json`` of a ladder: the losses of larger runs, forecast from its finished runs.

A run that waits for it gets a copy in its own folder (`claim`), which is an input of its training. So no
forecast can be written after the training began, and the record of the training has the digest of the copy. A
run of the ladder that changes later makes another forecast, and the copy is shown as stale.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel
from pydantic.dataclasses import dataclass as pydantic_dataclass

from spider.checkpoints.records import Receipt
from spider.common import files
from spider.common.record import Record
from spider.common.results import Results
from spider.config import Config
from spider.evaluation.records import Evaluation
from spider_lab.fit import LEAST_STEPS, Fit, Point, fit
from spider_lab.ladders import FARTHEST, budgets_of, ladders_of, rungs_of


@pydantic_dataclass(frozen=True)
class Rung(Point):
    """A finished run of a ladder."""

    weights: str
    """Digest of the scored weights."""


class Prediction(BaseModel, frozen=True):
    """The forecast for a run of some FLOPs that has the best size."""

    flops: float
    bpb: float
    low: float
    high: float
    """Bounds of the 90% interval of one run."""
    parameters: float
    """Best N, the FLOPs a token over 6."""
    tokens: float
    settings: dict[str, float]
    """The size that is nearest to this N, in steps of the common divisor of all sizes, and its links."""


class Forecast(Record):
    """``forecast.json``."""

    WHAT: ClassVar[str] = "a forecast"

    ladder: str
    time: float
    """When it was written, in seconds since 1970."""
    held_out: str
    """SHA-256 of the text that all runs are scored on."""
    rungs: list[Rung]
    left_out: list[str]
    problem: str | None
    """Reason why there is no prediction."""
    predictions: list[Prediction]

    @property
    def fit(self) -> Fit:
        """The law, fitted again to the same runs."""
        return fit(self.rungs)

    @property
    def digest(self) -> str:
        """Digest of all but the time."""
        return files.digest(self.model_dump(mode="json", exclude={"time"}))


def forecast(config: Config, results: Results, name: str) -> Forecast:
    """Forecast from the runs of a ladder, which all have to be evaluated.

    Raises:
        ValueError: a run is not trained or evaluated, or two runs are scored or trained on different text.
    """
    rungs: list[Rung] = []
    texts: dict[str, str] = {}
    data: dict[str, str] = {}
    for run in rungs_of(config, name):
        rung, evaluation, receipt = read_rung(config, results, name, run)
        rungs.append(rung)
        texts.setdefault(evaluation.text_sha256, run)
        data.setdefault(receipt.data_digest, run)
    for what, found in (("scored", texts), ("trained", data)):
        if len(found) > 1:
            one, other, *_ = found.values()
            raise ValueError(f"ladders.{name}: {one} and {other} are {what} on different text")
    fitted = fit(rungs)
    problem = fitted.problem
    predictions: list[Prediction] = []
    for flops in budgets_of(config, name) if problem is None else ():
        if not fitted.largest < flops <= FARTHEST * fitted.largest:
            problem = (
                f"{flops:.3g} FLOPs are not between the largest budget of the fit, {fitted.largest:.3g}, and "
                f"{FARTHEST:.0f} times that"
            )
            predictions = []
            break
        predictions.append(_prediction(config, name, fitted, flops))
    return Forecast(
        format=Forecast.FORMAT,
        ladder=name,
        time=time.time(),
        held_out=next(iter(texts)),
        rungs=rungs,
        left_out=fitted.left_out,
        problem=problem,
        predictions=predictions,
    )


def read_rung(config: Config, results: Results, name: str, run: str) -> tuple[Rung, Evaluation, Receipt]:
    """Return a finished run as a rung, with its evaluation and its receipt.

    Raises:
        ValueError: the run is not trained or not evaluated.
    """
    block = config.runs[run]
    stage = block.stages[-1]
    folder = results.stage(run, stage.name)
    receipt, evaluation = Receipt.read(folder.receipt), Evaluation.read(folder.evaluation)
    spec = config.stage(run, stage.name)
    size: Any = block
    for part in ladders_of(config)[name].size.split("."):
        size = getattr(size, part)
    assert spec.settings.target_flops is not None, "a run of a ladder has a budget"
    rung = Rung(
        run=run,
        budget=spec.settings.target_flops,
        size=size,
        seed=block.seed,
        flops=evaluation.flops_per_token * receipt.tokens,
        parameters=evaluation.flops_per_token / 6,
        tokens=receipt.tokens,
        steps=receipt.steps,
        bpb=evaluation.bpb,
        weights=evaluation.weights,
    )
    return rung, evaluation, receipt


def _prediction(config: Config, name: str, fitted: Fit, flops: float) -> Prediction:
    parameters = fitted.best_size(flops)
    low, high = fitted.interval(flops)
    pairs = [zip(curve.sizes, curve.parameters, strict=True) for curve in fitted.curves]
    sizes = {size: N for curve in pairs for size, N in curve}
    slope, height = np.polyfit(np.log([*sizes.values()]), np.log([*sizes]), 1)
    ladder = ladders_of(config)[name]
    # A width may have to be a multiple of 8, as all sizes of the ladder then are.
    unit = math.gcd(*map(int, sizes))
    size = math.exp(height + slope * math.log(parameters))
    settings = {ladder.size: float(unit * max(1, round(size / unit))), "target_flops": flops}
    settings |= ladder.linked(f"ladders.{name}", {**settings, "seed": 1})
    return Prediction(
        flops=flops,
        bpb=fitted.loss(flops),
        low=low,
        high=high,
        parameters=parameters,
        tokens=flops / 6 / parameters,
        settings=settings,
    )


def too_short(config: Config, ladder: str) -> list[str]:
    """Return a line for each run of a ladder that has too few steps, so that no forecast is fitted to it."""
    from spider.workflow.describe import describe

    steps = {run: describe(config, run)["stages"][-1]["steps"] for run in rungs_of(config, ladder)}
    return [
        f"{run}: {count} steps, and a ladder leaves out runs under {LEAST_STEPS}; give it more FLOPs, a "
        "smaller size or a smaller batch"
        for run, count in steps.items()
        if count < LEAST_STEPS
    ]


def path_of(results: Results, ladder: str) -> Path:
    """Return the file of a ladder's forecast."""
    return results.root / "ladders" / ladder / "forecast.json"


def copy_of(results: Results, run: str) -> Path:
    """Return the copy of the forecast that a run begins with."""
    return results.run(run) / "forecast.json"


def claim(config: Config, results: Results, ladder: str, run: str) -> Path:
    """Copy the forecast of a ladder for a run that is about to start.

    Raises:
        ValueError: the forecast has no prediction for this run's FLOPs, or the training began before it.
    """
    stage = config.runs[run].stages[0]
    folder, flops = results.stage(run, stage.name), config.stage(run, stage.name).settings.target_flops
    if folder.origin.exists():
        raise ValueError(
            f"{folder.path}: began to train before its forecast was written, so the forecast would prove "
            f"nothing; move the folder away to train again, or remove {run} from the ladder"
        )
    found = Forecast.read(path_of(results, ladder))
    if found.problem or not any(one.flops == flops for one in found.predictions):
        reason = found.problem or f"it has no prediction for {flops} FLOPs"
        raise ValueError(f"{path_of(results, ladder)}: {reason}; {run} needs a forecast before it starts")
    found.write(copy_of(results, run))
    return copy_of(results, run)


def finished(config: Config, results: Results, ladder: str, runs: Sequence[str]) -> list[Rung]:
    """Return the finished ones of some runs."""
    names = [(run, config.runs[run].stages[-1].name) for run in runs]
    done = [run for run, stage in names if results.stage(run, stage).evaluation.is_file()]
    return [read_rung(config, results, ladder, run)[0] for run in done]
