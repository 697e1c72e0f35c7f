"""Read the stages of a run, finished or not, from the results folder, with the loss curve of their logs.

A stage that has not begun has a record too, from the configuration. A run that was trained by hand is in no
configuration, and its folders define its stages. What was trained is read from the checkpoint rather than
from the configuration, which may have changed since. The stage's notes report such a change.

Curves are drawn over *bytes trained*, to compare runs of different batch sizes. The bytes of a stage are
spread evenly over its steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spider.checkpoints.records import MANIFEST, Manifest, Origin, Receipt, steps
from spider.common.formatting import duration
from spider.common.results import CompressedFolder, Results, StageFolder
from spider.config import Config, StageSpec, nearest
from spider.config.spec import sources_of, windows_of
from spider.data.mixture import read_of_each
from spider.evaluation.records import CheckpointScores, Evaluation, Sample, Training, results_of
from spider.evaluation.result import Result
from spider.training.metrics import Row, read_rows


def bits_per_byte(metrics: dict[str, float]) -> float:
    """Return the training loss of a row; NaN for a row without one."""
    return metrics.get("train/bpb", metrics.get("train/loss", math.nan) / math.log(2))


def validated(metrics: dict[str, float]) -> float:
    """Return the validation score of a row; NaN for a row without one."""
    return metrics.get("val/bpb", math.nan)


@dataclass(frozen=True)
class Log:
    """The log of one stage's training."""

    run: str
    stage: str
    rows: list[Row]
    """Rows of metrics.jsonl."""
    span: Receipt | Training
    """Steps, tokens and bytes that the stage has trained."""
    begin: float
    """Bytes of the run before this stage."""
    held_out: Sequence[tuple[float, float]] = ()
    """Bytes of the run and bits per byte of the held-out text, for each scored checkpoint of the stage."""

    @property
    def end(self) -> float:
        return self.begin + self.span.bytes

    @property
    def best(self) -> tuple[int, float] | None:
        """Return the best validation as step of the run and bits per byte; None without validation."""
        found = [(row.step, validated(row.metrics)) for row in self.rows]
        return min((one for one in found if math.isfinite(one[1])), key=lambda one: one[1], default=None)

    def points(
        self, read: Callable[[dict[str, float]], float] = bits_per_byte
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes trained (S,) and a value (S,) for each row whose value is finite.

        Args:
            read: Returns the value of a row's metrics.
        """
        first = self.span.global_step - self.span.steps
        logged = [
            (row.step - first, read(row.metrics))
            for row in self.rows
            if first < row.step <= self.span.global_step
        ]
        finite = [(step, value) for step, value in logged if math.isfinite(value)]
        steps_S, value_S = np.array(finite, float).reshape(-1, 2).T
        return self.begin + steps_S / max(1, self.span.steps) * self.span.bytes, value_S


def read_log(folder: StageFolder, begin: float, end: Evaluation, earlier: Sequence[Evaluation] = ()) -> Log:
    """Return the log of a finished stage, with the evaluations at its end and of earlier checkpoints."""
    receipt = Receipt.read(folder.receipt)
    held_out = _held_out(begin, [*earlier, end])
    return Log(receipt.run, receipt.stage, read_rows(folder.metrics), receipt, begin, held_out)


def _held_out(begin: float, scored: Sequence[Evaluation]) -> list[tuple[float, float]]:
    """Return bytes of the run and bits per byte of the evaluations of a stage that begins at ``begin``."""
    return [(begin + one.training.bytes, one.bpb) for one in scored]


def smoothed(y_S: np.ndarray) -> np.ndarray:
    """Return centred means over about a twentieth of the points; fewer points at both ends."""
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
    """A `spider.config.StageSpec` as JSON."""
    configured: StageSpec | None
    """The stage in the current configuration; None if it is not in it."""
    receipt: Receipt | None
    manifest: Manifest | None
    """Manifest of the final checkpoint, or of the newest one of an unfinished stage."""
    evaluation: Evaluation | None
    checkpoints: list[Evaluation]
    """Evaluations of its checkpoints before the end."""
    left_out: dict[str, str]
    """Why a checkpoint has no score, by the name of its folder."""
    results: dict[str, Result]
    """All results of the stage, by name."""
    compressed: dict[str, Result]
    """All results of its compressed model, by name."""
    sample: Sample | None
    log: Log
    """Log of the training. The span of an unfinished stage ends at its last row; its bytes are its tokens."""

    @property
    def data(self) -> str:
        """Return the dataset of the stage, or those of a mixture with their shares and the windows read."""
        sources = sources_of(self.spec)
        if not isinstance(self.spec["settings"].get("data"), dict):
            return next(iter(sources))
        position = self.manifest.position if self.manifest else None
        read = read_of_each(position) if position else {}
        windows = {name: f", {count:,} windows read" for name, count in read.items()}
        return "; ".join(f"{name} {share:.3g}{windows.get(name, '')}" for name, share in sources.items())

    @property
    def state(self) -> str:
        """Return ``evaluated``, ``trained``, ``begun`` or ``waiting``."""
        if self.receipt:
            return "evaluated" if self.evaluation else "trained"
        return "begun" if self.log.rows or self.manifest else "waiting"

    @property
    def notes(self) -> Iterator[str]:
        """Yield sentences about missing files, and about files that do not fit together."""
        arguments = f"{self.folder.path.parent.name}/{self.name}"
        stage = f"Stage {self.name}"
        if self.state == "waiting":
            yield f"{stage} has not begun: `spider train {arguments}`, or the workflow, trains it."
        if self.state == "begun":
            done = f"step {self.log.span.steps:,}"
            if self.manifest and self.manifest.end:
                done += f" of {self.manifest.end:,}"
            if self.log.rows:
                seconds = max(0, time.time() - self.folder.metrics.stat().st_mtime)
                done += f", logged {duration(seconds)} ago"
            remedy = f"If no process trains it, `spider train {arguments}` or the workflow continues."
            yield f"{stage} is not finished: {done}. {remedy}"
        if self.receipt is None:
            return
        if self.configured and self.receipt.identity not in self.configured.identities:
            digests = f"digest {self.receipt.identity}, now {self.configured.identity}"
            yield (
                f"{stage} was trained with other settings than the current configuration has ({digests}); "
                "this page shows what was trained."
            )
        if self.manifest is None:
            path = self.folder.path / self.receipt.checkpoint
            yield f"The final checkpoint of stage {self.name} is missing: {path}."
        if self.evaluation is None:
            yield f"{stage} is trained and not evaluated: `spider evaluate {arguments}`."
        elif self.evaluation.weights != (self.receipt.averaged_weights or self.receipt.weights):
            yield (
                f"The evaluation of stage {self.name} is of other weights ({self.evaluation.weights}) than "
                f"the stage has now: `spider evaluate {arguments}`."
            )
        elif self.sample is None:
            yield f"{stage} has written no sample: `spider sample {arguments}`."
        elif self.sample.weights != self.evaluation.weights:
            yield f"The sample of stage {self.name} is of other weights: `spider sample {arguments}`."
        for name, reason in self.left_out.items():
            yield f"The checkpoint {name} of stage {self.name} has no score: {reason}"


def read_stages(config: Config, results: Results, run: str) -> list[StageRecord]:
    """Return all stages of a run, in the order of training.

    Raises:
        ValueError: Neither the configuration nor the results folder has the run, or a file is damaged.
    """
    configured = run in config.runs
    stages: list[StageRecord] = []
    begin = 0.0
    first = 0
    for spec in _specs(config, results, run):
        stage = _read_stage(spec, results.stage(run, spec.stage), begin, first, configured)
        stages.append(stage)
        begin = stage.log.end
        first = stage.log.span.global_step
    return stages


def _specs(config: Config, results: Results, run: str) -> list[StageSpec]:
    """Return the stages of a run by the configuration, or by the folders of a run that is not in it."""
    if run in config.runs:
        return [config.stage(run, stage.name) for stage in config.runs[run].stages]
    origins = [Origin.read(folder.origin) for folder in results.stages(run) if folder.origin.exists()]
    if not origins:
        known = dict.fromkeys([*config.runs, *results.runs])
        raise ValueError(f"no run {run!r} in {results.root / 'runs'}{nearest(run, known)}")
    return sorted((origin.spec for origin in origins), key=lambda spec: spec.index)


def _read_stage(
    spec: StageSpec, folder: StageFolder, begin: float, first: int, configured: bool
) -> StageRecord:
    """Return the record of a stage; the stages before it end at ``begin`` bytes and step ``first``."""
    receipt = Receipt.read(folder.receipt) if folder.receipt.exists() else None
    checkpoints = [folder.path / receipt.checkpoint] if receipt else steps(folder.checkpoints)
    complete = [path / MANIFEST for path in checkpoints if (path / MANIFEST).is_file()]
    manifest = Manifest.read(complete[-1]) if complete else None
    evaluation = Evaluation.read(folder.evaluation) if folder.evaluation.exists() else None
    path = folder.checkpoint_scores
    between = CheckpointScores.read(path) if evaluation and path.exists() else None
    earlier = between.beside(evaluation) if evaluation and between else []
    rows = read_rows(folder.metrics)
    plain = manifest.spec if manifest else spec.model_dump(mode="json")
    span: Receipt | Training
    if receipt:
        span = receipt
    else:
        if manifest:
            first = manifest.global_step - manifest.step
        last = max((row.step for row in rows), default=first)
        s = plain["settings"]
        tokens = (last - first) * s["seq_len"] * windows_of(s)
        span = Training(steps=last - first, global_step=last, tokens=tokens, bytes=tokens, seconds=0)
    return StageRecord(
        name=spec.stage,
        folder=folder,
        spec=plain,
        configured=spec if configured else None,
        receipt=receipt,
        manifest=manifest,
        evaluation=evaluation,
        checkpoints=earlier,
        left_out=between.left_out if between else {},
        results=results_of(folder) if evaluation else {},
        compressed=results_of(CompressedFolder(folder.compressed)),
        sample=Sample.read(folder.sample) if folder.sample.exists() else None,
        log=Log(
            run=plain["run"],
            stage=spec.stage,
            rows=rows,
            span=span,
            begin=begin,
            held_out=_held_out(begin, [*earlier, evaluation]) if evaluation and receipt else (),
        ),
    )
