"""Signatures: a row for each document of a part that the filters keep, with the hash of its text.

Where near duplicates are found, a row has the bands of MinHash as well, a column each, and the metadata of
the file has the lines of templates. Such lines are counted in a first pass over the part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.common.files import replacing
from spider.config import Dataset
from spider.data.cleaning import minhash
from spider.data.cleaning.lines import Counts
from spider.data.cleaning.words import text_hashes, words
from spider.data.encode import read_documents, row_counts

SCHEMA = pa.schema(
    [
        ("row", pa.uint32()),  # of the raw file
        ("id", pa.large_string()),
        ("bytes", pa.int64()),
        ("hash", pa.uint64()),  # with `hash2` the 128 bits of the exact form of the text
        ("hash2", pa.uint64()),
    ]
)
#: Columns of the bands: those of a document's own text, then those of its whole text.
BANDS = [f"{text}{band}" for text in ("own", "whole") for band in range(minhash.BANDS)]
#: Rows of a row group.
GROUP = 1 << 16
_TEMPLATES = b"templates"


def write_signatures(parquet: Path, output: Path, dataset: Dataset, *, near: bool) -> dict[str, Any]:
    """Write the signatures of a part, and return the counts of its rows; raises like `read_documents`.

    Args:
        near: whether near duplicates are found, so that rows have bands.
    """
    counts = row_counts()
    lines = _count_lines(parquet, dataset) if near else None
    templates = [np.empty(0, np.uint64)]
    schema = pa.schema([*SCHEMA, *((name, pa.uint32()) for name in BANDS)]) if near else SCHEMA
    waiting: list[pa.RecordBatch] = []
    with (
        replacing(output) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=False) as writer,
    ):
        for documents in read_documents(parquet, dataset, counts):
            hashes = text_hashes(documents.texts)
            columns = [
                pa.array(documents.rows),
                documents.ids,
                pc.binary_length(documents.texts).cast(pa.int64()),
                pa.array(hashes[:, 0]),
                pa.array(hashes[:, 1]),
            ]
            if lines:
                found = words(documents.texts, marks=True)
                templates.append(lines.templates(found))
                bands = minhash.bands(found, templates[-1]).reshape(len(hashes), len(BANDS))
                columns += [pa.array(column) for column in bands.T]
            waiting.append(pa.record_batch(columns, schema=schema))
            if sum(map(len, waiting)) >= GROUP:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting.clear()
        writer.write_table(pa.Table.from_batches(waiting, schema))
        if near:
            writer.add_key_value_metadata({_TEMPLATES: np.unique(np.concatenate(templates)).tobytes().hex()})
    return counts


def templates_in(signatures: Path) -> np.ndarray:
    """Return the sorted hashes of the lines of templates of a part, uint64."""
    return np.frombuffer(bytes.fromhex(pq.read_metadata(signatures).metadata[_TEMPLATES].decode()), np.uint64)


def _count_lines(parquet: Path, dataset: Dataset) -> Counts:
    """Return in how many documents of a part each line occurs. Exact duplicates count once."""
    lines = Counts()
    seen: set[int] = set()
    for documents in read_documents(parquet, dataset, row_counts()):
        hashes = text_hashes(documents.texts)[:, 0].tolist()
        new = []
        for one in hashes:
            new.append(one not in seen)
            seen.add(one)
        lines.add(words(documents.texts, marks=True), np.array(new, bool))
    return lines
