"""Evidence: a row for each pair of a document and the earlier document, or other text, that it repeats.

Pairs and what is removed in the end have this one form, as parquet. A part's file of removed documents has a
record beside it with its SHA-256, so an edited file is found. Its bytes are a function of the rows and of the
version of Arrow.

A document is removed if it has a pair with an earlier document that was kept (`drop`). One job decides this
for all parts of a dataset, in the order of their documents. An exact duplicate of a document that was removed
as a near duplicate repeats what that one repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_KEPT = ["reason", "kept_dataset", "kept_part", "kept_row"]


def drop(
    dataset: str,
    parts: Sequence[str],
    pairs: Callable[..., pa.Table],
    others: Sequence[tuple[str, str, Path]],
) -> Iterator[tuple[str, pa.Table]]:
    """Yield the parts with their evidence: a row for each document that is removed.

    Memory holds the pairs of a part, and what was removed so far of those documents that others repeat.

    Args:
        pairs: returns the evidence of all pairs of a part; with ``columns``, only these. Of several pairs for
            one reason, the first is preferred.
        others: dataset, part and evidence of all parts before, whose documents were decided on.
    """
    places = {one: number for number, one in enumerate([(of, name) for of, name, _ in others])}
    places |= {(dataset, part): len(others) + number for number, part in enumerate(parts)}
    repeated = [np.empty(0, np.uint64)]
    for part in parts:
        kept = pairs(part, columns=_KEPT).filter(pc.field("reason") != "contaminated")
        repeated.append(np.unique(_numbers(kept, places)))
    repeated_D = np.unique(np.concatenate(repeated))
    removed: dict[tuple[int, int], dict[str, Any]] = {}

    def remember(place: int, rows: pa.Table) -> None:
        of_part = rows["row"].to_numpy().astype(np.uint64) | np.uint64(place << 32)
        known = np.append(repeated_D, np.uint64(0))[np.searchsorted(repeated_D, of_part)] == of_part
        for pair in rows.filter(pa.array(known)).to_pylist():
            removed[place, pair["row"]] = pair

    for place, (_, _, path) in enumerate(others):
        remember(place, read(path))
    for part in parts:
        own: dict[int, dict[str, Any]] = {}
        place, found = places[dataset, part], pairs(part)
        rank = np.array([REASONS.index(reason) for reason in found["reason"].to_pylist()], np.int64)
        for pair in found.take(np.lexsort((rank, found["row"].to_numpy()))).to_pylist():
            if pair["reason"] != "contaminated":
                of = places.get((pair["kept_dataset"], pair["kept_part"]), -1)
                row = pair["kept_row"]
                earlier = own.get(row) if of == place else removed.get((of, row))
                if earlier and not (pair["reason"] == "exact" and earlier["reason"] == "near"):
                    continue
                pair |= {name: earlier[name] for name in _OF_PAIR} if earlier else {}
            own.setdefault(pair["row"], pair)
        rows = pa.Table.from_pylist(list(own.values()), SCHEMA)
        remember(place, rows)
        yield part, rows


def _numbers(pairs: pa.Table, places: Mapping[tuple[str, str], int]) -> np.ndarray:
    """Return a number for each kept document of pairs: that of its part, then its row."""
    names = pc.binary_join_element_wise(pairs["kept_dataset"], pairs["kept_part"], "/").combine_chunks()
    known = names.dictionary_encode()
    keys = (tuple(name.split("/")) for name in known.dictionary.to_pylist())
    place_K = np.array([places.get(key, -1) & 0xFFFFFFFF for key in keys], np.uint64)
    return (place_K[known.indices.to_numpy()] << np.uint64(32)) | pairs["kept_row"].to_numpy().astype(
        np.uint64
    )


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
