"""The records of ``trace.json``. Reading one imports neither torch nor the index."""

from __future__ import annotations

import shlex
from itertools import groupby
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel, computed_field

from spider.common.formatting import times
from spider.common.record import Record
from spider.evaluation.result import Figure, MarkedByte, MarkedText, Number, Piece, Result, Row, Table

#: Steps of a place that views name.
_STEPS = 8
#: Colours of stretches in a text, the weakest first.
_STRENGTHS = [
    "short and repeated",
    "longer, or there once",
    "longer, and there once",
    "longest, and there once",
]


class Read(NamedTuple):
    """A row of a step that read a token. Steps count from 1, as in ``metrics.jsonl``; rows from 0."""

    stage: str
    step: int
    """Step of the stage."""
    global_step: int
    """Step of the run."""
    row: int


class Place(BaseModel, frozen=True):
    """The place of a stretch in the training text."""

    dataset: str
    split: str
    part: str
    document: int
    """Number of the document in its shard, from 0."""
    tokens: tuple[int, int]
    """First token of the stretch in the split, and its end."""
    row: int | None
    """Row of the raw file; None for imported token ids, and for shards of an earlier version."""
    id: str | None
    """Id of the document; None without ids, and where the raw file is deleted."""
    file: str
    sha256: str
    reads: tuple[Read, ...] = ()
    """Rows of the steps of the run that read it; empty without a run, and for text that is only looked up."""


class Stretch(BaseModel, frozen=True):
    """A stretch of the text that stands in the training text. It is as long as possible."""

    begin: int
    """First byte in the text."""
    end: int
    text: str
    count: int
    """Occurrences in the training text."""
    places: tuple[Place, ...]
    """The first `spider_trust.trace.PLACES` of them."""


class Trace(Record):
    """``trace.json``: the stretches of a text, in its order. They may overlap."""

    WHAT: ClassVar[str] = "a trace"

    run: str | None
    stage: str | None
    datasets: tuple[str, ...]
    text: str
    least: int
    share: float
    """Share of the text's bytes that stand in a stretch."""
    stretches: tuple[Stretch, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def results(self) -> dict[str, Result]:
        """Return the text with its stretches in colours, and the table of their places.

        Where stretches overlap, the longest has the text. A character belongs to the stretch of its first
        byte, so a stretch may end inside a character.
        """
        if not self.text:
            return {}
        sizes = [len(letter.encode()) for letter in self.text]
        owner_of_bytes = np.zeros(sum(sizes), int)
        longest_last = sorted(enumerate(self.stretches, start=1), key=lambda one: one[1].end - one[1].begin)
        for key, stretch in longest_last:
            owner_of_bytes[stretch.begin : stretch.end] = key
        owners = owner_of_bytes[np.cumsum([0, *sizes])[:-1]].tolist()
        numbers = {key: number for number, key in enumerate(dict.fromkeys(filter(None, owners)), start=1)}
        shown = []
        for owner, group in groupby(zip(owners, self.text, strict=True), key=lambda pair: pair[0]):
            text = "".join(letter for _, letter in group)
            colour, tooltip = -1, ""
            if owner:
                one = self.stretches[owner - 1]
                colour = self._strength(one)
                tooltip = f"stretch {numbers[owner]}: {one.end - one.begin:,} bytes, {times(one.count)}"
            shown.append(MarkedByte(pieces=(Piece(text),), colour=colour, tooltip=tooltip))
        rows = [
            Row(
                name=f"trace/{number}",
                label=f"{number}: {self.stretches[key - 1].text}",
                value=self.stretches[key - 1].end - self.stretches[key - 1].begin,
                columns={
                    "times": Number(value=self.stretches[key - 1].count),
                    "first places": Number(
                        value=None, text="; ".join(self._place(one) for one in self.stretches[key - 1].places)
                    ),
                },
            )
            for key, number in numbers.items()
        ]
        share = f"{self.share:.0%} of this text stands in the training text, in stretches of at least"
        marked = MarkedText(
            title="A sample, and where it repeats the training text",
            caption=f"{share} {self.least} bytes.",
            legend=_STRENGTHS,
            text=shown,
        )
        table = Table(title="Stretches in the training text", head="stretch", value="bytes", rows=rows)
        figures: list[Figure] = [marked, table] if rows else [marked]
        return {"trace": Result(title="Trace", metrics={"trace/share": self.share}, figures=figures)}

    def _strength(self, stretch: Stretch) -> int:
        """Return the number of the colour: longer and rarer stretches have a stronger one."""
        size = stretch.end - stretch.begin
        return (size >= 2 * self.least) + (size >= 4 * self.least) + (stretch.count == 1)

    def _place(self, place: Place) -> str:
        """Return a place of a stretch in words."""
        document = f"{place.dataset}/{place.part}:{place.row}"
        if place.row is None:
            document = f"{place.dataset}/{place.part}, document {place.document:,} of the shard"
        words = [document]
        if place.id is not None:
            words.append(f"id {place.id}")
        if place.file:
            words.append(f"raw file {place.file}, SHA-256 {place.sha256}")
        if place.reads:
            steps = [f"{read.stage} {read.global_step:,}" for read in place.reads]
            more = f" and {len(steps) - _STEPS} more" if len(steps) > _STEPS else ""
            words.append(f"read at step {', '.join(steps[:_STEPS])}{more}")
        if place.row is not None and self.run:
            words.append(f"`spider seen {shlex.quote(document)} --run {shlex.quote(self.run)}`")
        return ", ".join(words)
