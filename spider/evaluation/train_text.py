"""Score the text that a stage trained on, to compare it with held-out text.

The text is the beginning of the last stage's train split, of a mixture that of the first dataset. Each
document is read alone. A model with an n-gram index reads the one without the train split, as in training,
because the other one holds this text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spider.config.run import EvaluationConfig
from spider.data.shards import Shards
from spider.evaluation.bpb import clip_stream, score
from spider.evaluation.result import BITS, Result, Row
from spider.evaluation.spread import intervals
from spider.evaluation.subject import Subject
from spider.evaluation.text import Text
from spider.evaluation.training_text import LearnedFrom
from spider.ngram.lookup import NgramLookup
from spider.ngram.store import open_index


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return bits per byte of the training text; None without ``train_bytes`` in the configuration."""
    if not settings.train_bytes:
        return None
    key = "evaluation.train_bytes"
    train_N, _, _ = train_stream(subject.learned_from, settings.train_bytes, key)
    scored = score(subject.model, train_N, subject.reading, lookup=split_lookup(subject))
    row = Row(
        name="train_text/bpb",
        label="of training text",
        value=scored.bpb,
        interval=intervals(scored.by_target_S, train_N, subject.model.tokens).get("bpb"),
        unit=BITS,
        note=f"Bits per byte of the first {scored.counts['byte']:,} bytes of the train split",
    )
    return Result(title="Training text", rows=[row], metrics={"train_text/bytes": scored.counts["byte"]})


def train_stream(learned_from: LearnedFrom, count: int, key: str) -> tuple[np.ndarray, Text, Path]:
    """Return the first ``count`` bytes of the last stage's train split in ids and as text, and its folder.

    Raises:
        ValueError: The training text is unknown or smaller. The message names the ``key`` of the count.
    """
    last = learned_from.stages[-1][0] if learned_from.stages else None
    folder = next((folder for receipt, folder in learned_from.stages if receipt == last), None)
    if folder is None:
        raise ValueError(f"{key}: the training text cannot be read; set it to 0")
    split = Shards(folder, "train")
    # A document of n bytes has n + 2 ids, and none is empty.
    train_N = clip_stream(np.asarray(split.read(0, min(split.tokens, 3 * count))), count, split.vocabulary)
    text = Text.of(train_N, split.vocabulary)
    if len(text) < count:
        raise ValueError(
            f"{key}: {count:,} bytes are more than the train split of {folder} has ({len(text):,}); lower it"
        )
    return train_N, text, folder


def split_lookup(subject: Subject) -> NgramLookup | None:
    """Return the candidates of the n-gram index without the train split; None for a model without one."""
    if subject.model.lookup is None:
        return None
    assert subject.learned_from.split_index is not None, "`learned_from` names it for a model with an index"
    index = open_index(subject.learned_from.split_index)
    return NgramLookup(index, subject.model.lookup.config, subject.model.tokens)
