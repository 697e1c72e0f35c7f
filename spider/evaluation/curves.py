"""Loss curves read back from ``metrics.jsonl``, the trainer's append-only log.

Rows are ``{"step", "time", "metrics"}`` with steps counted over the whole run. A curve is drawn over *bytes
trained*, which compares runs of different batch sizes: a stage's bytes are spread evenly over its steps.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from spider.evaluation.plots import Curve


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
    first = receipt["global_step"] - receipt["steps"]
    steps, bpb = [], []
    for row in read_rows(metrics):
        values = row["metrics"]
        bits = values.get("train/bpb", values.get("train/loss", math.nan) / math.log(2))
        if first < row["step"] <= receipt["global_step"] and math.isfinite(bits):
            steps.append(row["step"] - first)
            bpb.append(bits)
    return Curve(
        run=receipt["run"],
        stage=receipt["stage"],
        begin=begin,
        end=begin + receipt["bytes"],
        bytes_S=begin + np.array(steps, float) / max(1, receipt["steps"]) * receipt["bytes"],
        bpb_S=np.array(bpb, float),
        held_out=held_out,
    )
