"""Decide which documents of a part are removed, from the pairs that were found.

A document is removed if it has a pair with an earlier document that was kept. Earlier parts are decided
before, and the documents of a part are decided in order, so the result does not depend on the number of jobs.

An exact duplicate of a document that was removed as a near duplicate repeats what that one repeats. A near
duplicate that is only reported is in the split of the document that it repeats.
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
_OF_PAIR = ("reason", "kept_dataset", "kept_part", "kept_row", "kept_id", "containment", "rule", "split")
_Pair = dict[str, Any]
#: Returns the pairs of a part's documents that are removed (True), and of reported near duplicates (False).
_Decided = Callable[[str, str], dict[bool, dict[int, _Pair]]]


def drop(dataset: str, part: str, pairs: pa.Table, evidence: Callable[[str, str], pa.Table]) -> pa.Table:
    """Return the evidence of a part: a row for each document that is removed, and those only reported.

    Args:
        pairs: evidence of all pairs of the part. Of several pairs for one reason, the first is preferred.
        evidence: returns the evidence of an earlier part by its dataset and its name.
    """
    own: dict[bool, dict[int, _Pair]] = {True: {}, False: {}}

    @cache
    def decided(of: str, name: str) -> dict[bool, dict[int, _Pair]]:
        return own if (of, name) == (dataset, part) else _decided(evidence(of, name), pairs["kept_row"])

    rank = np.array([REASONS.index(reason) for reason in pairs["reason"].to_pylist()], np.int64)
    pairs = pairs.take(np.lexsort((rank, pairs["row"].to_numpy())))
    chosen: list[int] = []
    found: list[_Pair] = []
    columns = zip(*(pairs[name].to_pylist() for name in ("row", "removed", *_OF_PAIR)), strict=True)
    for at, (row, removes, *values) in enumerate(columns):
        pair = _resolved(dict(zip(_OF_PAIR, values, strict=True)), removes, decided)
        known = own[removes] if removes or (pair and pair["reason"] == "near") else {}
        if pair is not None and row not in known:
            known[row] = pair
            chosen.append(at)
            found.append(pair)
    result = pairs.take(pa.array(chosen, pa.int64()))
    for name in _OF_PAIR:
        values = pa.array([pair[name] for pair in found], SCHEMA.field(name).type)
        result = result.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), values)
    return result


def _decided(evidence: pa.Table, rows: pa.ChunkedArray) -> dict[bool, dict[int, _Pair]]:
    """Return the pairs of those documents of a part that are in ``rows``."""
    found = evidence.filter(pc.is_in(evidence["row"], rows)).select(["row", "removed", *_OF_PAIR])
    decided: dict[bool, dict[int, _Pair]] = {True: {}, False: {}}
    for row in found.to_pylist():
        if row["removed"] or row["reason"] == "near":
            decided[row["removed"]][row["row"]] = row
    return decided


def _resolved(pair: _Pair, removes: bool, decided: _Decided) -> _Pair | None:
    """Return the pair of a document with one that is kept, or None."""
    if pair["reason"] == "contaminated":
        return pair
    of_part, row = decided(pair["kept_dataset"], pair["kept_part"]), pair["kept_row"]
    if removed := of_part[True].get(row):
        same = removes and pair["reason"] == "exact" and removed["reason"] == "near"
        return {name: removed[name] for name in _OF_PAIR} if same else None
    reported = of_part[False].get(row)
    if pair["reason"] == "near" and reported and reported["split"] is not None:
        return pair | {"split": reported["split"]}
    return pair
