"""What the results folder holds of each stage of a run, whether or not the run is finished.

A stage that the configuration names but nobody has begun is a record too, with what the configuration says of
it; a run that was trained by hand, with settings of its own, is in no configuration, and is known by its
folders alone. What was trained is taken from the checkpoint rather than from the configuration, which may
have changed since; where it has, the stage's notes say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from spider.checkpoints.records import MANIFEST, Manifest, Origin, Receipt, steps
from spider.config import Config, StageSpec, nearest
from spider.config.block import identity as identity_of
from spider.evaluation.artifact import Evaluation
from spider.report.curves import Curve, Span, stage_curve
from spider.report.formatting import duration
from spider.results import Results, StageFolder
from spider.training.metrics import Row, read_rows


@dataclass(frozen=True)
class StageRecord:
    """One stage on disk. ``spec`` is a `spider.config.StageSpec` as plain JSON."""

    name: str
    folder: Path
    spec: dict[str, Any]
    receipt: Receipt | None
    manifest: Manifest | None
    """Of the final checkpoint, or of the newest one of a stage that is not finished."""
    evaluation: Evaluation | None
    rows: list[Row]
    """Of metrics.jsonl."""
    begin: float
    """Bytes trained before it."""
    first_step: int
    """Steps of the run before it."""
    notes: list[str] = field(default_factory=list)
    """What is missing or does not fit, in sentences."""

    @property
    def steps(self) -> int:
        """Steps done, by the last logged one where the stage is not finished."""
        if self.receipt:
            return self.receipt.steps
        return max((row.step for row in self.rows), default=self.first_step) - self.first_step

    @cached_property
    def span(self) -> Span | Receipt:
        """How far it has come; bytes of an unfinished one count special ids as well."""
        if self.receipt:
            return self.receipt
        s = self.spec["settings"]
        done = self.steps * s["seq_len"] * s["micro_batch"] * s["grad_accum"]
        return Span(self.spec["run"], self.name, self.steps, self.first_step + self.steps, done, done)

    def curve(self) -> Curve:
        """Its loss over the bytes of the run; what is not finished has no mark at its end."""
        held_out = self.evaluation.bpb if self.evaluation and self.receipt else None
        return stage_curve(self.rows, self.span, self.begin, held_out)

    @property
    def state(self) -> str:
        """``evaluated``, ``trained``, ``begun`` or ``waiting``."""
        if self.receipt:
            return "evaluated" if self.evaluation else "trained"
        return "begun" if self.rows or self.manifest else "waiting"


def read_stages(config: Config, results: Results, run: str) -> list[StageRecord]:
    """All stages of a run, in the order of training.

    Raises:
        ConfigError: neither the configuration nor the results folder knows the run.
        ValueError: a file there is damaged; names it.
    """
    if run in config.runs:
        specs = [config.stage(run, stage.name) for stage in config.runs[run].stages]
    else:
        origins = [Origin.read(s.origin) for s in results.stages(run) if s.origin.exists()]
        if not origins:
            names = {**dict.fromkeys(config.runs), **dict.fromkeys(results.runs)}
            raise ValueError(f"no run {run!r} in {results.root / 'runs'}{nearest(run, list(names))}")
        specs = sorted((origin.spec for origin in origins), key=lambda spec: spec.index)
    stages: list[StageRecord] = []
    for spec in specs:
        stage = _read(results.stage(run, spec.stage), spec, stages[-1] if stages else None)
        notes = _notes(stage, spec.identity if run in config.runs else None)
        stages.append(replace(stage, notes=[*notes]))
    return stages


def _read(folder: StageFolder, spec: StageSpec, before: StageRecord | None) -> StageRecord:
    receipt = Receipt.read(folder.receipt) if folder.receipt.exists() else None
    checkpoints = [folder.path / receipt.checkpoint] if receipt else steps(folder.checkpoints)
    whole = [path / MANIFEST for path in checkpoints if (path / MANIFEST).is_file()]
    manifest = Manifest.read(whole[-1]) if whole else None
    first_step = before.span.global_step if before else 0
    if manifest:
        first_step = manifest.global_step - manifest.step
    elif receipt:
        first_step = receipt.global_step - receipt.steps
    return StageRecord(
        name=spec.stage,
        folder=folder.path,
        spec=manifest.spec if manifest else spec.model_dump(mode="json"),
        receipt=receipt,
        manifest=manifest,
        evaluation=Evaluation.read(folder.evaluation) if folder.evaluation.exists() else None,
        rows=read_rows(folder.metrics),
        begin=before.begin + before.span.bytes if before else 0,
        first_step=first_step,
    )


def _notes(stage: StageRecord, identity: str | None) -> Iterator[str]:
    """Sentences on what is missing or does not fit the stage as it is configured now (None: it is not)."""
    at = f"{stage.folder.parent.name} {stage.name}"
    receipt = stage.receipt
    if stage.state == "waiting":
        yield f"Stage {stage.name} has not begun: `spider train {at}`, or the workflow, trains it."
    if stage.state == "begun":
        end = stage.manifest and stage.manifest.end
        done = f"step {stage.steps:,}" + (f" of {end:,}" if end else "")
        logged = StageFolder(stage.folder).metrics.stat().st_mtime if stage.rows else 0
        when = f", logged {duration(max(0, time.time() - logged))} ago" if logged else ""
        yield (
            f"Stage {stage.name} is not finished: {done}{when}. If nothing trains it, `spider train {at}` or "
            "the workflow goes on."
        )
    if receipt is None:
        return
    trained = stage.manifest and identity_of(StageSpec.deciding_in(stage.manifest.spec))  # of any version
    if identity and identity not in (trained, receipt.identity):
        yield (
            f"Stage {stage.name} was trained with other settings than the configuration says now (digest "
            f"{receipt.identity}, now {identity}); this page shows what was trained."
        )
    if stage.manifest is None:
        yield f"The final checkpoint of stage {stage.name} is gone: {stage.folder / receipt.checkpoint}."
    if stage.evaluation is None:
        yield f"Stage {stage.name} is trained and not evaluated: `spider evaluate {at}`."
    elif stage.evaluation.weights != (receipt.averaged_weights or receipt.weights):
        yield (
            f"The evaluation of stage {stage.name} is of other weights ({stage.evaluation.weights}) than "
            f"those that it has now: `spider evaluate {at}`."
        )
    elif stage.evaluation.figures is None:
        yield (
            f"Stage {stage.name} was evaluated before figures were kept: `spider evaluate {at}` shows what "
            "is inside the model, its size and its work."
        )
