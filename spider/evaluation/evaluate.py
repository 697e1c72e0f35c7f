"""Measure a stage's last checkpoint on held-out text and write `evaluation.json`.

The text is the beginning of the validation split, or of each of its groups (``largest_group``), at most
``max_bytes`` of it. The file records the text, the weights and the settings, so that two evaluations can be
compared. If the stage averaged its weights, the average is
measured.

The scoring pass also feeds the model's inspector. Then each measurement of `MEASUREMENTS`, and each one that
the configuration names, gets the `Subject` and returns a `Result`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from safetensors import SafetensorError

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import MANIFEST, Manifest, Receipt, at_shares
from spider.common.files import digest
from spider.common.results import StageFolder
from spider.config import StageSpec
from spider.config.imports import measurement
from spider.data.shards import load_metadata, scored_groups
from spider.evaluation import adapt, inside, measures, overlap, tasks
from spider.evaluation.bpb import Score, score
from spider.evaluation.measures import Subject
from spider.evaluation.records import CheckpointScores, Evaluation, Training
from spider.evaluation.result import Result
from spider.evaluation.text import LearnedFrom, Overlap, Text, beginnings, validation_stream
from spider.model import choose_kernels
from spider.model.interface import Inspector, Model
from spider.model.reading import Scoring
from spider.processes.device import available, choose_tf32
from spider.tokens import Tokens
from spider.tokens.turns import assistant_mask

log = logging.getLogger(__name__)

#: The measurements that come with Spider, in display order.
MEASUREMENTS = {
    "spread": measures.spread,
    "overlap": overlap.measure,
    "sources": measures.sources,
    "train_text": measures.train_text,
    "adapt": adapt.measure,
    "tasks": tasks.measure,
    "loops": measures.loops,
    "segments": inside.segments,
    "candidates": inside.candidates,
}


@dataclass(frozen=True)
class HeldOut:
    """The held-out text of a stage, and how the models of the stage are scored on it."""

    spec: StageSpec
    data: Path
    device: str
    tokens_N: np.ndarray
    """The text in ids, beginning with BOS."""
    text: Text
    data_digest: str

    @classmethod
    def of(cls, spec: StageSpec, data: Path, tokens: Tokens, device: str | None) -> HeldOut:
        """Read the text. The arguments are those of `evaluate`, and the vocabulary of the models."""
        settings = spec.evaluation
        choose_kernels(spec.kernels)
        choose_tf32(spec.tf32)
        device = device or available()
        tokens_N, digest = validation_stream(data, settings.max_bytes, tokens, settings.largest_group)
        return cls(spec, data, device, tokens_N, Text.of(tokens_N, tokens), digest)

    def sample(self, tokens: Tokens) -> HeldOut:
        """Return a sample of the text, which is in ids of ``tokens``; its documents are scored alone."""
        tokens_N = beginnings(self.tokens_N, tokens, whole_ids=load_metadata(self.data).imported)
        alone = self.spec.evaluation.model_copy(update={"carry_over": 0})
        spec = self.spec.model_copy(update={"evaluation": alone})
        return replace(self, spec=spec, tokens_N=tokens_N, text=Text.of(tokens_N, tokens))

    def reading(self, trained: Receipt) -> Scoring:
        """Return how a model reads each document alone."""
        settings = self.spec.evaluation
        return Scoring(
            seq_len=self.spec.window,
            overlap=settings.overlap,
            batch=settings.batch,
            n_loops=settings.n_loops or self.spec.loops,
            # Measure a model that was trained in low precision in the precision of its later use.
            autocast=trained.precision in ("bf16", "fp8"),
        )

    def score(
        self, model: Model, reading: Scoring, inspector: Inspector | None = None
    ) -> tuple[Score, Score | None]:
        """Score each document alone, and with what came before (None without ``carry_over``)."""
        size, window = f"{len(self.text):,}", reading.seq_len
        log.info("scoring %s bytes with windows of %d on %s", size, window, self.device)
        scored = score(model, self.tokens_N, reading, observe=inspector.observe if inspector else None)
        carried = None
        if carry_over := self.spec.evaluation.carry_over:
            carried = score(model, self.tokens_N, replace(reading, carry_over=carry_over))
        return scored, carried

    def evaluation(self, trained: Receipt, model: Model, scored: Score, carried: Score | None) -> Evaluation:
        """Return the evaluation of a model by its scores, without results of measurements."""
        spec = self.spec
        return Evaluation(
            **self.measured(model, self.reading(trained), scored, carried),
            run=spec.run,
            stage=spec.stage,
            index=spec.index,
            bpb_assistant=_bpb_of_answers(scored),
            learn=spec.settings.learn,
            checkpoint=trained.checkpoint,
            averaged=bool(trained.averaged_weights),
            weights=trained.averaged_weights or trained.weights,
            ngram=model.lookup.index.description.digest if model.lookup else None,
            counted=model.lookup.index.description.bytes if model.lookup else 0,
            global_step=trained.global_step,
            training=Training(**{name: getattr(trained, name) for name in Training.model_fields}),
            flops_per_token=model.flops_per_token(spec.settings.seq_len, spec.settings.n_loops),
        )

    def measured(
        self,
        model: Model,
        reading: Scoring,
        scored: Score,
        carried: Score | None,
        bytes_D: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """Return the fields of an evaluation that do not depend on where the model comes from.

        Args:
            bytes_D: Bytes of each document (default: those that its ids stand for).
        """
        settings = self.spec.evaluation
        return {
            "format": Evaluation.FORMAT,
            "bpb": scored.bpb,
            "bpb_strict": scored.bpb_strict,
            "bpb_carried": carried.bpb if carried else None,
            "bpb_strict_carried": carried.bpb_strict if carried else None,
            "carry_over": settings.carry_over,
            "document_bits": scored.document_bits,
            "intervals": scored.intervals(bytes_D),
            "intervals_carried": carried.intervals(bytes_D) if carried else {},
            "lossless": load_metadata(self.data).lossless,
            "deviation": max(one.deviation for one in (scored, carried) if one),
            "bytes": len(self.text),
            "documents": int(np.count_nonzero(self.tokens_N == model.tokens.bos)),
            "seconds": scored.seconds,
            "bytes_per_second": len(self.text) / scored.seconds,
            "nats": scored.nats,
            "targets": scored.counts,
            "data": settings.data or self.spec.data,
            "data_digest": self.data_digest,
            "text_sha256": self.text.sha256,
            "seq_len": reading.seq_len,
            "overlap": reading.overlap,
            "n_loops": reading.n_loops or 1,
            "device": self.device,
            "precision": "bf16" if reading.autocast else "fp32",
            "model": scored.metrics,
            "parameters": model.num_parameters(),
            "parameters_by_part": model.parameters_by_part(),
            "parameters_looked_up": model.looked_up(),
        }


def evaluate(
    receipt: Path,
    spec: StageSpec,
    data: Path,
    output: Path,
    *,
    learned_from: LearnedFrom | None = None,
    sources: Mapping[str, Path] | None = None,
    searched: Overlap | None = None,
    device: str | None = None,
) -> Evaluation:
    """Measure the checkpoint that a receipt names, and write evaluation.json.

    Args:
        spec: The stage. The checkpoint holds the model's own configuration.
        data: Shards folder of ``spec.evaluation.data``.
        learned_from: The data that the model has learned from (default: none).
        sources: Shards folders of the datasets to score by themselves, by name (default: none).
        searched: What of the text also occurs in the training text (default: unknown); that of another text
            does not count.
        device: Device to run on (default: the GPU if there is one).

    Raises:
        ValueError: The receipt is of another stage or format, the checkpoint is missing or damaged, the
            validation text is empty, or the model's loss is not finite.
    """
    trained = Receipt.of_stage(receipt, spec)
    checkpoint = Checkpoint.at(receipt)
    settings = spec.evaluation
    held_out = HeldOut.of(spec, data, checkpoint.tokens, device)
    text, reading = held_out.text, held_out.reading(trained)
    model = checkpoint.model(held_out.device)
    inspector = model.inspector()
    scored, carried = held_out.score(model, reading, inspector)
    subject = Subject(
        spec=spec,
        model=model,
        inspector=inspector,
        text=text,
        score=scored,
        carried=carried,
        reading=reading,
        overlap=searched if searched and searched.text_sha256 == text.sha256 else None,
        groups=scored_groups(data, settings.max_bytes, settings.largest_group)[: len(text.lengths())],
        learned_from=learned_from or LearnedFrom(),
        sources=sources or {},
        converses=checkpoint.manifest.conversations is not None,
    )
    results = _measure(subject)
    evaluation = held_out.evaluation(trained, model, scored, carried)
    output.mkdir(parents=True, exist_ok=True)
    return evaluation.model_copy(update={"results": results}).write(StageFolder(output).evaluation)


def _measure(subject: Subject) -> dict[str, Result]:
    """Return the results of all measurements by name, in display order."""
    settings = subject.spec.evaluation
    found: dict[str, Result | None] = {}
    for name, measure in MEASUREMENTS.items():
        log.info("measuring %s", name)
        found[name] = measure(subject, settings)
    for name, own_settings in settings.measurements.items():
        module = measurement(name)
        log.info("measuring %s", name)
        found[name] = module.measure(subject, module.Config(**own_settings))
    return {name: result for name, result in found.items() if result is not None}


def _bpb_of_answers(scored: Score) -> float | None:
    """Return bits per byte of the assistant's answers; None for a text without answers."""
    tokens_N, bytes_V = scored.tokens_N, scored.vocabulary.bytes_of
    bytes_S = bytes_V[tokens_N[1:]] * assistant_mask(tokens_N)[1:]
    nats = float(scored.by_target_S[bytes_S > 0].sum(dtype=np.float64))
    return nats / (math.log(2) * float(bytes_S.sum())) if bytes_S.any() else None


