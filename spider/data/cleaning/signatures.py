"""Signatures: a row for each document of a part that the filters keep, with the hash of its text.

Where near duplicates are found, a row has the bands of MinHash as well, a column each, and the metadata of
the file has the lines of templates. Which lines these are is known when all documents were read. Until then
the hashes of the words are kept in a hidden file, which takes about three times the text.
"""

from __future__ import annotations

import tempfile
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
from spider.data.cleaning.words import Words, text_hashes, words
from spider.data.documents import read_documents, row_counts

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
_NEAR = pa.schema([*SCHEMA, *((name, pa.uint32()) for name in BANDS)])
#: Batches of documents in a row group, about a megabyte of text each.
GROUP = 250
_TEMPLATES = b"templates"


def write_signatures(parquet: Path, output: Path, dataset: Dataset, *, near: bool) -> dict[str, Any]:
    """Write the signatures of a part, and return the counts of its rows; raises like `read_documents`.

    Args:
        near: whether near duplicates are found, so that rows have bands.
    """
    counts = row_counts()
    schema = _NEAR if near else SCHEMA
    batches: list[pa.RecordBatch] = []
    templates: list[np.ndarray] = []
    lines = Counts()
    seen: set[int] = set()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output.parent) as kept, replacing(output) as temporary:
        for documents in read_documents(parquet, dataset, counts):
            hashes = text_hashes(documents.texts)
            sizes = pc.binary_length(documents.texts).cast(pa.int64())
            columns = [documents.rows, documents.ids, sizes, *hashes.T]
            batches.append(pa.record_batch(columns, schema=SCHEMA))
            if near:
                found = words(documents.texts, marks=True)
                is_new = []
                for one in hashes[:, 0].tolist():
                    is_new.append(one not in seen)
                    seen.add(one)
                lines.add(found, np.array(is_new, bool))
                found.save(kept)
        kept.seek(0)
        with pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=False) as writer:
            for begin in range(0, len(batches), GROUP):
                group = batches[begin : begin + GROUP]
                if near:
                    group = [_with_bands(batch, Words.load(kept), lines, templates) for batch in group]
                writer.write_table(pa.Table.from_batches(group, schema))
            if near:
                hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *templates]))
                writer.add_key_value_metadata({_TEMPLATES: hashes.tobytes().hex()})
    return counts


def _with_bands(
    batch: pa.RecordBatch, found: Words, lines: Counts, templates: list[np.ndarray]
) -> pa.RecordBatch:
    """Return a batch with the bands of its words, and append the lines of templates that it has."""
    templates.append(lines.templates(found))
    bands = minhash.bands(found, templates[-1]).reshape(len(batch), len(BANDS))
    return pa.record_batch([*batch.columns, *bands.T], schema=_NEAR)


def templates_in(signatures: Path) -> np.ndarray:
    """Return the sorted hashes of the lines of templates of a part, uint64."""
    return np.frombuffer(bytes.fromhex(pq.read_metadata(signatures).metadata[_TEMPLATES].decode()), np.uint64)
