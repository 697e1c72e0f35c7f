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
from functools import cached_property
from typing import Any

import numpy as np

from spider.checkpoints.metrics import Row, read_rows
from spider.checkpoints.records import MANIFEST, Manifest, Origin, Receipt, steps
from spider.common.formatting import duration
from spider.common.results import CompressedFolder, Results, StageFolder
from spider.config import Config, StageSpec, nearest
from spider.config.spec import sources_of, windows_of
from spider.data.mixture import read_of_each
from spider.evaluation.records import CheckpointScores, Evaluation, Sample, Training, results_of
from spider.evaluation.result import Result


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
    held_out: float | None = None
    """Bits per byte of the held-out text at the end of the stage."""

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


def read_log(folder: StageFolder, begin: float, end: Evaluation) -> Log:
    """Return the log of a finished stage, with the evaluation at its end."""
    receipt = Receipt.read(folder.receipt)
    return Log(receipt.run, receipt.stage, read_rows(folder.metrics), receipt, begin, end.bpb)


def smoothed(y_S: np.ndarray) -> np.ndarray:
    """Return centred means over about a twentieth of the points; fewer points at both ends."""
    n = len(y_S)
    at_S = np.arange(n)
    half_S = np.minimum(np.minimum(at_S, n - 1 - at_S), 1 + n // 40)
    sums = np.concatenate([[0.0], np.cumsum(y_S)])
    return (sums[at_S + half_S + 1] - sums[at_S - half_S]) / (2 * half_S + 1)


def _span(spec: dict[str, Any], manifest: Manifest | None, rows: Sequence[Row], first: int) -> Training:
    """Return what an unfinished stage has trained up to its last row. Its bytes are its tokens.

    Args:
        first: Steps of the run before this stage, if there is no manifest.
    """
    if manifest:
        first = manifest.global_step - manifest.step
    last = max((row.step for row in rows), default=first)
    tokens = (last - first) * spec["settings"]["seq_len"] * windows_of(spec["settings"])
    return Training(steps=last - first, global_step=last, tokens=tokens, bytes=tokens, seconds=0)


@dataclass(frozen=True)
class StageRecord:
    """One stage on disk. A file is read when it is asked for; `ValueError` for a damaged one."""

    folder: StageFolder
    planned: StageSpec
    """The stage in the current configuration; of a run that is not in it, as it was trained."""
    is_configured: bool
    begin: float
    """Bytes of the run before this stage."""
    first: int
    """Steps of the run before this stage."""

    @property
    def name(self) -> str:
        return self.planned.stage

    @cached_property
    def receipt(self) -> Receipt | None:
        return Receipt.read(self.folder.receipt) if self.folder.receipt.exists() else None

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of the final checkpoint, or of the newest one of an unfinished stage."""
        final = [self.folder.path / self.receipt.checkpoint] if self.receipt else None
        paths = [path / MANIFEST for path in final or steps(self.folder.checkpoints)]
        complete = [path for path in paths if path.is_file()]
        return Manifest.read(complete[-1]) if complete else None

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The settings that it was trained with, a `spider.config.StageSpec` as JSON."""
        return self.manifest.spec if self.manifest else self.planned.model_dump(mode="json")

    @cached_property
    def evaluation(self) -> Evaluation | None:
        return Evaluation.read(self.folder.evaluation) if self.folder.evaluation.exists() else None

    @cached_property
    def results(self) -> dict[str, Result]:
        """All results of the stage, by name."""
        return results_of(self.folder) if self.evaluation else {}

    @cached_property
    def compressed(self) -> dict[str, Result]:
        """All results of its compressed model, by name."""
        return results_of(CompressedFolder(self.folder.compressed))

    @cached_property
    def sample(self) -> Sample | None:
        return Sample.read(self.folder.sample) if self.folder.sample.exists() else None

    @cached_property
    def log(self) -> Log:
        """The log of the training."""
        rows, end = read_rows(self.folder.metrics), self.evaluation if self.receipt else None
        span = self.receipt or _span(self.spec, self.manifest, rows, self.first)
        return Log(self.spec["run"], self.name, rows, span, self.begin, end.bpb if end else None)

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
        if self.is_configured and self.receipt.identity not in self.planned.identities:
            digests = f"digest {self.receipt.identity}, now {self.planned.identity}"
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
        path = self.folder.checkpoint_scores
        left_out = CheckpointScores.read(path).left_out if self.evaluation and path.exists() else {}
        for name, reason in left_out.items():
            yield f"The checkpoint {name} of stage {self.name} has no score: {reason}"


def read_stages(config: Config, results: Results, run: str) -> list[StageRecord]:
    """Return all stages of a run by the configuration, or else by the folders, in the order of training.

    Raises:
        ValueError: Neither the configuration nor the results folder has the run, or a file is damaged.
    """
    configured = run in config.runs
    if configured:
        specs = [config.stage(run, stage.name) for stage in config.runs[run].stages]
    else:
        origins = [Origin.read(folder.origin) for folder in results.stages(run) if folder.origin.exists()]
        specs = sorted((origin.spec for origin in origins), key=lambda spec: spec.index)
    if not specs:
        known = dict.fromkeys([*config.runs, *results.runs])
        raise ValueError(f"no run {run!r} in {results.root / 'runs'}{nearest(run, known)}")
    stages: list[StageRecord] = []
    for spec in specs:
        begin, first = (stages[-1].log.end, stages[-1].log.span.global_step) if stages else (0.0, 0)
        stages.append(StageRecord(results.stage(run, spec.stage), spec, configured, begin, first))
    return stages
