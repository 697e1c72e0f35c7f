"""Choose the points of a ``metrics.jsonl`` that a chart draws, while the file grows.

MLflow deletes no point, and a store that is made anew must get the same ones. So the choice depends on the
rows up to a point and on the planned length of the stage alone: a metric has a point in each of a fixed
number of equal spans of steps, the first one there, and the last row of a finished stage. All rows stay in
the file.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

from spider.config import StageSpec
from spider.training.metrics import Row, parse_row

log = logging.getLogger(__name__)

#: Most points of a metric in each of the first three stages of a run. Later ones halve it, so that a metric
#: of a run has at most 2,000.
POINTS = 500

Point = tuple[str, float, int, int]  # key, value, milliseconds since the epoch, step


class Curve:
    """The curve of one stage, which is read from the file as far as it has grown.

    Args:
        spec: The settings of the stage; None if this version cannot read them.
    """

    def __init__(self, path: Path, spec: StageSpec | None) -> None:
        self.path = path
        self.head = head(path)
        self.offset = 0
        self._steps: int | None = None
        self._points = POINTS
        if spec is not None:
            limits = [
                spec.settings.max_steps,
                spec.settings.tokens and spec.settings.tokens // spec.tokens_per_step,
            ]
            self._steps = min(filter(None, limits), default=None)
            self._points = max(1, POINTS >> max(0, spec.index - 2))
        self._first = 0
        self._last: Row | None = None
        self._spans: dict[str, int] = {}

    def read(self) -> Iterator[tuple[int, list[Point]]]:
        """Yield the chosen points of the new rows, with the number of bytes up to the end of each row.

        A last line without a newline is incomplete and left for the next call.
        """
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start, self.offset = self.offset, self.offset + len(line)
                try:
                    row = parse_row(line)
                except ValueError as error:
                    log.warning("%s: skipped a malformed row at byte %d (%s)", self.path, start, error)
                    continue
                self._first = self._first if start else row.step
                self._last = row
                span = self._span(row.step - self._first)
                chosen = [name for name in row.metrics if self._spans.get(name, -1) < span]
                self._spans |= dict.fromkeys(chosen, span)
                yield self.offset, points(row, chosen)

    def end(self) -> list[Point]:
        """Return the points of the last row, which belong to the curve once the stage has finished."""
        return points(self._last, list(self._last.metrics)) if self._last else []

    def _span(self, step: int) -> int:
        """Return the number of the span that a step of the stage lies in."""
        if self._steps:
            return step * self._points // self._steps if self._steps > self._points else step
        # Without a planned end, each doubling of the steps has as many spans.
        bits = (self._points // 16).bit_length()
        octave = max(0, step.bit_length() - bits - 1)
        return (octave << bits) + (step >> octave)


def points(row: Row, names: list[str]) -> list[Point]:
    return [(name, row.metrics[name], int(row.time * 1000), row.step) for name in names]


def head(path: Path) -> str:
    """Return the digest of the first row, which identifies a file of rows; empty without a whole one."""
    try:
        with open(path, "rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return ""
    return hashlib.sha256(line).hexdigest()[:16] if line.endswith(b"\n") else ""
