"""One parquet file to uint16 shards: of bytes, a memory copy.

Arrow hands us a batch of documents as one contiguous UTF-8 buffer and an array of offsets. The shard is that
buffer widened to uint16 with BOS and EOS spliced around every document:

    texts    |T h e   c a t|A   d o g|          one uint8 buffer, offsets [0, 7, 12]
    joined   |. T h e   c a t .|. A   d o g .|  Arrow puts a placeholder byte before and after each document
    tokens   |B T h e   c a t E|B A   d o g E|  widened in one pass; the ids are stored at the joined offsets

With a tokenizer (`spider.tokens.bpe`), and in conversations (`spider.data.chat`), each document is encoded by
itself, at a small part of that speed. Of bytes, nothing is done per document in Python but hashing its id for
the split, and cutting it where it is too long.

Memory is constant: about a megabyte of text is decoded at a time, then widened in pieces that stay in the
cache; only a single document larger than that takes more (about four times its size).

What happens to odd rows: null and empty documents are skipped and counted; a document longer than
``max_document_bytes`` is cut at a UTF-8 boundary and counted; a repeated id is kept (every copy falls into
the same split), counted and warned of; where the id is missing, null or empty the text is hashed instead.
Text is copied, never decoded, so malformed UTF-8 inside a parquet survives as it is.

Trade-off: a shard's SHA-256 is taken by the index job (`spider.data.metadata.build_metadata`), not here. One
core hashes 0.9 GB/s of text where all the rest of this module does 0.4 GB/s, so it would cost a third of the
speed of every encode job; there it is one parallel pass over finished files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.config import Dataset
from spider.data import chat
from spider.data.split import cut, group_key, hash_keys, split_masks
from spider.data.writing import ShardWriter, writing
from spider.tokens import BYTES, Tokens

logger = logging.getLogger(__name__)

BATCH_BYTES = 1 << 20
"""Text to decode at a time: small enough for the second-level cache, large enough to hide the call."""
REMEMBERED_ROWS = 1 << 24
"""Repeated ids are looked for among the first so many rows of a part (8 bytes each)."""


def encode_part(
    parquet: Path, folder: Path, part: str, dataset: Dataset, tokens: Tokens = BYTES
) -> dict[str, Any]:
    """Encode one parquet file into ``folder/{split}/{part}.bin``, ``.idx`` and ``.json``, for each of the
    dataset's splits: train and validation, and ngram where that has a share.

    The JSON records are renamed into place last, so that a part whose records stand is whole; what an encode
    with an index left is removed by one without. Returns the records by split: file, part, tokens, documents,
    bytes, the settings, and counts of the rows read.

    Raises `ValueError` where the file is missing, not a whole parquet file, or lacks a text column of
    strings, and `OSError` with the remedy where the shards cannot be written.
    """
    rows = _no_rows()
    seen = [np.empty(0, np.uint64)]
    to_ids: Callable[[bytes], np.ndarray] | None = None if tokens is BYTES else tokens.encode
    if dataset.format == "chat":
        to_ids = partial(chat.ids_of, tokens=tokens)
    with writing(folder, part, dataset, tokens) as made:
        for texts, masks in _split(parquet, dataset, rows, seen):
            for split, writer in made.writers.items():
                _append(writer, texts.filter(pa.array(masks[split])), to_ids)
        ids_seen = np.concatenate(seen)
        rows["duplicates"] = repeated = len(ids_seen) - len(np.unique(ids_seen))
        if repeated:
            logger.warning("%s: %d documents repeat an earlier id; they are kept", parquet, repeated)
        made.said["rows"] = rows
    return made.records


def documents(parquet: Path, dataset: Dataset) -> Iterator[bytes]:
    """The text of a part's documents that are not held out; raises as `encode_part`."""
    for texts, masks in _split(parquet, dataset, _no_rows(), []):
        kept = _bytes(texts.filter(pa.array(~masks["validation"])))
        yield from kept if dataset.format == "text" else map(chat.plain, kept)


# ----------------------------------------------------------------------------------------------- reading


def _check_chat(texts: pa.Array, parquet: Path, before: int) -> None:
    for row, text in enumerate(texts.to_pylist(), start=before):
        try:
            chat.parse(text or "[]")
        except ValueError as error:
            raise ValueError(f"{parquet}: row {row} is no conversation: {error}") from None


def _no_rows() -> dict[str, int]:
    return {"read": 0, "null": 0, "empty": 0, "truncated": 0, "duplicates": 0}


def _split(
    parquet: Path, dataset: Dataset, rows: dict[str, int], seen: list[np.ndarray]
) -> Iterator[tuple[pa.Array, dict[str, np.ndarray]]]:
    """Batches of documents, and which are in each split; counts rows and keeps hashes of their ids."""
    for texts, ids, kin in _batches(parquet, dataset):
        if dataset.format == "chat":
            _check_chat(texts, parquet, rows["read"])
        rows["read"] += len(texts)
        texts, ids, kin = _drop_blank(texts, ids, kin, rows)
        keys = _keys(texts, ids)
        hashes = hash_keys(keys)
        if rows["read"] <= REMEMBERED_ROWS:
            seen.append(hashes)
        if dataset.split_by:
            pattern = re.compile(dataset.split_by.pattern)
            groups = zip(kin.to_pylist(), keys, strict=True)
            hashes = hash_keys(group_key(value, pattern, key) for value, key in groups)
        masks = split_masks(hashes, dataset.validation, dataset.ngram)
        yield _truncate(texts, dataset.max_document_bytes, rows), masks


