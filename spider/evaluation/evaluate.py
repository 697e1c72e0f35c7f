"""One stage's last checkpoint, measured: bits per byte, compressors on the same text, its inside.

The text is the beginning of the validation split, at most ``max_bytes`` of it; the bytes of the very array
that the model is scored on go to the compressors. What was measured on what is written beside the figures, so
that two evaluations can be told comparable or not. Where the stage averaged its weights, the average is what
is measured, and the digest its.

The pass that scores also feeds the model's inspector. The curve over loops reads a shorter beginning of the
text once for each number of loops: compare its figures with each other, not with those of the whole text.
Nothing is drawn here: `spider.report.figures` does it from the files. `spider.evaluation.sample` lets the
model write.
"""

from __future__ import annotations

import hashlib
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Receipt
from spider.config import StageSpec, TTTConfig
from spider.data.metadata import load_metadata
from spider.evaluation.adapt import adapt
from spider.evaluation.artifact import Evaluation, LoopsCurve, TaskResult, Training
from spider.evaluation.bpb import Score, bits_by_byte, clip_stream, score
from spider.evaluation.held_out import validation_stream
from spider.evaluation.overlap import COPIED, Text
from spider.evaluation.questions import tasks
from spider.evaluation.segments import cut
from spider.evaluation.tasks import run_task
from spider.evaluation.training_text import LearnedFrom
from spider.evaluation.yardsticks import Measured, beside, measure_given
from spider.model import choose_kernels
from spider.model.interface import Model
from spider.results import StageFolder
from spider.tokens import Tokens
from spider.tokens.turns import learned

log = logging.getLogger(__name__)

#: Of the text, shown as the model cuts it, and as a memory proposed it.
_SHOWN_BYTES, _PROPOSED_BYTES = 1500, 500


def evaluate(
    receipt: Path,
    spec: StageSpec,
    data: Path,
    output: Path,
    *,
    learned_from: LearnedFrom | None = None,
    kept: Path | None = None,
    device: str | None = None,
) -> Evaluation:
    """Measure the checkpoint that a receipt names, and write evaluation.json.

    Args:
        spec: the stage; the model's own configuration is in the checkpoint.
        data: shards folder of ``spec.evaluation.data``.
        learned_from: what the compressors are given (default: nothing).
        kept: folder of what was measured of texts before (default: in ``output``).
        device: where to run (default: the GPU where there is one).

    Raises:
        ValueError: a receipt of another stage or version, a missing or damaged checkpoint, no validation
            text, or a model whose loss is not finite.
    """
    trained = Receipt.of_stage(receipt, spec)
    asked, checkpoint = spec.evaluation, Checkpoint.at(receipt)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    choose_kernels(spec.kernels)
    tokens = checkpoint.tokens
    tokens_N, data_digest = validation_stream(data, asked.max_bytes, tokens)
    # A model trained in low precision is judged in the precision it will be used in.
    autocast = trained.precision in ("bf16", "fp8")
    held_out = Text.of(tokens_N, tokens)
    reading = {"seq_len": spec.window, **asked.model_dump(include={"overlap", "batch"}), "autocast": autocast}
    n_loops = asked.n_loops or spec.loops
    texts = learned_from or LearnedFrom(), asked.training_bytes, kept or output / "yardsticks"
    with beside(partial(measure_given, held_out, *texts)) as others:
        model = checkpoint.model(device)
        log.info("scoring %s bytes with windows of %d on %s", f"{len(held_out):,}", spec.window, device)
        inspector = model.inspector()
        observe = inspector.observe if inspector else None
        result = score(model, tokens_N, n_loops=n_loops, observe=observe, **reading)
        shown_N = clip_stream(tokens_N, _SHOWN_BYTES, model.tokens)
        inside: dict[str, Any] = {
            "loops": _loops_curve(model, tokens_N, spec, **reading),
            "figures": inspector.figures() if inspector else [],
            "text": cut(model, inspector, shown_N, **reading) if inspector else None,
            "ttt": _adapted(model, tokens_N, asked.ttt, n_loops=n_loops, **reading),
        }
        bits_B = bits_by_byte(result, tokens_N, model.tokens)
        inside |= _of_memory(model, tokens_N, bits_B)
        answers = _answers(model, spec, held_out, n_loops=n_loops, autocast=autocast)
        yardsticks = others.result()
    measured = Evaluation.model_validate(
        {
            "format": Evaluation.FORMAT,
            **{name: getattr(spec, name) for name in ("run", "stage", "index")},
            **{name: getattr(result, name) for name in ("bpb", "bpb_strict", "seconds", "nats")},
            "bytes": len(held_out),
            "bytes_per_second": len(held_out) / result.seconds,
            "targets": result.counts,
            "model": result.metrics,
            "tasks": answers,
            "bpb_assistant": _of_answers(result, tokens_N, model.tokens),
            "learn": spec.settings.learn,
            "documents": int(np.count_nonzero(tokens_N == model.tokens.bos)),
            **{"data": asked.data, "data_digest": data_digest, "lossless": load_metadata(data).lossless},
            "text_sha256": hashlib.sha256(held_out.bytes_N.tobytes()).hexdigest(),
            **{"seq_len": spec.window, "overlap": asked.overlap, "n_loops": n_loops, "device": device},
            "precision": "bf16" if autocast else "fp32",
            **_of_checkpoint(trained, model, spec),
            **_against(yardsticks, held_out, bits_B),
            **inside,
        }
    )
    output.mkdir(parents=True, exist_ok=True)
    return measured.write(StageFolder(output).evaluation)


