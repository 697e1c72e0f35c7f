"""What a measurement leaves: a `Result` with rows, metrics and figures, which needs no torch and no model.

The page, the model card, the comparison, the terminal summary, the model registry and MLflow iterate over
results. None of them names a measurement, so a new measurement is one file (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

#: The unit of rows that share one table with the model's score.
BITS = "bits per byte"
#: The unit of a share, which is shown in percent.
SHARE = "share"
BYTES = "bytes"


class Number(BaseModel, frozen=True):
    """A number with its unit; None is shown as an empty cell."""

    value: float | None
    unit: str = ""
    error: float | None = None
    """Standard error."""

    def __str__(self) -> str:
        """Return the number as tables show it: ``2.1250``, ``42.5% ± 8.0``, ``1,200``; empty for None."""
        value, error = self.value, self.error
        if value is None:
            return ""
        if self.unit == SHARE:
            return f"{100 * value:.1f}%" + ("" if error is None else f" ± {100 * error:.1f}")
        if self.unit in ("", BYTES) and error is None and float(value).is_integer():
            return f"{int(value):,}"
        text = f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
        return text if self.unit in ("", BITS) else f"{text} {self.unit}"


class Row(Number, frozen=True):
    """One measured number."""

    name: str
    """Name of the MLflow metric, such as ``tasks/cloze``."""
    label: str
    """Name in tables."""
    better: Literal["lower", "higher"] | None = None
    note: str = ""
    """Long form of the label."""
    columns: dict[str, Number] = {}
    """Further numbers of the row, by the title of their column."""
    baseline: bool = False
    """True for a number of something other than the model, on the same text."""
    group: str = ""
    """Baselines of one group differ in what they read before; short lists show the best two of each group."""
    hub_metric: str = ""
    """Name of the metric in a hub's model index; empty: the row is not in it."""
    hub_dataset: str = ""
    """Dataset of the row in a hub's model index."""


class Table(BaseModel, frozen=True):
    """Rows under a title."""

    kind: Literal["table"] = "table"
    title: str
    head: str = ""
    """Title of the column of labels."""
    value: str = ""
    """Title of the column of values."""
    rows: list[Row] = []
    notes: list[str] = []
    """Sentences below the table."""

    def columns(self) -> list[str]:
        """Return the titles of the further columns, in the order of the rows."""
        return list(dict.fromkeys(title for row in self.rows for title in row.columns))


class Histogram(BaseModel, frozen=True):
    """Counts of ``things`` (patches) that have 0, 1, 2, ... of a ``unit`` (bytes)."""

    kind: Literal["histogram"] = "histogram"
    title: str
    unit: str
    things: str
    counts: list[int]


class HeatMap(BaseModel, frozen=True):
    """A table of numbers as colours.

    ``middle`` is neutral; ``most`` and larger values have the strongest colour. A ``column`` (an expert) is
    numbered from 1.
    """

    kind: Literal["heatmap"] = "heatmap"
    title: str
    rows: list[str]
    column: str
    values: list[list[float]]
    middle: float
    most: float
    caption: str = ""


class Curve(BaseModel, frozen=True):
    """Values at 1, 2, ... of something, such as bits per byte over the number of loops."""

    kind: Literal["curve"] = "curve"
    title: str
    x: str
    """What is counted from 1 along the axis."""
    y: str
    values: list[float]
    mark: int | None = None
    """Place of a vertical line, such as the number of loops trained with."""
    mark_label: str = ""


class Note(BaseModel, frozen=True):
    """A sentence in the place of a figure, for a part that is switched off."""

    kind: Literal["note"] = "note"
    title: str
    text: str


@dataclass(frozen=True)
class Piece:
    """Text to show; a mark stands for a character without a glyph."""

    text: str
    mark: bool = False


@dataclass(frozen=True)
class Segment:
    """What a model reads as one unit, of ``size`` bytes and special ids.

    The text after the last boundary is not ``closed``. The probability is that of the boundary that closes
    the segment, for models that predict boundaries.
    """

    pieces: tuple[Piece, ...]
    size: int
    closed: bool
    probability: float | None


class CutText(BaseModel, frozen=True):
    """A text as a model cuts it, into ``unit`` (patches)."""

    kind: Literal["cut_text"] = "cut_text"
    unit: str
    caption: str
    segments: list[Segment]


@dataclass(frozen=True)
class MarkedByte:
    """A byte with the number of its colour and a tooltip."""

    pieces: tuple[Piece, ...]
    colour: int
    tooltip: str


class MarkedText(BaseModel, frozen=True):
    """A text whose bytes have one of the colours that ``legend`` names."""

    kind: Literal["marked_text"] = "marked_text"
    title: str
    caption: str
    legend: list[str]
    text: list[MarkedByte]


Figure = Annotated[
    Table | Histogram | HeatMap | Curve | Note | CutText | MarkedText, Field(discriminator="kind")
]


class Result(Table, frozen=True):
    """What one measurement found."""

    legend: str = ""
    """How to read the rows, for every place that shows them."""
    metrics: dict[str, float] = {}
    """Further numbers for MLflow, which no table shows."""
    curves: dict[str, list[float]] = {}
    """Curves for MLflow: values at the steps 1, 2, ..."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    """Further facts for programs, as JSON."""

    def own_rows(self) -> list[Row]:
        """Return the rows of a table of its own: neither baselines nor in the unit of the model's score."""
        return [row for row in self.rows if not row.baseline and row.unit != BITS]

    def scores(self) -> list[Row]:
        """Return the model's rows in bits per byte, which share one table."""
        return [row for row in self.rows if not row.baseline and row.unit == BITS]


Results = Mapping[str, Result]


def all_rows(results: Results) -> Iterator[Row]:
    """Yield the rows of all results."""
    for result in results.values():
        yield from result.rows


def scores(results: Results) -> list[Row]:
    """Return the model's rows in bits per byte, of all results."""
    return [row for result in results.values() for row in result.scores()]


def baselines(results: Results) -> list[Row]:
    """Return the rows of baselines that have a value, the best first."""
    return sorted((row for row in all_rows(results) if row.baseline), key=_value)


def shortened(rows: Iterable[Row]) -> list[Row]:
    """Return the best two baselines of each group, and all of them if there is one group."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_value):
        groups.setdefault(row.group, []).append(row)
    if len(groups) == 1:
        return [row for own in groups.values() for row in own]
    return sorted((row for own in groups.values() for row in own[:2]), key=_value)


def metrics(results: Results) -> dict[str, float]:
    """Return all numbers for MLflow by name."""
    found: dict[str, float] = {}
    for result in results.values():
        found |= {row.name: row.value for row in result.rows if row.value is not None}
        found |= result.metrics
    return found


def curves(results: Results) -> dict[str, list[tuple[int, float]]]:
    """Return all curves for MLflow by name, each as pairs of step and value."""
    return {
        name: list(enumerate(values, start=1))
        for result in results.values()
        for name, values in result.curves.items()
    }


def legends(several: Iterable[Results]) -> list[str]:
    """Return how to read the rows of these results, each text once."""
    found = (result.legend for results in several for result in results.values())
    return [text for text in dict.fromkeys(found) if text]


def _value(row: Row) -> float:
    return float("inf") if row.value is None else row.value
