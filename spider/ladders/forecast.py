"""``forecast.json`` of a ladder: the losses of larger runs, forecast from its finished runs.

A run that names a ladder as its ``forecast`` needs this file before it starts. It copies the file into its
stage's folder (`keep`), and ``origin.json`` records the digest. So no forecast can be written after the
training began. A run of the ladder that changes later makes another forecast, and the copy is shown as stale.
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

from spider import files
from spider.checkpoints.records import Origin, Receipt
from spider.config import Config
from spider.config.formulas import evaluate
from spider.config.ladders import FARTHEST
from spider.errors import TrainingError
from spider.evaluation.records import Evaluation
from spider.ladders.fit import Fit, Point, fit
from spider.record import Record
from spider.results import Results, StageFolder


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

    def at(self, flops: float) -> Prediction | None:
        """Return the prediction for some FLOPs, if there is one."""
        return next((one for one in self.predictions if one.flops == flops), None)

    @property
    def digest(self) -> str:
        """Digest of all but the time."""
        return files.digest(self.model_dump(mode="json", exclude={"time"}))


def forecast(config: Config, results: Results, name: str) -> Forecast:
    """Forecast from the runs of a ladder, which all have to be evaluated.

    Raises:
        ValueError: a run is not trained or evaluated, or two runs are scored or trained on different text.
    """
    ladder = config.rungs[name]
    rungs: list[Rung] = []
    texts: dict[str, str] = {}
    data: dict[str, str] = {}
    for run in ladder.rungs:
        rung, evaluation, receipt = read_rung(config, results, run)
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
    for flops in config.forecast_at(name) if problem is None else ():
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


def read_rung(config: Config, results: Results, run: str) -> tuple[Rung, Evaluation, Receipt]:
    """Return a finished run as a rung, with its evaluation and its receipt.

    Raises:
        ValueError: the run is not trained or not evaluated.
    """
    block = config.runs[run]
    stage = block.stages[-1]
    folder = results.stage(run, stage.name)
    receipt, evaluation = Receipt.read(folder.receipt), Evaluation.read(folder.evaluation)
    spec = config.stage(run, stage.name)
    ladder = next(one for one in config.rungs.values() if run in one.runs or one.name == block.forecast)
    size: Any = block if not ladder.size.startswith("model.") else block.model
    for part in ladder.size.removeprefix("model.").split("."):
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
    block = config.ladders[name]
    # A width may have to be a multiple of 8, as all sizes of the ladder then are.
    unit = math.gcd(*map(int, sizes))
    size = math.exp(height + slope * math.log(parameters))
    settings = {block.size: float(unit * max(1, round(size / unit))), "target_flops": flops}
    names = {key.rpartition(".")[2]: value for key, value in settings.items()} | {"seed": 1}
    for key, formula in block.links.items():
        settings[key] = float(evaluate(str(formula), names))
        names.setdefault(key.rpartition(".")[2], settings[key])
    return Prediction(
        flops=flops,
        bpb=fitted.loss(flops),
        low=low,
        high=high,
        parameters=parameters,
        tokens=flops / 6 / parameters,
        settings=settings,
    )


def keep(written: Path, folder: Path, flops: float | None) -> str:
    """Copy a forecast into the folder of a stage that is about to start; return the digest to record.

    A training that goes on keeps the forecast that it began with.

    Raises:
        TrainingError: the forecast is missing, has no prediction for these FLOPs, or the training began
            before it.
    """
    stage = StageFolder(folder)
    if stage.origin.exists():
        recorded = Origin.read(stage.origin).fields.get("forecast")
        if recorded is None:
            raise TrainingError(
                f"{folder}: began to train before its forecast was written, so the forecast would prove "
                "nothing; move the folder away to train again, or remove `forecast` from the run"
            )
        return str(recorded)
    try:
        found = Forecast.read(written)
    except ValueError as error:
        raise TrainingError(f"{error}; this run needs a forecast before it starts") from None
    if found.problem or flops is None or found.at(flops) is None:
        reason = found.problem or f"it has no prediction for {flops} FLOPs"
        raise TrainingError(f"{written}: {reason}; this run needs a forecast before it starts")
    found.write(stage.forecast)
    return found.digest


def kept(folder: StageFolder) -> tuple[Forecast, str | None] | None:
    """Return the forecast in the folder of a stage, and the digest that was recorded when it began."""
    if not folder.forecast.is_file():
        return None
    recorded = Origin.read(folder.origin).fields.get("forecast") if folder.origin.is_file() else None
    return Forecast.read(folder.forecast), recorded


def against(folder: StageFolder, bpb: float) -> str | None:
    """Return a phrase that compares a result with the forecast that its training began with, if any."""
    if not (folder.forecast.is_file() and folder.origin.is_file()):
        return None
    fields = Origin.read(folder.origin).fields
    forecast = Forecast.read(folder.forecast)
    found = forecast.at(fields["settings"]["target_flops"])
    if found is None or forecast.digest != fields.get("forecast"):
        return "the forecast was edited after the training began"
    inside = "inside" if found.low <= bpb <= found.high else "outside"
    return (
        f"forecast by the ladder {forecast.ladder} before it started: {found.bpb:.4f} ({found.low:.4f} to "
        f"{found.high:.4f}), {found.bpb / bpb - 1:+.1%} from the result, which is {inside} the interval"
    )


def best_of(config: Config, results: Results, runs: Sequence[str]) -> list[Rung]:
    """Return the finished ones of some runs."""
    names = [(run, config.runs[run].stages[-1].name) for run in runs]
    done = [run for run, stage in names if results.stage(run, stage).evaluation.is_file()]
    return [read_rung(config, results, run)[0] for run in done]
