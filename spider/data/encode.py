"""One parquet file to uint16 shards: a memory copy.

Arrow hands us a batch of documents as one contiguous UTF-8 buffer and an array of offsets. The shard is that
buffer widened to uint16 with BOS and EOS spliced around every document:

    texts    |T h e   c a t|A   d o g|          one uint8 buffer, offsets [0, 7, 12]
    joined   |. T h e   c a t .|. A   d o g .|  Arrow puts a placeholder byte before and after each document
    tokens   |B T h e   c a t E|B A   d o g E|  widened in one pass; the ids are stored at the joined offsets

Nothing is done per document in Python but hashing its id for the split. Memory is constant: about a megabyte
of text is decoded at a time, then widened in pieces that stay in the cache; only a single document larger
than that takes more (about four times its size).

What happens to odd rows: null and empty documents are skipped and counted; a document longer than
``max_document_bytes`` is cut at a UTF-8 boundary and counted; a repeated id is kept (every copy falls into
the same split), counted and warned of; where the id is missing, null or empty the text is hashed instead.
Text is copied, never decoded, so malformed UTF-8 inside a parquet survives as it is.

Trade-off: a shard's SHA-256 is taken by the index job (`spider.data.metadata.build_metadata`), not here. One
core hashes 0.9 GB/s of text where all the rest of this module does 0.4 GB/s, so it would cost a third of the
speed of every encode job; there it is one parallel pass over finished files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.config import Dataset
from spider.data.metadata import COUNTS, DTYPE, SPLITS, settings_of
from spider.data.split import hash_keys, validation_mask
from spider.files import replacing, write_json
from spider.tokens import BYTES

logger = logging.getLogger(__name__)

FORMAT = 1

BATCH_BYTES = 1 << 20
"""Text to decode at a time: small enough for the second-level cache, large enough to hide the call."""
PIECE = 1 << 18
"""Tokens widened and written at a time."""
FLUSH_BYTES = 1 << 23
"""Written bytes after which the kernel is told to start on them."""
REMEMBERED_KEYS = 1 << 24
"""Repeated ids are looked for among the first so many documents of a part (8 bytes each)."""


def encode_part(parquet: Path, folder: Path, part: str, dataset: Dataset) -> dict[str, Any]:
    """Encode one parquet file into ``folder/{train,validation}/{part}.bin``, ``.idx`` and ``.json``.

    The JSON records are renamed into place last, so that a part whose records stand is whole. Returns the two
    records by split: file, part, tokens, documents, bytes, the settings, and counts of the rows read.

    Raises `ValueError` where the file is missing, not a whole parquet file, or lacks a text column of
    strings, and `OSError` with the remedy where the shards cannot be written.
    """
    rows = {"read": 0, "null": 0, "empty": 0, "truncated": 0, "duplicates": 0}
    seen, remembered = list[np.ndarray](), 0
    names = {split: folder / split / part for split in SPLITS}
    with _explained(folder, part), contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(_writer(name)) for split, name in names.items()}
        for texts, ids in _batches(parquet, dataset.text_column, dataset.id_column):
            rows["read"] += len(texts)
            texts, ids = _drop_blank(texts, ids, rows)
            hashes = hash_keys(_keys(texts, ids))
            if remembered < REMEMBERED_KEYS:
                seen.append(hashes)
                remembered += len(hashes)
            held_out = validation_mask(hashes, dataset.validation)
            if dataset.max_document_bytes is not None:
                texts = _truncate(texts, dataset.max_document_bytes, rows)
            writers["train"].append(texts.filter(pa.array(~held_out)))
            writers["validation"].append(texts.filter(pa.array(held_out)))
        for name in names.values():  # a record left by an earlier encode must not vouch for the new shard
            name.with_suffix(".json").unlink(missing_ok=True)
    ordered = np.sort(np.concatenate(seen)) if seen else np.empty(0, np.uint64)
    rows["duplicates"] = int((ordered[1:] == ordered[:-1]).sum())
    if rows["duplicates"]:
        logger.warning("%s: %d documents repeat an earlier id; they are kept", parquet, rows["duplicates"])
    records = {}
    for split, writer in writers.items():
        records[split] = {"format": FORMAT, "file": f"{split}/{part}.bin", "part": part}
        records[split] |= {name: getattr(writer, name) for name in COUNTS}
        records[split] |= {**settings_of(dataset), "rows": rows}
        with _explained(folder, part):
            write_json(names[split].with_suffix(".json"), records[split])
    return records


@contextlib.contextmanager
def _explained(folder: Path, part: str) -> Iterator[None]:
    """Turn a failure to write into one line that says where and what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room (a shard is twice the size of its text)" if full else "make the folder writable"
        raise OSError(
            f"{folder}: cannot write the shards of part {part} ({error.strerror}); {remedy} and run again, "
            "nothing half written was kept"
        ) from error


