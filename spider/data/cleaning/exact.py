"""Exact duplicates: pair each document with the first earlier one of the same text, but for white space.

Two texts count as equal if 128 bits of their hashes are (`words.text_hashes`). A part holds
its own signatures and those of one earlier part at a time, so memory does not grow with the dataset.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spider.data.cleaning.evidence import SCHEMA, table

RULE = "exact/1"
_COLUMNS = ["row", "id", "bytes", "hash", "hash2"]


class Part(NamedTuple):
    """A part of a dataset, and its signatures."""

    dataset: str
    part: str
    signatures: Path


def exact_pairs(own: Part, earlier: Iterable[Part]) -> pa.Table:
    """Return evidence that pairs documents with earlier ones: the first of each dataset.

    Args:
        own: the part whose documents are paired.
        earlier: parts of other datasets, then those of its own dataset before it, in order.
    """
    mine = pq.read_table(own.signatures, columns=_COLUMNS)
    hashes, second = mine["hash"].to_numpy(), mine["hash2"].to_numpy()
    found = []
    paired, of = np.zeros(len(mine), bool), ""
    for part in (*earlier, own):
        if part.dataset != of:
            paired[:], of = False, part.dataset
        other = mine if part == own else pq.read_table(part.signatures, columns=_COLUMNS)
        if not len(other):
            continue
        known, first = np.unique(other["hash"].to_numpy(), return_index=True)
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        same = ~paired & (known[at] == hashes) & (other["hash2"].to_numpy()[first[at]] == second)
        if part == own:
            same &= first[at] < np.arange(len(mine))
        paired |= same
        found.append(_pairs(own, mine.filter(same), part, other.take(first[at[same]])))
    return pa.concat_tables([SCHEMA.empty_table(), *found])


def _pairs(own: Part, copies: pa.Table, part: Part, originals: pa.Table) -> pa.Table:
    columns = {name: copies[name] for name in ("row", "id", "bytes")}
    columns |= {"kept_row": originals["row"], "kept_id": originals["id"], "kept_part": part.part}
    columns |= {"part": own.part, "kept_dataset": part.dataset, "reason": "exact", "rule": RULE}
    return table({**columns, "containment": 1.0, "removed": True}, len(copies))
