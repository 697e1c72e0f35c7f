"""Decide which documents of a part are removed, from the pairs that were found.

A document is removed if it has a pair with an earlier document that was kept. Earlier parts are decided
before, and the documents of a part are decided in order, so the result does not depend on the number of jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa

from spider.cleaning.evidence import REASONS, SCHEMA


def drop(dataset: str, part: str, pairs: pa.Table, gone: Callable[[str, str], np.ndarray]) -> pa.Table:
    """Return the evidence of a part: a row for each document that is removed, and those only reported.

    Args:
        pairs: evidence of all pairs of the part.
        gone: returns the removed rows of an earlier part by its dataset and its name.
    """
    own: set[int] = set()

    @cache
    def rows_gone(of: str, name: str) -> set[int]:
        return own if (of, name) == (dataset, part) else set(gone(of, name).tolist())

    rank = np.array([REASONS.index(reason) for reason in pairs["reason"].to_pylist()], np.int64)
    order = np.lexsort((rank, pairs["row"].to_numpy()))
    pairs = pairs.take(order)
    names = ("row", "removed", "reason", "kept_dataset", "kept_part", "kept_row")
    chosen = []
    for at, values in enumerate(zip(*(pairs[name].to_pylist() for name in names), strict=True)):
        row, removes, reason, *kept = values
        if not removes:
            chosen.append(at)
        elif row not in own and (reason == "contaminated" or kept[2] not in rows_gone(kept[0], kept[1])):
            own.add(row)
            chosen.append(at)
    return pairs.take(chosen) if chosen else SCHEMA.empty_table()