def evaluate_checkpoints(
    folder: StageFolder,
    spec: StageSpec,
    data: Path,
    *,
    device: str | None = None,
) -> CheckpointScores:
    """Score the checkpoints `at_shares` of a stage, up to its end, on a sample; write checkpoints.json.

    Only bits per byte are computed. Each score is a file in the folder ``scores/``, named by the text, the
    settings and the checkpoint. So a killed job scores no checkpoint twice, a second process waits for the
    first, and a score outlives its checkpoint.

    The file names each checkpoint that is damaged or gone, or whose loss is not finite, with the reason.

    Args:
        spec: The stage, which is trained.
        data: Shards folder of ``spec.evaluation.data``.
        device: Device to run on (default: the GPU if there is one).

    Raises:
        ValueError: The receipt is of another stage or format, the checkpoint at the end of the stage is
            missing, or the validation text is empty.
    """
    trained = Receipt.of_stage(folder.receipt, spec)
    scores: dict[int, Evaluation] = {}
    left_out: dict[str, str] = {}
    if shares := spec.evaluation.checkpoints:
        tokens = Checkpoint.at(folder.receipt).tokens
        held_out = HeldOut.of(spec, data, tokens, device).sample(tokens)
        settings = spec.evaluation.changed(include=set(spec.evaluation.BPB))
        key = digest([Evaluation.FORMAT, held_out.data_digest, held_out.text.sha256, settings])
        scores = {one.global_step: one for one in map(Evaluation.read, folder.scores.glob(f"{key}-*.json"))}
        for path in at_shares(folder.checkpoints, shares):
            try:
                one = _scored(path, folder, held_out, key)
            except (OSError, SafetensorError, ValueError) as error:
                reason = str(error) if path.exists() else "it was removed while it was scored"
                log.warning("%s has no score: %s", path.name, reason)
                left_out[path.name] = reason
            else:
                scores[one.global_step] = one
                log.info("%s: %.4f bits per byte", path.name, one.bpb)
    return CheckpointScores(
        format=CheckpointScores.FORMAT,
        weights=trained.averaged_weights or trained.weights,
        scores=[scores[step] for step in sorted(scores)],
        left_out=left_out,
    ).write(folder.checkpoint_scores)


def _scored(path: Path, folder: StageFolder, held_out: HeldOut, key: str) -> Evaluation:
    """Return the score of a checkpoint, from its file if there is one."""
    manifest = Manifest.read(path / MANIFEST)
    file = folder.scores / f"{key}-{manifest.digest}.json"
    folder.scores.mkdir(exist_ok=True)
    with filelock.FileLock(folder.scores / ".lock"):
        if file.exists():
            return Evaluation.read(file)
        # The receipt of the stage if it had ended with this checkpoint.
        receipt = Receipt.of(manifest, path.relative_to(folder.path).as_posix())
        model = Checkpoint.at(path).model(held_out.device)
        scored, _ = held_out.score(model, held_out.reading(receipt))
        return held_out.evaluation(receipt, model, scored, None).write(file)