# ----------------------------------------------------------------------------------------------- reading


def _batches(parquet: Path, text_column: str, id_column: str) -> Iterator[tuple[pa.Array, pa.Array | None]]:
    """Batches of (texts, ids) as string or large_string arrays; ids is None where there is no such column."""
    row_group, wanted = 0, [text_column]
    try:
        with pq.ParquetFile(parquet, pre_buffer=False, buffer_size=1 << 20) as file:
            _require(file.schema_arrow, parquet, "text_column", text_column)
            if id_column in file.schema_arrow.names:
                _require(file.schema_arrow, parquet, "id_column", id_column)
                wanted.append(id_column)
            else:
                logger.warning("%s: no column %r, the text itself decides the split", parquet, id_column)
            for row_group in range(file.num_row_groups):
                size = _rows_a_batch(file.metadata.row_group(row_group), text_column)
                for batch in file.iter_batches(size, [row_group], wanted, use_threads=False):
                    texts, *ids = map(_strings, batch.columns)
                    yield texts, ids[0] if ids else None
    except FileNotFoundError:
        raise ValueError(f"{parquet}: no such file; download it first") from None
    except (pa.ArrowException, OSError) as error:
        where = f"row group {row_group}: {str(error).splitlines()[0]}"
        raise ValueError(
            f"{parquet}: not a whole parquet file ({where}); delete it and download it again"
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
        raise ValueError(
            f"{parquet}: no column {column!r} (there are: {there}); set {setting} to one of them"
        )
    kind = schema.field(column).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    kinds = [pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null]
    if setting == "id_column":
        kinds.append(pa.types.is_integer)
    if not any(is_kind(plain) for is_kind in kinds):
        raise ValueError(f"{parquet}: column {column!r} holds {kind}, not strings; set {setting} to another")


def _strings(array: pa.Array) -> pa.Array:
    """The same column as string or large_string."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return array
    return array.cast(pa.large_string())


# -------------------------------------------------------------------------------------------- documents


def _raw(strings: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (n + 1,) and the uint8 buffer they index, of a string or large_string array, without a copy."""
    width = np.dtype(np.int64 if pa.types.is_large_string(strings.type) else np.int32)
    _, offsets, data = strings.buffers()
    if len(strings) == 0:
        return np.zeros(1, width), np.zeros(0, np.uint8)
    offsets = np.frombuffer(offsets, width, len(strings) + 1, strings.offset * width.itemsize)
    return offsets, np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)


def _drop_blank(
    texts: pa.Array, ids: pa.Array | None, rows: dict[str, int]
) -> tuple[pa.Array, pa.Array | None]:
    """Leave out null and empty documents, and count them."""
    blank = np.diff(_raw(texts)[0]) == 0
    nulls = texts.null_count
    if nulls:
        blank |= texts.is_null().to_numpy(zero_copy_only=False)
    if not blank.any():
        return texts, ids
    rows["null"] += nulls
    rows["empty"] += int(blank.sum()) - nulls
    keep = pa.array(~blank)
    return texts.filter(keep), ids if ids is None else ids.filter(keep)


