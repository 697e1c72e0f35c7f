"""Training runs, their checkpoints and the scores of these.

A training run is one top-level run in the store whatever its stages and restarts. Its key is kept in
``runs/{run}/tracking.json``; the curves are the stages' ``metrics.jsonl``, which `sync` follows. A stage
trained anew (another spec, or its rows that were already sent are gone) would draw a second line over the
first: it begins a new key, and the stages before it are drawn there again.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from spider.checkpoints.records import Origin, Receipt
from spider.config import StageSpec
from spider.files import digest, read_json, write_json
from spider.results import Results, StageFolder
from spider.tracking import spool
from spider.tracking.records import Checkpoint, Evaluation, Run, flatten, relative, shown
from spider.tracking.sender import Sender
from spider.tracking.sync import rows_were_replaced
from spider.tracking.target import Target

log = logging.getLogger(__name__)

#: What of an evaluation says how good a checkpoint is; the rest says how it was scored.
SCORES = ("bpb", "bpb_strict", "bytes", "bytes_per_second", "compressors", "model")


@contextlib.contextmanager
def training(results: Path, spec: StageSpec, *, dataset: tuple[str, str, str]) -> Iterator[None]:
    """Track the training of one stage: its spec, its state, and its curves while they grow.

    ``results`` is the root of the results folder, ``dataset`` (name, digest, source) of what it trains on.
    """
    target = Target.here()
    if not target.enabled:
        yield
        return
    record = _begin(results, spec, _key_for(results, spec), dataset)
    spool.write(results, record)
    sender = Sender(results) if target.workflow is None else None  # a workflow has its own
    try:
        with record.until_its_end():
            yield
    finally:
        spool.write(results, record)
        if sender is not None:
            sender.stop()


class Pointer(BaseModel):
    """``tracking.json`` of a run: its key, and the identity that each stage was last trained under."""

    key: str = Field(default_factory=lambda: secrets.token_hex(8))
    stages: dict[str, str] = {}

    @classmethod
    def read(cls, results: Path, run: str) -> Pointer:
        """The run's; a new one where it has none."""
        path = Results(results).pointer(run)
        return cls.model_validate(read_json(path)) if path.exists() else cls()

    def write(self, results: Path, run: str) -> str:
        path = Results(results).pointer(run)
        try:
            write_json(path, self.model_dump())
        except OSError as error:
            log.warning("%s: cannot write (%s); the curves of this stage go untracked", path, error)
        return self.key


def _key_for(results: Path, spec: StageSpec) -> str:
    """The key this stage's rows belong to: the run's, or a new one where they would cross rows sent."""
    pointer = Pointer.read(results, spec.run)
    folder = Results(results).stage(spec.run, spec.stage)
    known = pointer.stages.get(spec.stage)
    same = known == spec.identity or _began_as(folder, spec)
    if known is not None and (not same or rows_were_replaced(results, folder.metrics)):
        log.info("run %s: stage %s is trained anew, its curves begin a new tracked run", spec.run, spec.stage)
        pointer.key = secrets.token_hex(8)
    pointer.stages[spec.stage] = spec.identity
    return pointer.write(results, spec.run)


def _began_as(folder: StageFolder, spec: StageSpec) -> bool:
    """Whether what lies in the stage's folder is of this spec, under the identity of a version before."""
    try:
        fields = StageSpec.deciding_in(Origin.read(folder.origin).fields)
    except ValueError:
        return False
    return {k: v for k, v in fields.items() if k in StageSpec.model_fields} == spec.deciding()


def _begin(results: Path, spec: StageSpec, key: str, dataset: tuple[str, str, str]) -> Run:
    settings = spec.model_dump(mode="json", exclude={"format", "run", "stage", "index"})
    settings[spec.stage] = {name: settings.pop(name) for name in ("settings", "data")}
    record = Run(kind="training", identity=key, name=spec.run, params=settings)
    if before := spool.before(results, record):
        record.started, record.datasets = before.started, before.datasets
        record.params, record.tags = before.params | record.params, before.tags | record.tags
    record.dataset(*dataset, context=f"train {spec.stage}")
    record.tags |= {"spider.run": spec.run, "spider.stage": spec.stage}
    record.tags[f"spider.spec.{spec.stage}"] = spec.identity
    return record


def _key_of(results: Path, run: str) -> str:
    """Key of a run, made here for one that was trained with tracking off."""
    pointer = Pointer.read(results, run)
    if not spool.record_path(results, "training", pointer.key).exists():
        record = Run(kind="training", identity=pointer.write(results, run), name=run)
        record.tag("spider.run", run)
        record.end("finished")
        spool.write(results, record)
    return pointer.key


def log_checkpoint(results: Path, run: str, stage: str, receipt: Receipt) -> None:
    """Record a stage's last checkpoint as a model, by path, step and digest; no weights are copied.

    Every number or text in the receipt becomes a parameter of the model.
    """
    if not Target.here().enabled:
        return
    checkpoint = Results(results).stage(run, stage).path / receipt.checkpoint
    scalars = {k: v for k, v in receipt if isinstance(v, (str, int, float)) and k != "format"}
    record = Checkpoint(
        identity=digest([run, stage, receipt.weights]),
        name=f"{run}-{stage}",
        training=_key_of(results, run),
        step=receipt.global_step,
        params=scalars | {"path": relative(results, checkpoint)},
    )
    record.tags.update({"spider.run": run, "spider.stage": stage, "spider.digest": receipt.weights})
    spool.write(results, record)


def log_evaluation(
    results: Path,
    run: str,
    stage: str,
    evaluation: Mapping[str, Any],
    artifacts: Sequence[Path] = (),
    *,
    dataset: tuple[str, str, str] | None = None,
    curves: dict[str, list[tuple[int, float]]] | None = None,
) -> None:
    """Record the scores of a stage's checkpoint, on its model and so on its training run.

    Args:
        evaluation: of its numbers those under `SCORES` are logged, nested ones as ``val/compressors/xz``.
        dataset: (name, digest, source) of the text that was scored.
        curves: (step, value) over something else than steps of training; shown as ``val/{name}/{stage}``.

    Raises:
        ValueError: the stage has no receipt (``train.json``).
    """
    if not Target.here().enabled:
        return
    receipt = Receipt.read(Results(results).stage(run, stage).receipt)
    identity = digest([run, stage, receipt.weights])
    if not spool.record_path(results, "models", identity).exists():
        log_checkpoint(results, run, stage, receipt)
    scores = flatten({name: value for name, value in evaluation.items() if name in SCORES})
    numbers = {k.replace(".", "/"): v for k, v in scores.items() if type(v) in (int, float)}
    record = Evaluation(
        identity=identity,
        training=_key_of(results, run),
        stage=stage,
        step=receipt.global_step,
        time=time.time(),
        metrics=numbers,
        dataset=dataset,
        curves=curves or {},
        artifacts=shown(results, artifacts),
    )
    spool.write(results, record)
