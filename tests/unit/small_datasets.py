"""A dataset's settings for a test, at the schema's defaults but for what the test is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spider.config import Dataset
from spider.data.encode import writing
from spider.data.metadata import build_metadata
from spider.data.shards import Shards
from spider.tokens import BYTES


def dataset(**settings: Any) -> Dataset:
    return Dataset.model_validate({"source": {"kind": "pydocs"}, **settings})


def shards_of_ids(
    folder: Path, ids: Sequence[np.ndarray], begins: Sequence[np.ndarray] | None = None
) -> Shards:
    """Write a split of one shard for each array of ids, and return a view of it.

    Documents begin at ``begins`` (default: the shards have none).
    """
    parts = [f"{number:03d}" for number in range(len(ids))]
    nowhere = [np.zeros(0, np.int64)] * len(ids)
    for part, own, first in zip(parts, ids, begins or nowhere, strict=True):
        with writing(folder, part, dataset(), BYTES) as made:
            made.writers["train"].write(own, first)
    build_metadata(folder, "ids", dataset(), source={}, parts=parts)
    return Shards(folder, "train")
