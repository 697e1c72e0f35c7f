"""Evidence: a row for each pair of a document and the earlier document, or other text, that it repeats.

Pairs and what is removed in the end have this one form, as parquet. A part's file of removed documents has a
record beside it with its SHA-256, so an edited file is found. Its bytes are a function of the rows and of the
version of Arrow.

A document is removed if it has a pair with an earlier document that was kept (`drop`). Earlier parts are
decided before, and the documents of a part are decided in order, so the result does not depend on the number
of jobs. An exact duplicate of a document that was removed as a near duplicate repeats what that one repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.common.files import replacing, sha256, snakemake
from spider.common.record import Record
from spider.common.results import Results
from spider.config import Config
from spider.data import chat
from spider.data.documents import as_bytes, read_documents, row_counts

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


#: Characters of a text that are shown.
SHOWN = 4000
#: A row of evidence.
Row = dict[str, Any]


def listed(rows: list[Row], examples: int) -> Iterator[str]:
    """Yield lines with the number of documents by reason, and the first ones."""
    for reason, count in sorted(Counter(row["reason"] for row in rows).items()):
        yield f"{reason}: {count:,} removed"
    if not rows:
        yield "no document was removed"
    yield from islice(map(_described, rows), examples)


def shown(rows: list[Row], id: str, dataset: str, config: Config, results: Results) -> Iterator[str]:
    """Yield lines with the text of a removed document, and then what it repeats.

    Args:
        id: id of the document, or ``PART/ROW``.

    Raises:
        ValueError: no such document was removed, or its raw text is deleted.
    """
    row = next((row for row in rows if id in (row["id"], f"{row['part']}/{row['row']}")), None)
    if row is None:
        listed = f"`spider data removed {dataset}` lists some"
        raise ValueError(f"datasets.{dataset}: no document {id!r} was removed; {listed}")
    yield f"{_described(row)} (rule {row['rule']})"
    text = _text(config, results, config.raw(dataset), row["part"], row["row"])
    repeated = row["words"] or _text(config, results, row["kept_dataset"], row["kept_part"], row["kept_row"])
    yield from ("", "removed:", text[:SHOWN], "", "what it repeats:", repeated[:SHOWN])


def _described(row: Row) -> str:
    """Return a document, why it was removed, and what it repeats."""
    place, kept = f"{row['part']}/{row['row']}", f"{row['kept_part']}/{row['kept_row']}"
    name = f"{row['id']} ({place})" if row["id"] else place
    share = "" if row["containment"] is None else f", {row['containment']:.0%}"
    of = f" of {row['kept_dataset']}" if row["kept_dataset"] else ""
    words = f": {row['words']!r}" if row["words"] else ""
    return f"{name}: {row['reason']}{share}, repeats {row['kept_id'] or kept}{of}{words}"


def _text(config: Config, results: Results, dataset: str, part: str, row: int) -> str:
    """Return the text of a row of a raw file; a question and its answer are two lines."""
    spec, rows = config.dataset(dataset), np.array([row])
    batches = read_documents(results.raw(dataset, part), spec, row_counts(), rows)
    (text,) = (text for batch in batches for text in as_bytes(batch.texts))
    return (chat.plain(text) if spec.format == "chat" else text).decode(errors="replace")
