"""Loss curves read back from ``metrics.jsonl``, the trainer's append-only log.

Rows are ``{"step", "time", "metrics"}`` with steps counted over the whole run. A curve is drawn over *bytes
trained*, which compares runs of different batch sizes: a stage's bytes are spread evenly over its steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spider.report.plots import Curve


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


def stage_curve(metrics: Path, receipt: dict[str, Any], begin: float, held_out: float | None = None) -> Curve:
    """The training curve of one stage.

    Args:
        metrics: its metrics.jsonl.
        receipt: its train.json: ``run``, ``stage``, ``steps``, ``global_step`` and ``bytes`` are read.
        begin: bytes trained in the stages before.
        held_out: bpb on the validation text, to be marked at the stage's end.
    """
    bytes_S, bpb_S = points(read_rows(metrics), receipt, begin, bits_per_byte)
    return Curve(
        run=receipt["run"],
        stage=receipt["stage"],
        begin=begin,
        end=begin + receipt["bytes"],
        bytes_S=bytes_S,
        bpb_S=bpb_S,
        held_out=held_out,
    )


def points(
    rows: list[dict[str, Any]],
    receipt: dict[str, Any],
    begin: float,
    read: Callable[[dict[str, float]], float],
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes trained and a value at each row of a stage that has the value.

    Args:
        receipt, begin: as for `stage_curve`.
        read: takes the value out of a row's metrics; one that is not finite is left out.
    """
    first = receipt["global_step"] - receipt["steps"]
    found = [
        (row["step"] - first, value)
        for row in rows
        if first < row["step"] <= receipt["global_step"] and math.isfinite(value := read(row["metrics"]))
    ]
    steps_S, value_S = np.array(found, float).reshape(-1, 2).T
    return begin + steps_S / max(1, receipt["steps"]) * receipt["bytes"], value_S


def bits_per_byte(metrics: dict[str, float]) -> float:
    """Training loss of a row; NaN where it has none."""
    return metrics.get("train/bpb", metrics.get("train/loss", math.nan) / math.log(2))