def _keys(texts: pa.Array, ids: pa.Array | None) -> list[bytes]:
    """What decides each document's split: its id, or its text where it has none."""
    if ids is None:
        return _bytes(texts)
    keys = _bytes(ids.fill_null("") if ids.null_count else ids)
    if b"" in keys:
        keys = [key or text for key, text in zip(keys, _bytes(texts), strict=True)]
    return keys


def _bytes(strings: pa.Array) -> list[bytes]:
    offsets, data = _raw(strings)
    start, end = int(offsets[0]), int(offsets[-1])
    whole = data[start:end].tobytes()  # slicing bytes is three times as fast as slicing a memoryview
    return [whole[a:b] for a, b in pairwise((offsets - start).tolist())]


def _truncate(texts: pa.Array, limit: int, rows: dict[str, int]) -> pa.Array:
    """Cut every document to at most ``limit`` bytes, at the start of a UTF-8 character."""
    offsets, data = _raw(texts)
    starts, ends = offsets[:-1], offsets[1:]
    long = ends - starts > limit
    if not long.any():
        return texts
    cuts = starts[long] + limit
    for _ in range(3):  # a character has at most three continuation bytes, 10xxxxxx
        cuts -= (data[cuts] & 0xC0) == 0x80
    rows["truncated"] += int(long.sum())
    # Every document becomes two neighbours, its head and its tail; Arrow then copies the heads together.
    bounds = np.repeat(offsets, 2)[:-1]
    bounds[1::2] = ends
    bounds[1::2][long] = cuts
    halves = type(texts).from_buffers(2 * len(texts), pa.py_buffer(bounds), texts.buffers()[2])
    heads = np.zeros(2 * len(texts), dtype=bool)
    heads[::2] = True
    return halves.filter(pa.array(heads))


# ----------------------------------------------------------------------------------------------- writing


class _ShardWriter:
    """Appends documents to one split's ``.bin`` and ``.idx``, given as unbuffered files."""

    def __init__(self, tokens_file: FileIO, index_file: FileIO) -> None:
        self.tokens = self.documents = self.bytes = 0
        self._tokens_file = tokens_file
        self._index_file = index_file
        self._piece = np.empty(PIECE, DTYPE)
        self._flushed = 0

    def append(self, texts: pa.Array) -> None:
        """Write the documents that ``texts`` are, none of them null."""
        if len(texts) == 0:
            return
        nothing, room = pa.scalar("", texts.type), pa.scalar("\0", texts.type)
        offsets, joined = _raw(pc.binary_join_element_wise(nothing, texts, nothing, room))
        for piece in BYTES.splice(joined, offsets, self._piece):
            _write(self._tokens_file, piece)
        first = offsets[:-1].astype("<u8") + np.uint64(self.tokens)
        _write(self._index_file, first * np.uint64(DTYPE.itemsize))
        self.tokens += int(offsets[-1])
        self.documents += len(texts)
        self.bytes += int(offsets[-1]) - 2 * len(texts)
        self._start_flushing()

    def _start_flushing(self) -> None:
        """Have the kernel write new pages to disk while we decode, so that the final fsync finds few."""
        end = self.tokens * DTYPE.itemsize
        if end - self._flushed >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            # "Not needed" makes Linux start on dirty pages at once; being dirty, they also stay in the cache.
            os.posix_fadvise(
                self._tokens_file.fileno(), self._flushed, end - self._flushed, os.POSIX_FADV_DONTNEED
            )
            self._flushed = end


@contextlib.contextmanager
def _writer(name: Path) -> Iterator[_ShardWriter]:
    """A writer of ``name.bin`` and ``name.idx``, which appear under those names on success only."""
    with (
        replacing(name.with_suffix(".bin")) as tokens,
        replacing(name.with_suffix(".idx")) as index,
        open(tokens, "wb", buffering=0) as tokens_file,
        open(index, "wb", buffering=0) as index_file,
    ):
        yield _ShardWriter(tokens_file, index_file)


def _write(file: FileIO, array: np.ndarray) -> None:
    """Write all of ``array``: a raw file may take less than it is given, and says why at the next call."""
    rest = array.data.cast("B")
    while rest:
        rest = rest[file.write(rest) :]
