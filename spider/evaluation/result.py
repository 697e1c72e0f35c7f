"""Define `Result`, which holds what a measurement found: rows, metrics and figures. It needs no torch.

The page, the model card, the comparison, the terminal summary, the model registry and MLflow iterate over
results. None of them names a measurement, so a new measurement is one file (docs/extending.md). A new column
of the table of all models is a `Row.column`, and a new badge is a `Row.tone`, where it is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from spider.common.formatting import bits, duration, quantity

#: Unit of the rows that share one table with the model's score.
BITS = "bits per byte"
#: Unit of a share. Tables show it in percent.
SHARE = "share"
BYTES = "bytes"
#: Unit of bytes that tables show with a decimal prefix, such as ``3.20 MB``.
SIZE = "B"
#: Unit of a count that tables show alike, such as ``1.20 M``.
COUNT = "count"
SECONDS = "s"
#: The two contexts of a number in bits per byte: what was read before a byte, beside the training text.
ALONE = "each document alone"
CARRIED = "with what came before"
CONTEXTS = (ALONE, CARRIED)
#: Column of a baseline: the bytes of training text that it has read before the held-out text.
GIVEN = "bytes given"
#: Group of the baselines that have read what the stage was trained on.
GIVEN_STAGE = "given stage"


class Number(BaseModel, frozen=True):
    """A number with its unit. Tables show None as an empty cell."""

    value: float | None
    unit: str = ""
    error: float | None = None
    """Standard error."""
    interval: tuple[float, float] | None = None
    """95% interval of a bootstrap over documents."""
    text: str = ""
    """Words instead of a number, such as ``passed``."""
    mark: str = ""
    """Sign behind the number, such as `spider.evaluation.records.DAGGER`."""

    def __str__(self) -> str:
        """Return the number as tables show it; empty for None.

        Examples: ``2.1250``, ``1.1900 (1.151 to 1.230)`` with an interval, ``42.5% ± 8.0``, ``1,200``.
        """
        interval = self.value is not None and self.interval
        return self.without_interval + (" ({:.3f} to {:.3f})".format(*interval) if interval else "")

    @property
    def without_interval(self) -> str:
        """Return the number as tables show it, for those that show the interval elsewhere."""
        if self.value is None:
            return self.text
        if self.unit in (SIZE, COUNT):
            return quantity(self.value, self.unit if self.unit == SIZE else "")
        if self.unit == SECONDS:
            return duration(self.value)
        if self.unit == SHARE:
            return f"{100 * self.value:.1f}%" + ("" if self.error is None else f" ± {100 * self.error:.1f}")
        if self.unit in ("", BYTES) and self.error is None and float(self.value).is_integer():
            return f"{int(self.value):,}"
        text = f"{self.value:.4f}{self.mark}" + ("" if self.error is None else f" ± {self.error:.4f}")
        return text if self.unit in ("", BITS) else f"{text} {self.unit}"

    @property
    def short(self) -> str:
        """Return the number for a narrow table: bits per byte in three digits, without an interval."""
        return str(self) if self.value is None or self.unit != BITS else f"{bits(self.value)}{self.mark}"


class Row(Number, frozen=True):
    """One measured number."""

    name: str
    """Name of the MLflow metric, such as ``tasks/cloze``."""
    label: str
    """Name in tables."""
    better: Literal["lower", "higher"] | None = None
    note: str = ""
    """Long form of the label, which can be understood without a table."""
    columns: dict[str, Number] = {}
    """Further numbers of the row, by column title."""
    carried: Number | None = None
    """The same measurement `CARRIED`, for a row whose value is `ALONE`; None if it was not made."""
    baseline: bool = False
    """True for a number that is not the model's, such as a compressor's on the same text."""
    group: str = ""
    """Group of a baseline: what it has read before. Short lists show the best of each text given."""
    column: bool = False
    """True for a column of the table of all models. Numbers in bits per byte stand in it as well, behind."""
    tone: Literal["", "good", "bad"] = ""
    """Whether the row is good or bad news, which views colour. A `column` with a tone is a badge: it is shown
    by itself as well, with its note."""
    hub_metric: str = ""
    """Name of the metric in the hub's model index (empty: the row is not in the index)."""
    hub_dataset: str = ""
    """Dataset of the row in the hub's model index."""

    def number(self, context: str) -> Number | None:
        """Return the number in a context, `ALONE` or `CARRIED`; None if it was not measured."""
        found = self if context == ALONE else self.carried
        return None if found is None or (found.value is None and not found.text) else found

    def numbers(self) -> Iterator[tuple[str, str, Number]]:
        """Yield the name of the metric, the context and the number, for each context that was measured."""
        for name, context in zip((self.name, f"{self.name}_carried"), CONTEXTS, strict=True):
            if number := self.number(context):
                yield name, context, number


class Table(BaseModel, frozen=True):
    """A table with a title."""

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
        """Return the titles of the further columns."""
        return list(dict.fromkeys(title for row in self.rows for title in row.columns))

    def header(self) -> list[str]:
        """Return the titles of all columns."""
        return [self.head, self.value, *self.columns()]

    def cells(self) -> list[list[str]]:
        """Return the rows as text: label, value and further columns."""
        titles = self.columns()
        return [[row.label, str(row), *(str(row.columns.get(t, "")) for t in titles)] for row in self.rows]


class Histogram(BaseModel, frozen=True):
    """A histogram of the sizes of ``things`` (patches) in a ``unit`` (bytes): ``counts[n]`` have size n."""

    kind: Literal["histogram"] = "histogram"
    title: str
    unit: str
    things: str
    counts: list[int]


