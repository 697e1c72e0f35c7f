"""Decide which documents of a part are removed, from the pairs that were found.

A document is removed if it has a pair with an earlier document that was kept. Earlier parts are decided
before, and the documents of a part are decided in order, so the result does not depend on the number of jobs.

An exact duplicate of a document that was removed as a near duplicate repeats what that one repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spider.data.cleaning.evidence import REASONS, SCHEMA

#: What the evidence of a document has of its pair.
_OF_PAIR = ("reason", "kept_dataset", "kept_part", "kept_row", "kept_id", "containment", "rule")


def drop(dataset: str, part: str, pairs: pa.Table, evidence: Callable[[str, str], pa.Table]) -> pa.Table:
    """Return the evidence of a part: a row for each document that is removed.

    Args:
        pairs: evidence of all pairs of the part. Of several pairs for one reason, the first is preferred.
        evidence: returns the evidence of an earlier part by its dataset and its name.
    """
    own: dict[int, dict[str, Any]] = {}

    @cache
    def removed_of(of: str, name: str) -> dict[int, dict[str, Any]]:
        if (of, name) == (dataset, part):
            return own
        rows = evidence(of, name)
        found = rows.filter(pc.is_in(rows["row"], pairs["kept_row"]))
        return {pair["row"]: pair for pair in found.to_pylist()}

    rank = np.array([REASONS.index(reason) for reason in pairs["reason"].to_pylist()], np.int64)
    for pair in pairs.take(np.lexsort((rank, pairs["row"].to_numpy()))).to_pylist():
        if pair["reason"] != "contaminated":
            earlier = removed_of(pair["kept_dataset"], pair["kept_part"]).get(pair["kept_row"])
            if earlier and not (pair["reason"] == "exact" and earlier["reason"] == "near"):
                continue
            pair |= {name: earlier[name] for name in _OF_PAIR} if earlier else {}
        own.setdefault(pair["row"], pair)
    return pa.Table.from_pylist(list(own.values()), SCHEMA)
