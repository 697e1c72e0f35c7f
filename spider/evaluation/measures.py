"""Define `Subject`, which each measurement gets, and measure groups, loops, sources and training text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spider.checkpoints.records import Receipt
from spider.config import StageSpec
from spider.config.run import EvaluationConfig
from spider.data.mixture import positions_of
from spider.data.shards import Shards, load_metadata
from spider.evaluation.bpb import Score, clip_stream, score
from spider.evaluation.result import (
    ALONE,
    BITS,
    BYTES,
    CARRIED,
    SHARE,
    Curve,
    Note,
    Number,
    Result,
    Row,
    Table,
)
from spider.evaluation.text import LearnedFrom, Overlap, Text, holds_out, orders, validation_stream
from spider.model.interface import Inspector, Model
from spider.model.reading import Scoring

if TYPE_CHECKING:
    from spider.data.ngram.lookup import NgramLookup

log = logging.getLogger(__name__)

#: Groups of documents that have a row of their own in the table, the largest ones.
_ROWS = 20
_MODEL = f"this model, {ALONE}"
_LOOPS = "Bits per byte by number of loops"
_LEGEND = (
    "By source: bits per byte of the beginning of the held-out text of each dataset that the run reads. The "
    "mean has the weights of the stage's mixture. What was read is that of all stages until then."
)


@dataclass(frozen=True)
class Subject:
    """A model with the held-out text that it was scored on."""

    spec: StageSpec
    model: Model
    inspector: Inspector | None
    """Observer of the pass that scored the text; None for a family without an inspector."""
    text: Text
    """The text in bytes."""
    score: Score
    """The score of each document alone."""
    carried: Score | None
    """The score with what came before; None without ``evaluation.carry_over``."""
    reading: Scoring
    """How the model read each document alone."""
    overlap: Overlap | None = None
    """The part of the text that also occurs in the training text. It is None if that was not searched."""
    groups: list[str] = field(default_factory=list)
    """Groups (``split_by``) of the first documents of the text; empty if they are unknown."""
    learned_from: LearnedFrom = field(default_factory=LearnedFrom)
    """The data that the model has learned from."""
    sources: Mapping[str, Path] = field(default_factory=dict)
    """Shards folders of the datasets that are scored by themselves, by name; empty without a mixture."""
    converses: bool = False
    """Whether the model has learned from conversations."""

    @property
    def tokens_N(self) -> np.ndarray:
        """Return the text in ids, beginning with BOS."""
        return self.score.tokens_N

    @cached_property
    def bits_B(self) -> np.ndarray:
        """Return the bits that the model spent on each byte of the text, each document alone."""
        return self.score.bits_B

    @property
    def carrying(self) -> Scoring:
        """How the model reads the text with what came before."""
        return replace(self.reading, carry_over=max(1, self.spec.evaluation.carry_over))


def loops(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return bits per byte of the beginning of the text with 1 to twice the loops trained with, or a note.

    Compare these values with each other only: they are of a shorter text than the model's score.
    """
    trained = subject.spec.loops
    if not settings.loops_bytes or not subject.model.config.looped:
        text = "no curve was measured\n(evaluation.loops_bytes is 0,\nor the model has no loops)"
        return Result(title=_LOOPS, figures=[Note(title=_LOOPS, text=text)])
    begin_N = clip_stream(subject.tokens_N, settings.loops_bytes, subject.model.tokens)
    readings = [replace(subject.reading, n_loops=n) for n in range(1, 2 * trained + 1)]
    values = [score(subject.model, begin_N, reading).bpb for reading in readings]
    curve = Curve(
        title=f"Bits per byte of {len(subject.model.tokens.raw(begin_N)):,} held-out bytes",
        x=f"loops (trained with {trained})",
        y=BITS,
        values=values,
        mark=trained,
        mark_label="trained with",
    )
    return Result(title=_LOOPS, figures=[curve], curves={"bpb_at_loops": values})


