"""Define `Subject`, the input of every measurement: a model, the held-out text, and the model's scores."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from spider.config import StageSpec
from spider.evaluation.bpb import Score
from spider.evaluation.text import Text, TextBaselines
from spider.model.interface import Inspector, Model
from spider.model.reading import Reading


@dataclass(frozen=True)
class Subject:
    """A model with the held-out text that it was scored on."""

    spec: StageSpec
    model: Model
    inspector: Inspector | None
    """Observer of the pass that scored the text; None for a family without an inspector."""
    tokens_N: np.ndarray
    """The text in ids, beginning with BOS."""
    text: Text
    """The same text in bytes."""
    score: Score
    bits_B: np.ndarray
    """Bits that the model spent on each byte of the text."""
    reading: Reading
    """How the model read the text."""
    baselines: Future[TextBaselines]
    """The baselines and the train/test overlap of the text. A background thread computes them."""
