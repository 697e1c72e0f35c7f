"""Train a stretch between two kept checkpoints again: it must end with the same bytes.

Each stretch begins with a kept checkpoint, or with the start of the stage, and ends with the next kept one.
They are trained in random order, in a temporary folder, as long as their recorded seconds fit into `SECONDS`.
The settings, the seeds and the parent are those of the manifest. Nothing in the folder of the run changes.

First, without training, the manifests are compared with each other. All checkpoints of a stage have the same
origin, and each step moves the position in the data by the windows of a step. The digests of batches in
``metrics.jsonl`` are compared with those that the order of samples gives, for all steps or for a sample.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Manifest, Receipt, steps
from spider.common.errors import CheckpointError
from spider.config import StageSpec
from spider.config.spec import windows_of
from spider.processes.shutdown import StopSignals
from spider.processes.world import ALONE
from spider.provenance.codefiles import processor
from spider.training.loop import Trainer
from spider.training.precision import device_name
from spider.training.stage import data_digest
from spider.verify.claim import Claim, Finding
from spider_trust.order import logged, stage_order

#: Recorded seconds of training that one check trains again.
SECONDS = 300.0
#: Steps whose batches one check compares at most: in a full audit, and in a quick one.
BATCHES = (2000, 50)
#: Fields of a manifest that are equal in all checkpoints of a stage.
_ORIGIN = ("run", "stage", "identity", "data_digest", "parent_weights", "ngram", "full_index", "resumed")
#: Fields of a manifest that the steps decide, besides its tensors.
_DECIDED = ("weights", "averaged_weights", "position", "step", "global_step", "tokens", "bytes", "skipped")


class _Stretch(NamedTuple):
    before: Checkpoint | None
    """None: the start of the stage."""
    after: Checkpoint

    @property
    def seconds(self) -> float:
        return self.after.training.seconds - (self.before.training.seconds if self.before else 0.0)

    def __str__(self) -> str:
        first = self.before.training.step if self.before else 0
        return f"steps {first} to {self.after.training.step}"


class _Ended(Exception):
    """The last step of a stretch is done."""


def check(claim: Claim, quick: bool) -> Finding:
    """Train random stretches of a stage again, and compare the bytes with its kept checkpoints."""
    kept = []
    for path in steps(claim.trained.checkpoints):
        try:
            kept.append(Checkpoint.at(path, whole=not quick))
        except CheckpointError as error:
            return Finding("failed", f"{path.name} is damaged", str(error).splitlines())
    if not kept:
        return Finding("skipped", "no checkpoint is kept")
    if wrong := _discontinuities([one.training for one in kept]):
        return Finding("failed", "the kept checkpoints are not of one training", wrong)
    wrong, read = _batches(claim, kept[-1].training, BATCHES[quick])
    if wrong:
        return Finding("failed", f"{wrong[0].partition(':')[0]} did not read what the order gives", wrong)
    if quick and read.startswith("the batches"):
        return Finding("passed", f"{read}; a quick audit trains nothing again")
    if quick:
        return Finding("skipped", f"{read}, and a quick audit trains nothing again")
    if missing := _obstacle(claim, kept[-1].training):
        return Finding("skipped", missing, [read])
    stretches = [_Stretch(before, after) for before, after in pairwise([None, *kept]) if after]
    # Earlier versions also saved while they skipped steps.
    stretches = [one for one in stretches if _can_begin(one) and not one.after.training.streak]
    if not stretches:
        return Finding("skipped", "no stretch between kept checkpoints can be trained again", [read])
    shortest = min(one.seconds for one in stretches)
    if shortest > SECONDS:
        reason = f"the shortest stretch takes {shortest:,.0f} s, over {SECONDS:,.0f} s"
        return Finding("skipped", reason, [read])
    return _replay(claim, stretches, read)


def _discontinuities(kept: list[Manifest]) -> list[str]:
    """Return what the manifests of a stage contradict."""
    wrong = []
    for before, after in pairwise(kept):
        names = [name for name in _ORIGIN if getattr(before, name) != getattr(after, name)]
        wrong += [f"steps {before.step} and {after.step}: {name} differs" for name in names]
        if moved := _moved(before, after):
            wrong.append(
                f"steps {before.step} to {after.step}: {abs(moved)} windows were "
                + ("read without a step" if moved > 0 else "not read")
            )
        wrong += [
            f"steps {before.step} to {after.step}: {name} of the order changes"
            for name in ("data", "seed", "seq_len", "packing", "order", "weights", "switches")
            if (before.position or {}).get(name) != (after.position or {}).get(name)
        ]
    return wrong


def _batches(claim: Claim, last: Manifest, most: int) -> tuple[list[str], str]:
    """Compare logged digests of batches with the order; return what differs, and what was compared."""
    spec = StageSpec.model_validate(last.spec)
    digests = logged(claim.trained.metrics)
    try:
        order = stage_order(spec, claim.receipt, claim.results.shards(spec.data))
    except ValueError as error:
        return [], f"no batch can be compared with the order: {error}"
    began = order.global_step(0)
    done = [step - began for step in digests if 1 <= step - began <= claim.receipt.steps]
    if not done:
        return [], "the trainer logged no digest of a batch"
    chosen = sorted(random.SystemRandom().sample(done, min(most, len(done))))
    wrong = [
        f"step {step}: read another batch ({digests[began + step]}) than its order gives"
        for step in chosen
        if order.digest(step) != digests[began + step]
    ]
    return wrong, f"the batches of {len(chosen):,} steps are those that the order gives"


def _moved(before: Manifest, after: Manifest) -> int:
    """Return by how many windows the position moved too far; 0 if it counts no windows."""
    was, now = before.position or {}, after.position or {}
    if "sample" not in now or "objective" in now:
        return 0
    moved: int = now["sample"] - was["sample"]
    return moved - windows_of(after.spec["settings"]) * (after.step - before.step)


def _obstacle(claim: Claim, manifest: Manifest) -> str | None:
    """Return why equal bytes cannot be expected here, or None."""
    receipt = claim.trained.receipt
    job = claim.lineage.of(receipt).job
    trained_on = job.processor if job else None
    here = {"device": device_name(ALONE.device), "torch": torch.__version__, "processes": 1}
    for name, value in here.items():
        if getattr(manifest, name) != value:
            return f"trained with {name} {getattr(manifest, name)}, this is {value}; bytes may differ"
    if trained_on not in (None, processor()):
        return f"trained on {trained_on}, this is {processor()}; bytes may differ"
    return None


def _can_begin(stretch: _Stretch) -> bool:
    """Return whether the state before a stretch is here, one process went on from there with equal
    micro-batches, and no clock ended the stage within it."""
    before, after = stretch.before, stretch.after.training
    if after.processes > 1 or after.alike_since > (before.training.step if before else 0):
        return False
    if before is None:
        return after.resumed is None and after.spec["settings"]["max_hours"] is None
    return before.training.end == after.end


def _replay(claim: Claim, stretches: list[_Stretch], read: str) -> Finding:
    """Train stretches again in random order, as long as their seconds fit; stop at the first that differs."""
    left, done = SECONDS, []
    for stretch in random.SystemRandom().sample(stretches, len(stretches)):
        if stretch.seconds > left:
            continue
        left -= stretch.seconds
        try:
            wrong = _differences(claim, stretch)
        except (ValueError, OSError) as error:
            return Finding("failed", f"{stretch} cannot be trained again", str(error).splitlines())
        if wrong:
            receipt = claim.trained.receipt
            job = claim.lineage.of(receipt).job
            if job and (edited := claim.lineage.edited(job)):
                reason = (
                    f"{stretch} ends with other bytes, and the code has changed since; run the audit with "
                    "PYTHONPATH set to a worktree of the commit and patch that `spider why` names"
                )
                return Finding("skipped", reason, [*wrong, *edited])
            return Finding("failed", f"{stretch} trained again ends with other bytes", wrong)
        done.append(str(stretch))
    plural = "stretch" if len(done) == 1 else "stretches"
    reason = f"{len(done)} {plural} of {len(stretches)} trained again with the same bytes"
    return Finding("passed", reason, [*done, read])


def _differences(claim: Claim, stretch: _Stretch) -> list[str]:
    """Return what differs after training a stretch again.

    Raises:
        ValueError: the data, the parent or the settings do not fit the manifest.
    """
    before, after = stretch.before, stretch.after.training
    spec = _bookless(StageSpec.model_validate(after.spec), after.step)
    data = claim.results.shards(spec.data)
    if data_digest(spec, data) != after.data_digest:
        return ["the data have another digest than the training's"]
    origin = {name: getattr(after, name) for name in ("data_digest", "parent_weights")}
    origin |= {
        name: value
        for name in ("ngram", "full_index", "conversations", "resumed")
        if (value := getattr(after, name)) is not None
    }
    parent = None
    if before is None and spec.index:
        previous = claim.config.run(claim.run).stages[spec.index - 1].name
        parent = claim.results.stage(claim.run, previous).receipt
        if Receipt.read(parent).weights != after.parent_weights:
            return [f"{parent}: names other weights than those that the stage began with"]
    indexes = None
    if spec.model.ngram is not None:
        from spider.data.ngram.store import open_index

        text, counted = claim.config.run(claim.run).dataset, spec.model.ngram.counted
        split, full = (open_index(claim.results.ngram(text, counted, name)) for name in ("split", "full"))
        indexes = (split, full)
    warmup = claim.results.warmup(claim.run, spec.shape)
    with tempfile.TemporaryDirectory(prefix="spider-replay-") as folder, _quietly(after.threads):
        trainer = Trainer(
            spec,
            Path(folder),
            data,
            origin,
            parent=parent,
            good=before,
            warmup=warmup if warmup.exists() else None,
            indexes=indexes,
        )
        _train_to(trainer, after.step)
        (made,) = steps(Path(folder) / "checkpoints")
        again = Checkpoint.at(made).training
    wrong = [f"{name} differs" for name in _DECIDED if getattr(again, name) != getattr(after, name)]
    wrong += [
        f"{name} differs"
        for name, file in after.files.items()
        if name.endswith(".safetensors") and again.files.get(name) != file
    ]
    return wrong


def _bookless(spec: StageSpec, last: int) -> StageSpec:
    """Return a spec that saves after the step ``last`` only, and that measures nothing in between."""
    changes: dict[str, float | None] = {
        "ckpt_every": last,
        "ckpt_minutes": None,
        "val_every": 0,
        "tasks_every": 0,
        "samples_every": 0,
    }
    if spec.settings.max_hours is not None:
        changes["max_hours"] = 1e9  # the end is that of the checkpoint
    unscored = spec.evaluation.model_copy(update={"checkpoints": 0})
    settings = spec.settings.model_copy(update=changes)
    return spec.model_copy(update={"settings": settings, "evaluation": unscored})


def _train_to(trainer: Trainer, last: int) -> None:
    def stop(step: int) -> None:
        if step == last:
            raise _Ended

    try:
        with StopSignals() as signals:
            trainer.run(signals, stop)
    except _Ended:
        pass


@contextmanager
def _quietly(threads: int) -> Iterator[None]:
    """Compute with a number of threads inside, without lines about each training."""
    log, before = logging.getLogger("spider"), torch.get_num_threads()
    level = log.level
    log.setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        log.setLevel(level)
