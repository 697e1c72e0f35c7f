"""What measurements are given: a model, the held-out text, and its scores on that text."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from spider.config import StageSpec
from spider.evaluation.bpb import Learner, Score, score
from spider.evaluation.text import Measured, Text
from spider.model.interface import Inspector, Model


@dataclass(frozen=True)
class Subject:
    """A model with the held-out text that it was scored on."""

    spec: StageSpec
    model: Model
    inspector: Inspector | None
    """It observed the pass that scored the text; None for a family without one."""
    tokens_N: np.ndarray
    """The text in ids, which begins with BOS."""
    text: Text
    """The same text in bytes."""
    score: Score
    bits_B: np.ndarray
    """Bits that each byte of the text cost the model."""
    n_loops: int
    autocast: bool
    beside: Future[Measured]
    """The baselines and the train/test overlap of the text, which are computed in a thread meanwhile."""

    def score_again(
        self, tokens_N: np.ndarray, *, n_loops: int | None = None, learner: Learner | None = None
    ) -> Score:
        """Score other ids, with another number of loops, or with a learner, in the same windows."""
        return score(
            self.model,
            tokens_N,
            seq_len=self.spec.window,
            overlap=self.spec.evaluation.overlap,
            batch=self.spec.evaluation.batch,
            n_loops=n_loops or self.n_loops,
            autocast=self.autocast,
            learner=learner,
        )
