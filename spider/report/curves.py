"""Loss curves out of the rows of ``metrics.jsonl``, the trainer's append-only log.

A curve is drawn over *bytes trained*, which compares runs of different batch sizes: a stage's bytes are
spread evenly over its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spider.checkpoints.records import Receipt
from spider.results import StageFolder
from spider.training.metrics import Row, read_rows


@dataclass(frozen=True)
class Span:
    """How far a stage has come, which a `Receipt` says of a finished one."""

    run: str
    stage: str
    steps: int
    global_step: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Curve:
    """What one stage's training logged, over bytes trained since the run began."""

    run: str
    stage: str
    begin: float
    """Bytes trained before this stage."""
    end: float
    bytes_S: np.ndarray
    """(S,) where each logged step stands."""
    bpb_S: np.ndarray
    """(S,) training loss in bits per byte."""
    held_out: float | None = None
    """bpb on the validation text after the stage."""


def stage_curve(rows: list[Row], span: Span | Receipt, begin: float, held_out: float | None = None) -> Curve:
    """The training curve of one stage, of the rows of its metrics.jsonl."""
    bytes_S, bpb_S = points(rows, span, begin, bits_per_byte)
    return Curve(span.run, span.stage, begin, begin + span.bytes, bytes_S, bpb_S, held_out)


def curve_of(folder: StageFolder, begin: float, held_out: float) -> Curve:
    """The same of a finished stage, from its files."""
    return stage_curve(read_rows(folder.metrics), Receipt.read(folder.receipt), begin, held_out)


def points(
    rows: list[Row], span: Span | Receipt, begin: float, read: Callable[[dict[str, float]], float]
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes trained and a value at each row of a stage; ``read`` takes it out, unless it is not finite."""
    first = span.global_step - span.steps
    logged = [
        (row.step - first, value)
        for row in rows
        if first < row.step <= span.global_step and math.isfinite(value := read(row.metrics))
    ]
    steps_S, value_S = np.array(logged, float).reshape(-1, 2).T
    return begin + steps_S / max(1, span.steps) * span.bytes, value_S


def bits_per_byte(metrics: dict[str, float]) -> float:
    """Training loss of a row; NaN where it has none."""
    return metrics.get("train/bpb", metrics.get("train/loss", math.nan) / math.log(2))


def smoothed(y_S: np.ndarray) -> np.ndarray:
    """Mean of about a twentieth of the points, centred so that it does not lag; narrower at both ends."""
    n = len(y_S)
    at_S = np.arange(n)
    half_S = np.minimum(np.minimum(at_S, n - 1 - at_S), 1 + n // 40)
    sums = np.concatenate([[0.0], np.cumsum(y_S)])
    return (sums[at_S + half_S + 1] - sums[at_S - half_S]) / (2 * half_S + 1)
