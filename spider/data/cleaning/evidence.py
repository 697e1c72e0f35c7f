"""Evidence: a row for each pair of a document and the earlier document, or other text, that it repeats.

Pairs and what is removed in the end have this one form, as parquet. A part's file of
removed documents has a record beside it with its SHA-256, so an edited file is found. Its bytes are a
function of the rows and of the version of Arrow.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.common.files import replacing, sha256, snakemake
from spider.common.record import Record

SCHEMA = pa.schema(
    [
        ("part", pa.string()),
        ("row", pa.uint32()),  # of the raw file
        ("id", pa.large_string()),
        ("bytes", pa.int64()),
        ("reason", pa.string()),  # one of REASONS
        ("kept_dataset", pa.string()),
        ("kept_part", pa.string()),
        ("kept_row", pa.uint32()),
        ("kept_id", pa.large_string()),  # for `contaminated` the source of the matched text
        ("words", pa.large_string()),  # that match, for `contaminated`
        ("containment", pa.float64()),
        ("rule", pa.string()),  # name and version, such as near/1
        ("matches", pa.uint32()),  # for `contaminated`, the number of matching sequences of words
    ]
)
#: A document with several reasons is counted by the first of these.
REASONS = ("exact", "contaminated", "near")


class Removed(Record):
    """``removed/{part}.json``: what was removed of a part."""

    WHAT: ClassVar[str] = "the record of removed documents"

    part: str
    counts: dict[str, int]
    """Removed documents by reason."""
    sha256: str
    """SHA-256 of the evidence beside it."""


def table(columns: dict[str, object], count: int) -> pa.Table:
    """Return evidence from columns; one value stands for all rows, and a missing column is null."""
    arrays = []
    for field in SCHEMA:
        value = columns.get(field.name)
        if not isinstance(value, (np.ndarray, pa.Array, pa.ChunkedArray)):
            value = pa.repeat(pa.scalar(value, field.type), count)
        elif isinstance(value, np.ndarray):
            value = pa.array(value, field.type)
        arrays.append(value)
    return pa.table(arrays, schema=SCHEMA)


def write(path: Path, rows: pa.Table) -> None:
    """Write evidence, or other rows of a part, whole or not at all."""
    with replacing(path) as temporary:
        pq.write_table(rows.combine_chunks(), temporary, compression="zstd")


def write_removed(path: Path, part: str, rows: pa.Table) -> Removed:
    """Write the evidence of a part, and its record beside it."""
    write(path, rows)
    found = Counter(rows["reason"].to_pylist())
    counts = {reason: found[reason] for reason in REASONS if found[reason]}
    record = Removed(format=Removed.FORMAT, part=part, counts=counts, sha256=sha256(path))
    return record.write(path.with_suffix(".json"))


def read(path: Path) -> pa.Table:
    """Return the evidence of a part. Raise `ValueError` if it was changed since it was written."""
    record = Removed.read(path.with_suffix(".json"))
    if not path.exists() or sha256(path) != record.sha256:
        problem = "was changed since it was written" if path.exists() else "is missing"
        raise ValueError(f"{path}: {problem}; delete it and {path.stem}.json, and run {snakemake(path)}")
    return pq.read_table(path)


def removed_rows(path: Path | None) -> dict[str, np.ndarray] | None:
    """Return the removed rows of a part by reason from its evidence, or None without one; raise as `read`
    does."""
    evidence = read(path) if path else None
    if not evidence:
        return None
    reasons = pc.unique(evidence["reason"]).to_pylist()
    return {one: evidence.filter(pc.equal(evidence["reason"], one))["row"].to_numpy() for one in reasons}
