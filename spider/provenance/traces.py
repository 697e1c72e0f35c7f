"""The records of ``trace.json``. Reading one imports neither torch nor the index."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from pydantic import BaseModel

from spider.record import Record


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
    """The first `spider.provenance.trace.PLACES` of them."""


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
