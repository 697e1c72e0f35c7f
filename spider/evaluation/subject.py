"""Define `Subject`, the input of every measurement: a model, the held-out text, and the model's scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from spider.config import StageSpec
from spider.evaluation.bpb import Score
from spider.evaluation.text import LearnedFrom, Overlap, Text
from spider.model.interface import Inspector, Model
from spider.model.reading import Scoring


@dataclass(frozen=True)
class Subject:
    """A model with the held-out text that it was scored on."""

    spec: StageSpec
    model: Model
    inspector: Inspector | None
    """Observer of the pass that scored the text; None for a family without an inspector."""
    text: Text
    """The text in bytes."""
    score: Score
    """The score of each document alone."""
    carried: Score | None
    """The score with what came before; None without ``evaluation.carry_over``."""
    reading: Scoring
    """How the model read each document alone."""
    overlap: Overlap | None = None
    """The part of the text that also occurs in the training text. It is None if that was not searched."""
    groups: list[str] = field(default_factory=list)
    """Groups (``split_by``) of the first documents of the text; empty if they are unknown."""
    learned_from: LearnedFrom = field(default_factory=LearnedFrom)
    """The data that the model has learned from."""
    sources: Mapping[str, Path] = field(default_factory=dict)
    """Shards folders of the datasets that are scored by themselves, by name; empty without a mixture."""
    converses: bool = False
    """Whether the model has learned from conversations."""

    @property
    def tokens_N(self) -> np.ndarray:
        """Return the text in ids, beginning with BOS."""
        return self.score.tokens_N

    @cached_property
    def bits_B(self) -> np.ndarray:
        """Return the bits that the model spent on each byte of the text, each document alone."""
        return self.score.bits_B

    @property
    def carrying(self) -> Scoring:
        """How the model reads the text with what came before."""
        return replace(self.reading, carry_over=max(1, self.spec.evaluation.carry_over))