def spread(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the scores of each group of documents (``split_by``); None if the groups are not recorded."""
    if not subject.groups:
        return None
    count = len(subject.groups)
    names, group_D = np.unique(subject.groups, return_inverse=True)
    bytes_G = np.bincount(group_D, subject.text.lengths()[:count])
    order_G = np.argsort(-bytes_G, kind="stable")
    first_D = subject.text.bounds_D[:-1]
    scores = {_MODEL: subject.score}
    if subject.carried is not None:
        scores[f"this model, {CARRIED}"] = subject.carried
    bits_G = {
        title: np.bincount(group_D, np.add.reduceat(one.bits_B, first_D)[:count])
        for title, one in scores.items()
    }

    def row(label: str, chosen: np.ndarray) -> Row:
        size = bytes_G[chosen].sum()
        columns = {
            "bytes": Number(value=int(size), unit=BYTES),
            "share": Number(value=float(size / len(subject.text)), unit=SHARE),
        }
        for title, of_title_G in bits_G.items():
            columns[title] = Number(value=float(of_title_G[chosen].sum() / size), unit=BITS)
        alone = columns.pop(_MODEL)
        return Row(name=f"spread/{label}", label=label, value=alone.value, unit=BITS, columns=columns)

    rows = [row(names[group], np.array([group])) for group in order_G[:_ROWS].tolist()]
    if others := len(names[_ROWS:]):
        rows.append(row(f"{others} others", order_G[_ROWS:]))
    bpb_G = bits_G[_MODEL] / bytes_G
    largest = float(bytes_G.max() / len(subject.text))
    note = (
        f"{len(names)} groups are scored, at most {largest:.1%} of the bytes from one. Each document alone, "
        f"they have {bpb_G.min():.3f} to {bpb_G.max():.3f} bits per byte."
    )
    if len(subject.text.lengths()) > count:
        note += f" Only the groups of the first {count:,} documents are recorded."
    return Result(
        title="Spread",
        notes=[note],
        metrics={
            "spread/groups": len(names),
            "spread/largest_share": largest,
            "spread/lowest": float(bpb_G.min()),
            "spread/highest": float(bpb_G.max()),
        },
        figures=[Table(title="By group of documents", head="group", value=_MODEL, rows=rows)],
    )


def sources(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the score of each dataset of a run with a mixture, and their mean by weight, or None.

    The text of a dataset is the first ``evaluation.max_bytes`` of its validation split. So a figure equals
    that of an evaluation with ``evaluation.data: NAME``. All stages of a run are scored on the same datasets,
    those that one of its stages reads. The mean has the weights of the stage's own mixture. Each row also has
    what the run has read of the dataset by the end of the stage.
    """
    if not subject.sources:
        return None
    weights = subject.spec.weights
    held_out = {name: folder for name, folder in subject.sources.items() if holds_out(folder)}
    scores = {name: _scores(subject, settings, name, folder) for name, folder in held_out.items()}
    alone = {name: one.bpb for name, (one, _) in scores.items()}
    carried = {name: one.bpb for name, (_, one) in scores.items() if one}
    metrics: dict[str, float] = {}
    rows = []
    for name, folder in held_out.items():
        read = _read(subject.learned_from, folder)
        metrics |= {f"sources/{title.replace(' ', '_')}/{name}": value for title, value in read.items()}
        columns = {
            "weight": Number(value=weights.get(name, 0.0), unit=SHARE),
            "bytes scored": Number(value=scores[name][0].counts["byte"], unit=BYTES),
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


def train_text(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return bits per byte of the training text; None without ``train_bytes`` in the configuration.

    The text is the beginning of the last stage's train split, of a mixture that of the first dataset. Each
    document is read alone. A model with an n-gram index reads the one without the train split, as in
    training, because the other one holds this text.
    """
    if not settings.train_bytes:
        return None
    key = "evaluation.train_bytes"
    train_N, _, _ = train_stream(subject.learned_from, settings.train_bytes, key)
    scored = score(subject.model, train_N, subject.reading, lookup=split_lookup(subject))
    row = Row(
        name="train_text/bpb",
        label="of training text",
        value=scored.bpb,
        interval=scored.intervals().get("bpb"),
        unit=BITS,
        note=f"Bits per byte of the first {scored.counts['byte']:,} bytes of the train split",
    )
    return Result(title="Training text", rows=[row], metrics={"train_text/bytes": scored.counts["byte"]})


def train_stream(learned_from: LearnedFrom, count: int, key: str) -> tuple[np.ndarray, Text, Path]:
    """Return the first ``count`` bytes of the last stage's train split in ids and as text, and its folder.

    Raises:
        ValueError: The training text is unknown or smaller. The message names the ``key`` of the count.
    """
    last = learned_from.stages[-1][0] if learned_from.stages else None
    folder = next((folder for receipt, folder in learned_from.stages if receipt == last), None)
    if folder is None:
        raise ValueError(f"{key}: the training text cannot be read; set it to 0")
    split = Shards(folder, "train")
    # A document of n bytes has n + 2 ids, and none is empty.
    train_N = clip_stream(np.asarray(split.read(0, min(split.tokens, 3 * count))), count, split.vocabulary)
    text = Text.of(train_N, split.vocabulary)
    if len(text) < count:
        raise ValueError(
            f"{key}: {count:,} bytes are more than the train split of {folder} has ({len(text):,}); lower it"
        )
    return train_N, text, folder


def split_lookup(subject: Subject) -> NgramLookup | None:
    """Return the candidates of the n-gram index without the train split; None for a model without one."""
    if subject.model.lookup is None:
        return None
    assert subject.learned_from.split_index is not None, "`learned_from` names it for a model with an index"
    from spider.data.ngram.lookup import NgramLookup  # imports numba
    from spider.data.ngram.store import open_index

    index = open_index(subject.learned_from.split_index)
    return NgramLookup(index, subject.model.lookup.config, subject.model.tokens)
