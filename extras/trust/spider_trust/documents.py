"""Say which document a token belongs to, and where a document stands in encoded datasets.

The encoder writes the row of the raw file of each document beside a shard (``.rows``). The raw file has its
id. Several datasets may be encoded from the same raw files (``like``), so a document is looked for in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.common.results import Results
from spider.config import Config
from spider.data.cleaning import evidence
from spider.data.documents import as_text
from spider.data.shards import Shards, check_size, load_metadata
from spider_trust.order import Row


class Piece(NamedTuple):
    """A part of a row of a step, which is of one document."""

    dataset: str
    part: str
    raw_row: int
    id: str | None
    """None if the raw file is gone or lacks ids."""
    begin: int
    """First token, counted from the document's first one."""
    ids: list[int]
    text: str


class Copy(NamedTuple):
    """A document in an encoded dataset."""

    dataset: str
    split: str
    digest: str
    """Digest of the split."""
    begin: int
    """First token in the split."""
    end: int


def pieces(config: Config, results: Results, row: Row) -> Iterator[Piece]:
    """Yield the pieces of a row of a step.

    Raises:
        ValueError: the shards do not have the rows of their documents.
    """
    shards = row.shards
    for begin, last in row.spans:
        while begin < last:
            s, first, at, after = shards.document(begin)
            number = int(np.searchsorted(shards.begins(s), at, side="right")) - 1
            raw_row = int(rows_of(shards, s)[max(0, number)])
            end = min(last, begin + after - at)
            ids = shards.read(begin, end - begin)
            part = shards.files[s].stem
            id = id_of(config, results, row.dataset, part, raw_row)
            text = shards.vocabulary.decode(ids.tolist())
            yield Piece(row.dataset, part, raw_row, id, at - first, ids.tolist(), text)
            begin = end


def find(config: Config, results: Results, document: str) -> tuple[str, str, int]:
    """Return the raw dataset, the part and the row of a document: ``DATASET:ID`` or ``DATASET/PART:ROW``.

    Raises:
        ValueError: there is no such document, or the raw files that have the ids are gone.
    """
    left, colon, name = document.partition(":")
    dataset, slash, part = left.partition("/")
    if not colon or not name:
        raise ValueError(f"{document}: name a document as DATASET:ID or DATASET/PART:ROW")
    raw = config.raw(dataset)
    config.dataset(raw)
    metadata = load_metadata(results.shards(dataset))
    parts = sorted({one.part for split in metadata.splits.values() for one in split.shards})
    if slash:
        if part not in parts or not name.isdecimal():
            raise ValueError(f"{document}: {dataset} has no such part and row (parts: {', '.join(parts)})")
        return raw, part, int(name)
    missing = []
    for one in parts:
        ids = _ids(config, results, raw, one)
        missing += [] if ids is not None else [one]
        row = -1 if ids is None else pc.index(ids, pa.scalar(name, pa.large_string())).as_py()
        if row >= 0:
            return raw, one, row
    if missing:
        where = f"the ids of {', '.join(missing)} are gone with their raw files, or were never there"
        raise ValueError(f"{document}: not found, but {where}; name it as DATASET/PART:ROW")
    raise ValueError(f"{document}: {dataset} has no document of this id")


def copies(config: Config, results: Results, raw: str, part: str, row: int) -> Iterator[Copy]:
    """Yield where a document stands in each encoded dataset that is made from the same raw files."""
    for dataset in (name for name in config.datasets if config.raw(name) == raw):
        folder = results.shards(dataset)
        if not (folder / "metadata.json").exists():
            continue
        for split in load_metadata(folder).splits:
            shards = Shards(folder, split)
            for s in (s for s, path in enumerate(shards.files) if path.stem == part):
                border = int(shards.borders[s])
                for number in np.flatnonzero(rows_of(shards, s) == row).tolist():
                    begin = border + int(shards.begins(s)[number])
                    _, first, _, end = shards.document(begin)
                    yield Copy(dataset, split, shards.digest, begin, border + end)
                    assert border + first == begin, "a document begins there"


def left_out(config: Config, results: Results, raw: str, part: str, row: int) -> Iterator[str]:
    """Yield a sentence for each dataset whose cleaning removed a document."""
    for dataset in (name for name in config.datasets if config.raw(name) == raw):
        path = results.cleaning(dataset, "removed", part)
        if config.cleaning(dataset) and path.exists():
            removed = evidence.read(path)
            chosen = removed.filter(pc.and_(pc.equal(removed["row"], row), removed["removed"]))
            for reason in chosen["reason"].unique().to_pylist():
                yield f"{dataset}: left out by cleaning ({reason})"


def rows_of(shards: Shards, s: int) -> np.ndarray:
    """Return the row of the raw file of each document of a file of a split."""
    path = shards.files[s].with_suffix(".rows")
    if not path.exists():
        raise ValueError(
            f"{path}: no rows of documents, so no document can be named; published tokens have none, and "
            "other text has to be encoded again"
        )
    check_size(path, 4 * len(shards.begins(s)))
    return np.memmap(path, "<u4", "r") if path.stat().st_size else np.zeros(0, "<u4")


def id_of(config: Config, results: Results, dataset: str, part: str, row: int) -> str | None:
    ids = _ids(config, results, config.raw(dataset), part)
    return None if ids is None or row >= len(ids) else ids[row].as_py()


def _ids(config: Config, results: Results, raw: str, part: str) -> pa.ChunkedArray | None:
    path, column = results.raw(raw, part), config.dataset(raw).id_column
    known = path.is_file() and column in pq.read_schema(path).names
    return _column(path, column) if known else None


@lru_cache(maxsize=8)
def _column(path: Path, column: str) -> pa.ChunkedArray:
    """Return the ids in a column of a raw file."""
    return as_text(pq.read_table(path, columns=[column])[column], is_id=True)