class HeatMap(BaseModel, frozen=True):
    """A matrix of numbers shown as colours.

    The value ``middle`` has the neutral colour. The value ``most`` and larger ones have the strongest colour.
    Columns are numbered from 1, and ``column`` names what they stand for (expert).
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
    """Values at x = 1, 2, ..., such as bits per byte over the number of loops."""

    kind: Literal["curve"] = "curve"
    title: str
    x: str
    """Title of the x axis."""
    y: str
    values: list[float]
    mark: int | None = None
    """x of a vertical line, such as the number of loops trained with."""
    mark_label: str = ""


class Series(BaseModel, frozen=True):
    """Points of a plot. The legend shows the names that are not empty."""

    name: str = ""
    x: list[float]
    y: list[float]
    style: Literal["line", "dashed", "faint", "dots", "stars"] = "line"
    colour: int = 0


class Plot(BaseModel, frozen=True):
    """Lines and dots over two axes."""

    kind: Literal["plot"] = "plot"
    title: str
    x: str
    y: str = ""
    series: list[Series]
    log_x: bool = False
    log_y: bool = False
    x_unit: Literal["", "B"] = ""
    """``B`` for an axis of bytes, with decimal prefixes."""
    y_unit: Literal["", "B"] = ""
    top: float | None = None
    """End of the y axis below the largest values, where lines are cut."""
    bands: dict[str, tuple[float, float]] = {}
    """Parts of the x axis by name, such as stages. Every second one is shaded."""
    levels: dict[str, float] = {}
    """Horizontal dashed lines by name, such as baselines."""
    instead: str = "no step was logged"
    """Text of a plot without points."""


class Note(BaseModel, frozen=True):
    """A sentence instead of a figure, for a part of the model that is switched off."""

    kind: Literal["note"] = "note"
    title: str
    text: str


@dataclass(frozen=True)
class Piece:
    """A run of characters. ``mark`` is true where the text stands for a character without a glyph."""

    text: str
    mark: bool = False


@dataclass(frozen=True)
class Segment:
    """A unit that a model reads, such as a patch, of ``size`` bytes and special ids.

    ``closed`` is false for the text after the last boundary. ``probability`` is that of the closing boundary,
    for models that predict boundaries.
    """

    pieces: tuple[Piece, ...]
    size: int
    closed: bool
    probability: float | None


class CutText(BaseModel, frozen=True):
    """A text that a model has cut into segments. ``unit`` names them (patches)."""

    kind: Literal["cut_text"] = "cut_text"
    unit: str
    caption: str
    segments: list[Segment]


@dataclass(frozen=True)
class MarkedByte:
    """A byte with a tooltip and the number of its colour."""

    pieces: tuple[Piece, ...]
    colour: int
    tooltip: str


class MarkedText(BaseModel, frozen=True):
    """A text whose bytes are coloured. ``legend`` names the colours."""

    kind: Literal["marked_text"] = "marked_text"
    title: str
    caption: str
    legend: list[str]
    text: list[MarkedByte]


Figure = Annotated[
    Table | Histogram | HeatMap | Curve | Plot | Note | CutText | MarkedText, Field(discriminator="kind")
]


class Result(Table, frozen=True):
    """The outcome of one measurement."""

    legend: str = ""
    """How to read the rows. Every page and table that shows them repeats it."""
    metrics: dict[str, float] = {}
    """Further numbers for MLflow, which tables do not show."""
    curves: dict[str, list[float]] = {}
    """Curves for MLflow: values at steps 1, 2, ..."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    """Further facts for programs, as JSON."""

    def own_rows(self) -> list[Row]:
        """Return the rows that need their own table: not those of the table of all models."""
        return [row for row in self.rows if not (row.baseline or row.column or row.unit == BITS)]


Results = Mapping[str, Result]


def all_rows(results: Results) -> Iterator[Row]:
    """Yield the rows of all results."""
    for result in results.values():
        yield from result.rows


def baselines(results: Results) -> list[Row]:
    """Return the rows of baselines, best first, each document alone."""
    return best_first(row for row in all_rows(results) if row.baseline)


def best_first(rows: Iterable[Row], context: str = ALONE) -> list[Row]:
    """Sort rows by their numbers in a context, the least first; rows without such a number come last."""

    def value(row: Row) -> float:
        number = row.number(context)
        return float("inf") if number is None or number.value is None else number.value

    return sorted(rows, key=value)


def shortened(rows: Iterable[Row]) -> list[Row]:
    """Return the best baseline of each text given in each context, or all if there is only one text."""
    rows = best_first(rows)
    groups: dict[tuple[str, Number | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.group, row.columns.get(GIVEN)), []).append(row)
    if len(groups) == 1:
        return rows
    kept = [one for own in groups.values() for context in CONTEXTS for one in best_first(own, context)[:1]]
    return [row for row in rows if row in kept]


def metrics(results: Results) -> dict[str, float]:
    """Return all numbers for MLflow, by name."""
    found: dict[str, float] = {}
    for result in results.values():
        for row in result.rows:
            found |= {name: number.value for name, _, number in row.numbers() if number.value is not None}
        found |= result.metrics
    return found


def curves(results: Results) -> dict[str, list[tuple[int, float]]]:
    """Return all curves for MLflow, by name, as pairs of step and value."""
    return {
        name: list(enumerate(values, start=1))
        for result in results.values()
        for name, values in result.curves.items()
    }


def legends(evaluations: Iterable[Results]) -> list[str]:
    """Return the legends of the results of several evaluations, without repeats."""
    found = (result.legend for results in evaluations for result in results.values())
    return [text for text in dict.fromkeys(found) if text]