def _adapted(
    model: Model, tokens_N: np.ndarray, settings: TTTConfig | None, **reading: Any
) -> dict[str, Any] | None:
    """The same text, learned from as it is read; None where that is not asked for."""
    if settings is None:
        return None
    log.info("scoring it again, learning from every %s ids of it", f"{settings.chunk:,}")
    result = adapt(model, tokens_N, settings, **reading)
    figures = {name: getattr(result, name) for name in ("bpb", "bpb_strict", "seconds")}
    return {**figures, "settings": settings.model_dump()}


def _against(yardsticks: Measured, held_out: Text, bits_N: np.ndarray) -> dict[str, Any]:
    """The model beside what others make of the text, on all of it, on its news, and by document."""
    copied_N, size_D = yardsticks.copied_N, held_out.lengths()

    def by_document(values_N: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values_N, held_out.bounds_D[:-1])

    copies = None
    columns = {"bytes": size_D, "bpb": by_document(bits_N) / size_D}
    if yardsticks.ppmd_D is not None:
        columns["ppmd"] = yardsticks.ppmd_D / size_D
    if copied_N is not None and yardsticks.common_D is not None:
        news = int(len(held_out) - copied_N.sum())
        copies = {
            "length": COPIED,
            "copied": float(copied_N.mean()),
            "searched": yardsticks.searched,
            "fresh_bytes": news,
            "bpb": float(bits_N[~copied_N].sum() / news) if news else None,
        }
        columns |= {"copied": by_document(copied_N.astype(float)) / size_D, "common": yardsticks.common_D}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return {
        "compressors": {one.key: one.bpb for one in yardsticks.table},
        "compressor_settings": {one.key: one.label for one in yardsticks.table},
        "yardsticks": yardsticks.table,
        "left_out": yardsticks.left_out,
        "copies": copies,
        "by_document": [dict(zip(columns, row, strict=True)) for row in rows],
    }


def _answers(model: Model, spec: StageSpec, held_out: Text, **how: Any) -> list[TaskResult]:
    """To the questions of all tasks."""
    asked, how = spec.evaluation, how | {"window": spec.window, "batch": spec.evaluation.batch}
    documents = held_out.documents() if asked.tasks else []
    made = (task for name, config in asked.tasks.items() for task in tasks(name, config, documents))
    return [run_task(model, task, **how) for task in made]


def _of_answers(result: Score, tokens_N: np.ndarray, tokens: Tokens) -> float | None:
    """Bits per byte of what an assistant says; None where nobody does."""
    bytes_S = tokens.bytes_of[tokens_N[1:]] * learned(tokens_N)[1:]
    nats = float(result.by_target_S[bytes_S > 0].sum(dtype=np.float64))
    return nats / (math.log(2) * float(bytes_S.sum())) if bytes_S.any() else None


def _of_memory(model: Model, tokens_N: np.ndarray, bits_B: np.ndarray) -> dict[str, Any]:
    """Which memory the model read, and what that proposed; nothing of a model without."""
    if model.proposer is None:
        return {}
    from spider.evaluation.proposed import by_source, byte_by_byte  # compiles

    shown_N = clip_stream(tokens_N, _PROPOSED_BYTES, model.tokens)
    return {
        "memory": model.proposer.memory.description.digest,
        "proposed": by_source(model.proposer, tokens_N, bits_B),
        "proposed_text": byte_by_byte(model.proposer, shown_N, bits_B),
    }


def _of_checkpoint(trained: Receipt, model: Model, spec: StageSpec) -> dict[str, Any]:
    """What was measured, what its training took, its size and its price."""
    return {
        "checkpoint": trained.checkpoint,
        "averaged": bool(trained.averaged_weights),
        "weights": trained.averaged_weights or trained.weights,
        "global_step": trained.global_step,
        "training": {name: getattr(trained, name) for name in Training.model_fields},
        "parameters": model.num_parameters(),
        "parameters_by_part": model.parameters_by_part(),
        "parameters_looked_up": model.looked_up(),
        "flops_per_token": model.flops_per_token(spec.settings.seq_len, spec.settings.n_loops),
    }


def _loops_curve(model: Model, tokens_N: np.ndarray, spec: StageSpec, **reading: Any) -> LoopsCurve | None:
    """Up to twice the loops trained with; None where none is asked for or the model has no loops."""
    if not spec.evaluation.loops_bytes or not model.config.looped:
        return None
    begin_N = clip_stream(tokens_N, spec.evaluation.loops_bytes, model.tokens)
    curve = [score(model, begin_N, n_loops=n, **reading).bpb for n in range(1, 2 * spec.loops + 1)]
    return LoopsCurve(bytes=len(model.tokens.raw(begin_N)), trained=spec.loops, bpb=curve)
