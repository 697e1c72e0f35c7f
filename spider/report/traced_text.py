"""Cut the sample of a stage into the stretches that stand in the training text, and the text between them."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np

from spider.provenance.traces import Stretch
from spider.report.stages import StageRecord

#: Steps of a place that the page names.
STEPS = 8


class Passage(NamedTuple):
    """A part of the sample."""

    text: str
    number: int
    """Number of its stretch, from 1; 0 outside of all stretches."""


class Entry(NamedTuple):
    """A stretch with its number and its strength."""

    number: int
    stretch: Stretch
    strength: int
    """Strength from 1 to 4. Twice the shortest length, four times, and a single occurrence each add one."""

    @property
    def size(self) -> int:
        """Return the bytes of the stretch."""
        return self.stretch.end - self.stretch.begin


class TracedText(NamedTuple):
    """A sample in passages, with an entry for each stretch that is visible."""

    passages: list[Passage]
    entries: list[Entry]
    share: float
    least: int


def is_traced(stage: StageRecord) -> bool:
    """Return whether the stage has a trace of the sample that it has now."""
    return bool(stage.sample and stage.trace and stage.trace.text == stage.sample.text)


def traced_text(stage: StageRecord) -> TracedText:
    """Return the sample of a traced stage.

    Where stretches overlap, the longest has the text. A character belongs to the stretch of its first byte,
    so a stretch may end inside a character.
    """
    trace = stage.trace
    assert trace, "is_traced() comes first"
    sizes = [len(letter.encode()) for letter in trace.text]
    owner_of_bytes = np.zeros(sum(sizes), int)
    longest_last = sorted(enumerate(trace.stretches, start=1), key=lambda one: one[1].end - one[1].begin)
    for key, stretch in longest_last:
        owner_of_bytes[stretch.begin : stretch.end] = key
    firsts = np.cumsum([0, *sizes])[:-1]
    owners = owner_of_bytes[firsts].tolist() if sizes else []
    numbers = {key: number for number, key in enumerate(dict.fromkeys(filter(None, owners)), start=1)}
    passages = [
        Passage(text="".join(letter for _, letter in group), number=numbers.get(owner, 0))
        for owner, group in groupby(zip(owners, trace.text, strict=True), key=lambda pair: pair[0])
    ]
    entries = [
        Entry(
            number=number,
            stretch=trace.stretches[key - 1],
            strength=_strength(trace.stretches[key - 1], trace.least),
        )
        for key, number in numbers.items()
    ]
    return TracedText(passages=passages, entries=entries, share=trace.share, least=trace.least)


def _strength(stretch: Stretch, least: int) -> int:
    """Return the strength of the colour: longer and rarer stretches have a stronger one."""
    size = stretch.end - stretch.begin
    return 1 + (size >= 2 * least) + (size >= 4 * least) + (stretch.count == 1)
