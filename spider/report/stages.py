"""What the results folder holds of each stage of a run, finished or not, and the loss curve of its log.

A stage that the configuration names but nobody has begun is a record too, with what the configuration says of
it; a run that was trained by hand, with settings of its own, is in no configuration, and is known by its
folders alone. What was trained is taken from the checkpoint rather than from the configuration, which may
have changed since; where it has, the stage's notes say so.

A curve is drawn over *bytes trained*, which compares runs of different batch sizes: a stage's bytes are
spread evenly over its steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spider.checkpoints.records import MANIFEST, Manifest, Origin, Receipt, steps
from spider.config import Config, nearest
from spider.evaluation.records import Evaluation, Sample, Training, further_results
from spider.evaluation.result import Result
from spider.report.formatting import duration
from spider.results import Results, StageFolder
from spider.training.metrics import Row, read_rows

#: How far a stage has come.
Span = Receipt | Training


def bits_per_byte(metrics: dict[str, float]) -> float:
    """Training loss of a row; NaN where it has none."""
    return metrics.get("train/bpb", metrics.get("train/loss", math.nan) / math.log(2))


def validated(metrics: dict[str, float]) -> float:
    """What a validation on the way found; NaN in a row without."""
    return metrics.get("val/bpb", math.nan)


@dataclass(frozen=True)
class Log:
    """What one stage's training logged."""

    run: str
    stage: str
    rows: list[Row]
    """Of metrics.jsonl."""
    span: Span
    begin: float
    """Bytes of the run before this stage."""
    held_out: float | None = None
    """bpb on the validation text after the stage."""

    @property
    def end(self) -> float:
        return self.begin + self.span.bytes

    @property
    def best(self) -> tuple[int, float] | None:
        """The run's step that validated best, and its bits per byte; None where none did."""
        found = [(row.step, validated(row.metrics)) for row in self.rows]
        finite = [one for one in found if math.isfinite(one[1])]
        return min(finite, key=lambda one: one[1]) if finite else None

    def points(
        self, read: Callable[[dict[str, float]], float] = bits_per_byte
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes trained (S,) and a value (S,) at each row; ``read`` takes it out, unless it is not finite."""
        last, steps = self.span.global_step, self.span.steps
        logged = [
            (row.step - last + steps, value)
            for row in self.rows
            if last - steps < row.step <= last and math.isfinite(value := read(row.metrics))
        ]
        steps_S, value_S = np.array(logged, float).reshape(-1, 2).T
        return self.begin + steps_S / max(1, steps) * self.span.bytes, value_S


def read_log(folder: StageFolder, begin: float, held_out: float) -> Log:
    """Of a finished stage, from its files."""
    receipt = Receipt.read(folder.receipt)
    return Log(receipt.run, receipt.stage, read_rows(folder.metrics), receipt, begin, held_out)


def smoothed(y_S: np.ndarray) -> np.ndarray:
    """Mean of about a twentieth of the points, centred so that it does not lag; narrower at both ends."""
    n = len(y_S)
    at_S = np.arange(n)
    half_S = np.minimum(np.minimum(at_S, n - 1 - at_S), 1 + n // 40)
    sums = np.concatenate([[0.0], np.cumsum(y_S)])
    return (sums[at_S + half_S + 1] - sums[at_S - half_S]) / (2 * half_S + 1)


@dataclass(frozen=True)
class StageRecord:
    """One stage on disk."""

    name: str
    folder: StageFolder
    spec: dict[str, Any]
    """A `spider.config.StageSpec` as plain JSON."""
    configured: str | None
    """Identity of the stage as it is configured now; None: it is not."""
    receipt: Receipt | None
    manifest: Manifest | None
    """Of the final checkpoint, or of the newest one of a stage that is not finished."""
    evaluation: Evaluation | None
    results: dict[str, Result]
    """What was measured of it, by name."""
    sample: Sample | None
    log: Log
    """What is not finished has no score at its end, and has come as far as its last row says; its bytes then
    count special ids as well."""

    @property
    def state(self) -> str:
        """``evaluated``, ``trained``, ``begun`` or ``waiting``."""
        if self.receipt:
            return "evaluated" if self.evaluation else "trained"
        return "begun" if self.log.rows or self.manifest else "waiting"

    @property
    def notes(self) -> Iterator[str]:
        """Sentences on what is missing or does not fit."""
        at, stage = f"{self.folder.path.parent.name} {self.name}", f"Stage {self.name}"
        receipt, measured, again = self.receipt, self.evaluation, f"`spider evaluate {at}`"
        if self.state == "waiting":
            yield f"{stage} has not begun: `spider train {at}`, or the workflow, trains it."
        if self.state == "begun":
            done = f"step {self.log.span.steps:,}"
            if self.manifest and self.manifest.end:
                done += f" of {self.manifest.end:,}"
            if self.log.rows:
                ago = time.time() - self.folder.metrics.stat().st_mtime
                done += f", logged {duration(max(0, ago))} ago"
            end = f"If nothing trains it, `spider train {at}` or the workflow goes on."
            yield f"{stage} is not finished: {done}. {end}"
        if receipt is None:
            return
        if self.configured and self.configured != receipt.identity:
            digests = f"digest {receipt.identity}, now {self.configured}"
            said = f"with other settings than the configuration says now ({digests})"
            yield f"{stage} was trained {said}; this page shows what was trained."
        if self.manifest is None:
            path = self.folder.path / receipt.checkpoint
            yield f"The final checkpoint of stage {self.name} is gone: {path}."
        if measured is None:
            yield f"{stage} is trained and not evaluated: {again}."
        elif measured.weights != (receipt.averaged_weights or receipt.weights):
            others = f"other weights ({measured.weights}) than those that it has now"
            yield f"The evaluation of stage {self.name} is of {others}: {again}."
        elif self.sample is None:
            yield f"{stage} has written no sample: `spider sample {at}`."
        elif self.sample.weights != measured.weights:
            yield f"The sample of stage {self.name} is of other weights: `spider sample {at}`."


def read_stages(config: Config, results: Results, run: str) -> list[StageRecord]:
    """All stages of a run, in the order of training; `ValueError` where neither the configuration nor the
    results folder knows the run, or names a file there that is damaged."""
    if configured := run in config.runs:
        specs = [config.stage(run, stage.name) for stage in config.runs[run].stages]
    else:
        origins = [Origin.read(s.origin) for s in results.stages(run) if s.origin.exists()]
        if not origins:
            known = dict.fromkeys([*config.runs, *results.runs])
            raise ValueError(f"no run {run!r} in {results.root / 'runs'}{nearest(run, known)}")
        specs = sorted((origin.spec for origin in origins), key=lambda spec: spec.index)
    stages: list[StageRecord] = []
    begin = first = 0
    for spec in specs:
        folder = results.stage(run, spec.stage)
        receipt = Receipt.read(folder.receipt) if folder.receipt.exists() else None
        checkpoints = [folder.path / receipt.checkpoint] if receipt else steps(folder.checkpoints)
        whole = [path / MANIFEST for path in checkpoints if (path / MANIFEST).is_file()]
        manifest, rows = Manifest.read(whole[-1]) if whole else None, read_rows(folder.metrics)
        plain = manifest.spec if manifest else spec.model_dump(mode="json")
        if manifest:
            first = manifest.global_step - manifest.step
        last, s = max((row.step for row in rows), default=first), plain["settings"]
        done = (last - first) * s["seq_len"] * s["micro_batch"] * s["grad_accum"]
        span = receipt or Training(steps=last - first, global_step=last, tokens=done, bytes=done, seconds=0)
        evaluation = Evaluation.read(folder.evaluation) if folder.evaluation.exists() else None
        sample = Sample.read(folder.sample) if folder.sample.exists() else None
        held_out = evaluation.bpb if evaluation and receipt else None
        log = Log(plain["run"], spec.stage, rows, span, begin, held_out)
        now = spec.identity if configured else None
        results_of_stage = evaluation.all_results | further_results(folder) if evaluation else {}
        stages.append(
            StageRecord(
                name=spec.stage,
                folder=folder,
                spec=plain,
                configured=now,
                receipt=receipt,
                manifest=manifest,
                evaluation=evaluation,
                results=results_of_stage,
                sample=sample,
                log=log,
            )
        )
        begin, first = begin + span.bytes, span.global_step
    return stages
