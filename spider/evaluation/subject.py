"""What measurements are given: a model, the held-out text, and its scores on that text."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spider.config import StageSpec
from spider.data.metadata import load_metadata
from spider.data.shards import Shards
from spider.evaluation.bpb import Learner, Score, clip_stream, score
from spider.evaluation.overlap import Text
from spider.model.interface import Inspector, Model
from spider.tokens import BYTES, Tokens

if TYPE_CHECKING:
    from spider.evaluation.yardsticks import Measured


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


def validation_stream(data: Path, max_bytes: int, tokens: Tokens = BYTES) -> tuple[np.ndarray, str]:
    """Return the first ``max_bytes`` bytes of a validation split in a model's ids, and the dataset's digest.

    The text is cut in bytes and then encoded, so every vocabulary is scored on the same text. Special ids are
    the same in all vocabularies and stay where they are. The text of published shards is cut after a whole id
    and keeps its ids, because encoding it again could cut it otherwise.

    Raises:
        ValueError: the dataset has no validation text.
    """
    metadata = load_metadata(data)
    split = metadata.splits.get("validation")
    if split is None or not split.bytes:
        raise ValueError(
            f"{data}: has no validation text to score; raise `validation` in datasets.{metadata.dataset} "
            "(the share of documents held out) and encode again"
        )
    shards = Shards(data, "validation")
    # A document of n bytes has n + 2 ids at most, and encoding drops empty ones: three ids a byte suffice.
    count = min(shards.tokens, 3 * max_bytes)
    written = metadata.alphabet
    stream_N = clip_stream(np.asarray(shards.read(0, count)), max_bytes, written)
    if written.digest == tokens.digest and (written.digest is None or metadata.imported):
        return stream_N, metadata.digest
    left = len(written.raw(stream_N)) if metadata.imported else max_bytes
    pieces = []
    for run_N in np.split(stream_N, np.flatnonzero(np.diff(written.bytes_of[stream_N] > 0)) + 1):
        text = written.raw(run_N)[:left]
        left -= len(text)
        pieces.append(tokens.encode(text)[1:-1] if text else run_N)
    return np.concatenate(pieces), metadata.digest