def _batches(parquet: Path, dataset: Dataset) -> Iterator[tuple[pa.Array, pa.Array, pa.Array]]:
    """Batches of texts, ids and what ``split_by`` reads, as large_string; null where there is no column."""
    row_group, by = 0, dataset.split_by
    wanted = {"text_column": dataset.text_column, "id_column": dataset.id_column}
    wanted |= {"split_by.column": by.column} if by else {}
    try:
        with pq.ParquetFile(parquet, pre_buffer=False, buffer_size=1 << 20) as file:
            if dataset.id_column not in file.schema_arrow.names:
                instead = "" if by else ", the text itself decides the split"
                logger.warning("%s: no column %r%s", parquet, wanted.pop("id_column"), instead)
            for setting, column in wanted.items():
                _require(file.schema_arrow, parquet, setting, column)
            for row_group in range(file.num_row_groups):
                size = _rows_a_batch(file.metadata.row_group(row_group), dataset.text_column)
                columns = sorted(set(wanted.values()))
                for batch in file.iter_batches(size, [row_group], columns, use_threads=False):
                    nothing = pa.nulls(len(batch), pa.large_string())
                    yield tuple(
                        batch[wanted[setting]].cast(pa.large_string()) if setting in wanted else nothing
                        for setting in ("text_column", "id_column", "split_by.column")
                    )
    except FileNotFoundError:
        raise ValueError(f"{parquet}: no such file; download it first") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{parquet}: not a whole parquet file (row group {row_group}: {str(error).splitlines()[0]}); "
            "delete it and download it again"
        ) from None


def _rows_a_batch(group: pq.RowGroupMetaData, column: str) -> int:
    """Rows that hold about `BATCH_BYTES` of text, by the row group's average."""
    sizes = [group.column(i) for i in range(group.num_columns)]
    size = next(c.total_uncompressed_size for c in sizes if c.path_in_schema == column)
    return max(1, min(group.num_rows, BATCH_BYTES * group.num_rows // max(1, size)))


def _require(schema: pa.Schema, parquet: Path, setting: str, column: str) -> None:
    """Refuse a file whose ``column`` is absent or holds no strings (an id may also be an integer)."""
    if column not in schema.names:
        there = ", ".join(schema.names) or "none"
        remedy = f"set {setting} to one of them"
        remedy += ", or leave split_by out" if setting == "split_by.column" else ""
        raise ValueError(f"{parquet}: no column {column!r} (there are: {there}); {remedy}")
    kind = schema.field(column).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    kinds = [pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null]
    if setting == "id_column":
        kinds.append(pa.types.is_integer)
    if not any(is_kind(plain) for is_kind in kinds):
        raise ValueError(f"{parquet}: column {column!r} holds {kind}, not strings; set {setting} to another")


# -------------------------------------------------------------------------------------------- documents


def _bytes(strings: pa.Array) -> list[bytes]:
    plain: list[bytes] = strings.view(pa.large_binary()).to_numpy(zero_copy_only=False).tolist()
    return plain


def _drop_blank(
    texts: pa.Array, ids: pa.Array, kin: pa.Array, rows: dict[str, int]
) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Leave out null and empty documents, and count them."""
    keep = pc.greater(pc.binary_length(texts), 0).fill_null(False)
    blank, nulls = len(texts) - keep.true_count, texts.null_count
    rows["null"] += nulls
    rows["empty"] += blank - nulls
    return (texts.filter(keep), ids.filter(keep), kin.filter(keep)) if blank else (texts, ids, kin)


def _keys(texts: pa.Array, ids: pa.Array) -> list[bytes]:
    """What decides each document's split: its id, or its text where it has none."""
    keys = _bytes(ids.fill_null(""))
    if b"" in keys:
        keys = [key or text for key, text in zip(keys, _bytes(texts), strict=True)]
    return keys


def _truncate(texts: pa.Array, limit: int | None, rows: dict[str, int]) -> pa.Array:
    """Cut the documents that are longer than ``limit`` bytes, and count them."""
    long = pc.greater(pc.binary_length(texts), limit)  # null where there is no limit
    if not long.true_count:
        return texts
    rows["truncated"] += long.true_count
    heads = [cut(text, limit) for text in _bytes(texts.filter(long))]
    return pc.replace_with_mask(texts, long, pa.array(heads, pa.large_binary()).view(texts.type))


# ----------------------------------------------------------------------------------------------- writing


def _append(writer: ShardWriter, texts: pa.Array, to_ids: Callable[[bytes], np.ndarray] | None) -> None:
    """Write the documents that ``texts`` are, none of them null, as the ids that are made of each; None: as
    their bytes, copied."""
    if not len(texts):
        return
    if to_ids is None:
        nothing, room = pa.scalar("", texts.type), pa.scalar("\0", texts.type)
        _, offsets, joined = pc.binary_join_element_wise(nothing, texts, nothing, room).buffers()
        offsets, joined = np.frombuffer(offsets, np.int64, len(texts) + 1), np.frombuffer(joined, np.uint8)
        writer.splice(joined, offsets)
        return
    ids = [to_ids(text) for text in _bytes(texts)]
    lengths = np.array([len(document) for document in ids])
    writer.write(np.concatenate(ids), np.cumsum(lengths) - lengths)
