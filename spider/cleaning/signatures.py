"""Signatures: a row for each document of a part that the filters keep, with the hash of its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.cleaning.words import text_hashes
from spider.config import Dataset
from spider.data.encode import read_documents, row_counts
from spider.files import replacing

SCHEMA = pa.schema(
    [
        ("row", pa.uint32()),  # of the raw file
        ("id", pa.large_string()),
        ("bytes", pa.int64()),
        ("hash", pa.uint64()),  # with `hash2` the 128 bits of the exact form of the text
        ("hash2", pa.uint64()),
    ]
)
#: Rows of a row group.
GROUP = 1 << 16


def write_signatures(parquet: Path, output: Path, dataset: Dataset) -> dict[str, Any]:
    """Write the signatures of a part, and return the counts of its rows; raises like `read_documents`."""
    counts = row_counts()
    waiting: list[pa.RecordBatch] = []
    with replacing(output) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        for documents in read_documents(parquet, dataset, counts):
            hashes = text_hashes(documents.texts)
            columns = [
                pa.array(documents.rows),
                documents.ids,
                pc.binary_length(documents.texts).cast(pa.int64()),
                pa.array(hashes[:, 0]),
                pa.array(hashes[:, 1]),
            ]
            waiting.append(pa.record_batch(columns, schema=SCHEMA))
            if sum(map(len, waiting)) >= GROUP:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting.clear()
        writer.write_table(pa.Table.from_batches(waiting, SCHEMA))
    return counts
