"""The training curve on disk: ``metrics.jsonl``.

The file is append-only, with one line for each log step, written in one call. A kill therefore tears at most
the last line, which the next start cuts off; any other damage is an error. A resumed run repeats steps that
are already logged, with equal figures; they are skipped, so the curve has neither gaps nor duplicates.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """A log step of the run, its time (seconds since 1970), and means over the steps since the last row."""

    step: int
    time: float
    metrics: dict[str, float]
    batches: tuple[str, ...] = ()
    """Digests of what the steps since the last row read, up to this step (`spider.data.loader`)."""


def parse_row(line: bytes) -> Row:
    """Parse a line of ``metrics.jsonl``; raise ``ValueError`` if it is torn or malformed."""
    try:
        row = json.loads(line)
        metrics = {name: float(value) for name, value in row["metrics"].items()}
        return Row(int(row["step"]), float(row.get("time", math.nan)), metrics, tuple(row.get("batches", ())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a metrics row ({error})") from None


def read_rows(path: Path) -> list[Row]:
    """Return all rows except a torn last line; return none for a missing file.

    Raises:
        ValueError: a line is malformed; the message names the file and the line.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse_row(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {error}; restore the file from a copy, or remove this line, which "
                "the curve then lacks"
            ) from None
    return rows


class MetricsLog:
    """Append rows to ``metrics.jsonl``, except those up to step ``last``, which are already in the file.

    Raises:
        ValueError: a line before the torn last one is malformed (`read_rows`).
    """

    def __init__(self, path: Path) -> None:
        rows = read_rows(path)
        self.last = rows[-1].step if rows else -1
        self._digested = max((row.step for row in rows if row.batches), default=-1)
        self._path = path
        path.touch()
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def write(self, step: int, metrics: Mapping[str, float], batches: Sequence[str] = ()) -> list[str]:
        """Append the row of a step, with the digests of the last batches that the file does not have.

        Return the digests that still wait for a row, because the file has another row of this step.
        """
        new = step - self._digested
        batches = batches[-new:] if new > 0 else []
        if step <= self.last:
            return [*batches]
        if batches:
            self._digested = step
        row = {"step": step, "time": time.time(), "metrics": dict(metrics)}
        row |= {"batches": [*batches]} if batches else {}
        with open(self._path, "ab") as f:
            f.write((json.dumps(row) + "\n").encode())
        self.last = step
        return []
