"""Loss curves read back from ``metrics.jsonl``, the trainer's append-only log.

Rows are ``{"step", "time", "metrics"}`` with steps counted over the whole run. A curve is drawn over *bytes
trained*, which compares runs of different batch sizes: a stage's bytes are spread evenly over its steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spider.checkpoints.records import Receipt


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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; none where the file is missing (a run that logged nothing).

    A last line without its newline is a write that was cut off, and is left out.

    Raises:
        ValueError: any other line is malformed; names the file and the line.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            row = json.loads(line)
            rows.append({"step": row["step"], "metrics": row["metrics"]})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a metrics row ({error})") from None
    return rows


def stage_curve(
    rows: list[dict[str, Any]], span: Span | Receipt, begin: float, held_out: float | None = None
) -> Curve:
    """The training curve of one stage.

    Args:
        rows: of its metrics.jsonl.
        span: how far it has come.
        begin: bytes trained in the stages before.
        held_out: bpb on the validation text, to be marked at the stage's end.
    """
    bytes_S, bpb_S = points(rows, span, begin, bits_per_byte)
    return Curve(span.run, span.stage, begin, begin + span.bytes, bytes_S, bpb_S, held_out)


def points(
    rows: list[dict[str, Any]], span: Span | Receipt, begin: float, read: Callable[[dict[str, float]], float]
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes trained and a value at each row of a stage that has the value.

    Args:
        span, begin: as for `stage_curve`.
        read: takes the value out of a row's metrics; one that is not finite is left out.
    """
    first = span.global_step - span.steps
    logged = [
        (row["step"] - first, value)
        for row in rows
        if first < row["step"] <= span.global_step and math.isfinite(value := read(row["metrics"]))
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
