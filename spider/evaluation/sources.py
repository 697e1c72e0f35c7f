"""Score the held-out text of each dataset of a run with a mixture by itself, and their mean by weight.

The text of a dataset is the first ``evaluation.max_bytes`` of its validation split. So a figure equals that
of an evaluation with ``evaluation.data: NAME``. All stages of a run are scored on the same datasets, those
that one of its stages reads. The mean has the weights of the stage's own mixture.

Each row also has what the run has read of the dataset by the end of the stage.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from spider.checkpoints.records import Receipt
from spider.config.run import EvaluationConfig
from spider.data.mixture import positions_of
from spider.data.shards import Shards, load_metadata
from spider.evaluation.bpb import Score, score
from spider.evaluation.result import ALONE, BYTES, CARRIED, SHARE, Number, Result, Row
from spider.evaluation.subject import Subject
from spider.evaluation.text import holds_out, validation_stream
from spider.evaluation.training_text import LearnedFrom, orders

log = logging.getLogger(__name__)

_LEGEND = (
    "By source: bits per byte of the beginning of the held-out text of each dataset that the run reads. The "
    "mean has the weights of the stage's mixture. What was read is that of all stages until then."
)


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the score of each source and their mean by weight; None for a run without a mixture."""
    if not subject.sources:
        return None
    weights = subject.spec.weights
    held_out = {name: folder for name, folder in subject.sources.items() if holds_out(folder)}
    alone: dict[str, float] = {}
    carried: dict[str, float] = {}
    metrics: dict[str, float] = {}
    rows = []
    for name, folder in held_out.items():
        one, with_before = _scores(subject, settings, name, folder)
        alone[name] = one.bpb
        if with_before:
            carried[name] = with_before.bpb
        read = _read(subject.learned_from, folder)
        metrics |= {f"sources/{title.replace(' ', '_')}/{name}": value for title, value in read.items()}
        columns = {
            "weight": Number(value=weights.get(name, 0.0), unit=SHARE),
            "bytes scored": Number(value=one.counts["byte"], unit=BYTES),
            **{title: Number(value=value) for title, value in read.items()},
        }
        rows.append(_row(name, f"/{name}", alone[name], carried.get(name), columns))
    if weighed := {name: weights[name] for name in held_out if name in weights}:
        columns = {"weight": Number(value=sum(weighed.values()), unit=SHARE)}
        rows.append(_row("mean by weight", "", _mean(alone, weighed), _mean(carried, weighed), columns))
    left_out = [name for name in subject.sources if name not in held_out]
    return Result(
        title="Bits per byte by source",
        value=ALONE,
        rows=rows,
        notes=[f"{name} holds out no text, so it has no figure." for name in left_out],
        legend=_LEGEND,
        metrics=metrics,
    )


def _scores(
    subject: Subject, settings: EvaluationConfig, name: str, folder: Path
) -> tuple[Score, Score | None]:
    """Return the scores of a source, each document alone and with what came before."""
    if name == settings.data:
        return subject.score, subject.carried
    log.info("scoring the held-out text of %s", name)
    tokens_N, _ = validation_stream(folder, settings.max_bytes, subject.model.tokens)
    alone = score(subject.model, tokens_N, subject.reading)
    return alone, score(subject.model, tokens_N, subject.carrying) if settings.carry_over else None


def _mean(bpb: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """Return the mean by weight; None without scores."""
    return sum(weights[name] * bpb[name] for name in weights) / sum(weights.values()) if bpb else None


def _row(
    label: str, name: str, alone: float | None, carried: float | None, columns: dict[str, Number]
) -> Row:
    """Return the row of a source or of the mean.

    Rows in bits per byte stand in the table of scores, which is of one text. So this row is without a unit.
    """
    with_before = None if carried is None else Number(value=carried)
    return Row(
        name=f"sources/bpb{name}",
        label=label,
        value=alone,
        carried=with_before,
        better="lower",
        columns=({CARRIED: with_before} if with_before else {}) | columns,
    )


def _read(learned: LearnedFrom, data: Path) -> dict[str, float]:
    """Return the samples, bytes and epochs of a dataset that a model has read, by title.

    Return nothing if this is unknown: a stage is without a position, read prompts only, or read text that
    was encoded again since.
    """
    split = Shards(data, "train")
    receipts = [Receipt.read(path) for path, folder in learned.stages if folder == data]
    positions = [positions_of(one.position or {"data": ""}).get(split.digest) for one in receipts]
    known = [position for position in positions if position and "objective" not in position]
    if len(known) < len(positions):
        return {}
    epochs = 0.0
    samples = 0
    for order in orders(known, [split] * len(known)):
        samples += order.samples
        epochs += order.samples / order.loader.windows
    read = epochs * load_metadata(data).splits["train"].bytes
    return {"samples read": samples, "bytes read": round(read), "epochs": epochs}
