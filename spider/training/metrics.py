"""The training curve on disk.

``metrics.jsonl`` is append-only, one line a log step, written in one call so that a kill tears at most the
last line, which the next start cuts off. A resumed run walks again through steps already logged: equal to the
first time, so they are skipped and the curve has neither gaps nor duplicates.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """A log step of the run, its time (seconds since 1970), and means over the steps since the one before."""

    step: int
    time: float
    metrics: dict[str, float]


def parse_row(line: bytes) -> Row:
    """A line of ``metrics.jsonl``; ``ValueError`` for one that is torn or malformed."""
    try:
        row = json.loads(line)
        metrics = {name: float(value) for name, value in row["metrics"].items()}
        return Row(int(row["step"]), float(row.get("time", math.nan)), metrics)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a metrics row ({error})") from None


def read_rows(path: Path) -> list[Row]:
    """All rows, none of a missing file; a last line that was cut off is left out. `ValueError` names the file
    and the line that is malformed otherwise."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse_row(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return rows


class MetricsLog:
    """Append rows to ``metrics.jsonl``; rows up to `last` are there already and are not written again."""

    def __init__(self, path: Path) -> None:
        self.last, self._path, whole = -1, path, 0
        path.touch()
        with open(path, "rb") as f, contextlib.suppress(ValueError):
            for line in f:
                if line.endswith(b"\n"):
                    self.last, whole = parse_row(line).step, whole + len(line)
        os.truncate(path, whole)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self.last:
            row = {"step": step, "time": time.time(), "metrics": dict(metrics)}
            with open(self._path, "ab") as f:
                f.write((json.dumps(row) + "\n").encode())
            self.last = step
