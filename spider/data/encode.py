"""Encode one parquet file into uint16 shards. For bytes this is a memory copy.

Arrow gives a batch of documents as one contiguous UTF-8 buffer and an array of offsets. The shard is that
buffer widened to uint16, with BOS and EOS spliced around every document:

    texts    |T h e   c a t|A   d o g|          one uint8 buffer, offsets [0, 7, 12]
    joined   |. T h e   c a t .|. A   d o g .|  Arrow puts a placeholder byte before and after each document
    tokens   |B T h e   c a t E|B A   d o g E|  widened in one pass; BOS and EOS replace the placeholders

With a tokenizer (`spider.tokens.bpe`), and in conversations (`spider.data.chat`), each document is encoded
separately, which is much slower. For bytes, Python handles single documents only to hash their ids for the
split, and to truncate long ones.

Documents that the filters of a dataset refuse are left out first, so all that reads documents through
`read_documents` sees the same ones.

Memory is constant: about a megabyte of text is decoded at a time, then widened in pieces that stay in the
cache. Only a single document larger than that takes more (about four times its size).

Odd rows: null and empty documents are skipped and counted. A document longer than ``max_document_bytes`` is
truncated at a UTF-8 boundary and counted. A repeated id is kept (every copy falls into the same split),
counted and reported by a warning. If the id is missing, null or empty, the text is hashed instead. Text is
copied without decoding, so malformed UTF-8 inside a parquet file is kept as it is.

Trade-off: the index job makes the SHA-256 of the shards (`spider.data.shards.build_metadata`), not this
module. One core hashes 0.9 GB/s of text and the rest of this module processes 0.4 GB/s, so this would cost a
third of the speed of every encode job. There it is one parallel pass over finished files. The quicker digests
of blocks (`spider.data.shards`) are made here, so damage between both jobs is found.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.common.files import replacing, write_bytes, write_json
from spider.common.pace import Pace
from spider.config import Dataset
from spider.data import chat
from spider.data.filters import passing
from spider.data.shards import BLOCKS_KEY, COUNTS, DTYPE, MOST_DOCUMENTS, NAME_BYTES, BlockWriter
from spider.data.split import group_key, hash_keys, salted, split_masks, truncate
from spider.tokens import BYTES, Tokens

logger = logging.getLogger(__name__)

#: What cleaning decides about a part. First the rows of removed documents by reason, uint32. Then the rows of
#: documents that are in the split of another one, with the hashes that decide it. None stands for no row.
Decisions = tuple[Mapping[str, np.ndarray] | None, tuple[np.ndarray, np.ndarray] | None]

FORMAT = 1
BATCH_BYTES = 1 << 20
"""Text decoded at a time: it fits the second-level cache, and is large enough to hide the cost of a call."""
DUPLICATE_ROWS = 1 << 24
"""Rows at the beginning of a part that are searched for repeated ids (8 bytes each)."""
PIECE = 1 << 18
"""Bytes widened and written at a time."""
FLUSH_BYTES = 1 << 23
"""Written bytes after which the kernel is asked to write them to disk."""


def encode_part(
    parquet: Path,
    folder: Path,
    part: str,
    dataset: Dataset,
    tokens: Tokens = BYTES,
    removed: Mapping[str, np.ndarray] | None = None,
    moved: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Encode one parquet file into ``folder/{split}/{part}.bin``, ``.idx`` and ``.json``.

    The splits are those of the dataset: train and validation, and ngram if it has a share. A ``.rows`` has
    each document's row in the parquet file (little-endian uint32). ``removed`` has the rows that are left
    out, by reason, and ``moved`` the rows whose split another hash decides, with these hashes.

    Returns the records by split: file, part, tokens, documents, bytes, the settings, and counts of the rows.

    Raises `ValueError` if the file is missing, incomplete, or lacks a text column of strings, and `OSError`
    with the remedy if the shards cannot be written.
    """
    rows = row_counts()
    hashes = [np.empty(0, np.uint64)]
    encode = None if tokens is BYTES and dataset.format != "chat" else _encoder(dataset, tokens)
    with writing(folder, part, dataset, tokens) as shards:
        for documents, masks, groups in _split(parquet, dataset, rows, hashes, removed, moved):
            for split, writer in shards.writers.items():
                _append(writer, documents.texts.filter(pa.array(masks[split])), encode)
                writer.rows.append(documents.rows[masks[split]])
            if len(shards.groups) < MOST_DOCUMENTS:
                shards.groups += compress(groups, masks["validation"])
        all_hashes = np.concatenate(hashes)
        rows["duplicates"] = len(all_hashes) - len(np.unique(all_hashes))
        if rows["duplicates"]:
            logger.warning(
                "%s: %d documents repeat an earlier id; they are kept", parquet, rows["duplicates"]
            )
        shards.extra["rows"] = rows
    return shards.records


class Encoded(NamedTuple):
    """A document in tokens, and its split by the rule."""

    split: str
    row: int
    id: str | None
    tokens_N: np.ndarray


def encoded(
    parquet: Path | RemoteParquet,
    dataset: Dataset,
    tokens: Tokens = BYTES,
    removed: Mapping[str, np.ndarray] | None = None,
    moved: tuple[np.ndarray, np.ndarray] | None = None,
    until: int | None = None,
    first: int = 0,
) -> Iterator[Encoded]:
    """Yield each document of the shards that `encode_part` writes, or those of the rows before ``until``.

    They begin at the row ``first``. Earlier row groups are not read. The other arguments are those of
    `encode_part`.
    """
    encode = _encoder(dataset, tokens)
    for found, masks, _ in _split(parquet, dataset, row_counts(), [], removed, moved, first):
        wanted = np.full(len(found.rows), True) if until is None else np.asarray(found.rows) < until
        if len(wanted) and not wanted.any():
            return
        for split in dataset.splits:
            chosen = found.filter(pa.array(masks[split] & wanted))
            rows = zip(chosen.rows.tolist(), chosen.ids.to_pylist(), _bytes(chosen.texts), strict=True)
            yield from (Encoded(split, row, id, encode(text)) for row, id, text in rows)


def _encoder(dataset: Dataset, tokens: Tokens) -> Callable[[bytes], np.ndarray]:
    return partial(chat.ids_of, tokens=tokens) if dataset.format == "chat" else tokens.encode


def documents(parquet: Path, dataset: Dataset, decided: Decisions = (None, None)) -> Iterator[bytes]:
    """Yield the text of a part's documents that are neither removed nor held out; raises like
    `encode_part`."""
    for found, held_out in plain_documents(parquet, dataset, decided):
        yield from _bytes(found.texts.filter(pa.array(~held_out)))


def plain_documents(
    parquet: Path, dataset: Dataset, decided: Decisions = (None, None)
) -> Iterator[tuple[Documents, np.ndarray]]:
    """Yield batches of documents without the form of conversations, and which documents are held out.

    Raises like `encode_part`.
    """
    for found, masks, _ in _split(parquet, dataset, row_counts(), [], *decided):
        if dataset.format == "chat":
            plain = pa.array(map(chat.plain, _bytes(found.texts)), pa.large_binary())
            found = found._replace(texts=plain.view(pa.large_string()))
        yield found, masks["validation"]


# ----------------------------------------------------------------------------------------------- reading


class RemoteParquet(Protocol):
    """A parquet file that is not on this machine. Its text form is its address."""

    def parquet(self) -> pq.ParquetFile:
        """Return the opened file."""


def row_counts() -> dict[str, Any]:
    """Return the counts of the rows of a part before it is read."""
    return {"read": 0, "null": 0, "empty": 0, "truncated": 0, "duplicates": 0}


class Documents(NamedTuple):
    """A batch of documents: their texts, ids and values of ``split_by.column``, as large_string."""

    texts: pa.Array
    ids: pa.Array
    groups: pa.Array
    rows: np.ndarray
    """Row of the parquet file of each document, uint32."""

    def filter(self, keep: pa.BooleanArray) -> Documents:
        """Return the documents of a mask."""
        if keep.true_count == len(keep):
            return self
        texts, ids, groups = (column.filter(keep) for column in (self.texts, self.ids, self.groups))
        return Documents(texts, ids, groups, self.rows[keep.to_numpy(zero_copy_only=False)])


def read_documents(
    parquet: Path | RemoteParquet,
    dataset: Dataset,
    counts: dict[str, Any],
    rows: np.ndarray | None = None,
    first: int = 0,
) -> Iterator[Documents]:
    """Yield batches of the documents that meet the filters and are not empty, and count all others.

    With ``rows``, only these are read, from the row groups that have them. With ``first``, only the rows from
    that one on are read.

    Raises:
        ValueError: the file is missing or incomplete, it lacks a column, a column does not fit its filter, or
            a row is not a conversation.
    """
    for documents in _batches(parquet, dataset, counts, rows, first):
        if rows is not None:
            documents = documents.filter(pa.array(np.isin(documents.rows, rows)))
        documents = documents.filter(pa.array(documents.rows >= first))
        if dataset.format == "chat":
            _check_chat(documents, parquet)
        yield _without_blank(documents, counts)


def _check_chat(documents: Documents, parquet: object) -> None:
    for text, row in zip(documents.texts.to_pylist(), documents.rows.tolist(), strict=True):
        try:
            chat.parse(text or "[]")
        except ValueError as error:
            raise ValueError(f"{parquet}: row {row} is not a conversation: {error}") from None


def _split(
    parquet: Path | RemoteParquet,
    dataset: Dataset,
    rows: dict[str, Any],
    id_hashes: list[np.ndarray],
    removed: Mapping[str, np.ndarray] | None = None,
    moved: tuple[np.ndarray, np.ndarray] | None = None,
    first: int = 0,
) -> Iterator[tuple[Documents, dict[str, np.ndarray], list[bytes]]]:
    """Yield batches of documents, a mask for each split, and their groups under ``split_by``.

    This counts rows and collects the hashes of their ids.
    """
    leaving = _Leaving(removed or {})
    for documents in read_documents(parquet, dataset, rows, first=first):
        documents = leaving(documents)
        of_ids, hashes, names = split_hashes(documents, dataset)
        if rows["read"] <= DUPLICATE_ROWS:
            id_hashes.append(of_ids)
        if moved:
            _, mine, theirs = np.intersect1d(
                documents.rows, moved[0], assume_unique=True, return_indices=True
            )
            hashes = hashes.copy()
            hashes[mine] = moved[1][theirs]
        masks = split_masks(hashes, dataset.validation, dataset.ngram)
        texts = _truncate(documents.texts, dataset.max_document_bytes, rows)
        yield documents._replace(texts=texts), masks, names
    if removed is not None:
        rows.setdefault("left_out", {}).update({reason: len(found) for reason, found in removed.items()})
        leaving.check(parquet)


def split_hashes(documents: Documents, dataset: Dataset) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """Return the hashes of ids, those that decide the splits, and the groups under ``split_by``."""
    keys = _keys(documents.texts, documents.ids)
    of_ids = hash_keys(keys)
    if not dataset.split_by:
        return of_ids, of_ids, []
    pattern, salt = re.compile(dataset.split_by.pattern), dataset.split_by.salt
    pairs = zip(documents.groups.to_pylist(), keys, strict=True)
    names = [group_key(value, pattern, key) for value, key in pairs]
    return of_ids, hash_keys(salted(name, salt) for name in names), names


class _Leaving:
    """Leave out documents by their rows."""

    def __init__(self, removed: Mapping[str, np.ndarray]) -> None:
        self._rows = np.concatenate([np.empty(0, np.uint32), *removed.values()])
        self._kept = np.ones(int(self._rows.max(initial=0)) + 1, bool)
        self._kept[self._rows] = False
        self._found = 0

    def __call__(self, documents: Documents) -> Documents:
        """Return the documents that are left."""
        known = np.minimum(documents.rows, len(self._kept) - 1)
        keep = pa.array(self._kept[known] | (known < documents.rows))
        self._found += len(keep) - keep.true_count
        return documents.filter(keep)

    def check(self, parquet: object) -> None:
        """Raise `ValueError` if a document to leave out was not read."""
        if self._found != len(self._rows):
            found = f"{self._found:,} of the {len(self._rows):,} documents that were removed from it"
            raise ValueError(f"{parquet}: has {found}; its evidence is of other text, so make that again")


def _batches(
    parquet: Path | RemoteParquet,
    dataset: Dataset,
    counts: dict[str, Any],
    rows: np.ndarray | None,
    first: int,
) -> Iterator[Documents]:
    """Yield batches of the rows that meet the filters, and count all rows and the others by their filter.

    A column that does not exist is null.
    """
    row_group = 0
    filters = dataset.filters
    left_out = Counter({one.written: 0 for one in filters})
    try:
        with _opened(parquet) as file:
            wanted = columns_in(file.schema_arrow, parquet, dataset)
            if "id_column" not in wanted:
                instead = "" if dataset.split_by else ", the text itself decides the split"
                logger.warning("%s: no column %r%s", parquet, dataset.id_column, instead)
            columns = sorted({*wanted.values(), *dataset.optional.values()})
            pace = Pace("read {done} of {total} documents", file.metadata.num_rows)
            for row_group in range(file.num_row_groups):
                group = file.metadata.row_group(row_group)
                end = counts["read"] + group.num_rows
                wanted_rows = rows is None or np.any((rows >= counts["read"]) & (rows < end))
                if end <= first or not wanted_rows:
                    counts["read"] = end
                    continue
                size = _rows_per_batch(group, dataset.text_column)
                for batch in file.iter_batches(size, [row_group], columns, use_threads=False):
                    nulls = pa.nulls(len(batch), pa.large_string())
                    texts, ids, groups, answers = (
                        as_text(batch[wanted[one]], is_id=one == "id_column") if one in wanted else nulls
                        for one in ("text_column", "id_column", "split_by.column", "answer_column")
                    )
                    texts = _asked(texts, answers) if dataset.answer_column else texts
                    at = np.arange(counts["read"], counts["read"] + len(batch), dtype=np.uint32)
                    counts["read"] += len(batch)
                    documents = Documents(texts, ids, groups, at)
                    if filters:
                        documents = documents.filter(passing(filters, batch, texts, left_out, parquet))
                    yield documents
                    pace(counts["read"])
    except FileNotFoundError:
        raise ValueError(
            f"{parquet}: no such file; download it first (with temp: true it is deleted after encoding)"
        ) from None
    except (pa.ArrowException, OSError) as error:
        remedy = "delete it and download it again"
        if not isinstance(parquet, Path):
            remedy = "run again to continue; if it happens again, leave it out, or name another revision"
        elif parquet.is_symlink():  # to a file of the user, which another download would leave as it is
            remedy = f"copy {parquet.resolve()} again"
        problem = f"not a complete parquet file (row group {row_group}: {str(error).splitlines()[0]})"
        raise ValueError(f"{parquet}: {problem}; {remedy}") from None
    if filters:
        counts["left_out"] = dict(left_out)


def _opened(parquet: Path | RemoteParquet) -> pq.ParquetFile:
    if isinstance(parquet, Path):
        return pq.ParquetFile(parquet, pre_buffer=False, buffer_size=1 << 20)
    return parquet.parquet()


def _asked(questions: pa.Array, answers: pa.Array) -> pa.Array:
    """Return conversations of one question and its answer, as JSON; null where both are null."""
    pairs = zip(questions.to_pylist(), answers.to_pylist(), strict=True)
    rows = [
        None if question is answer is None else chat.asked(question, answer) for question, answer in pairs
    ]
    return pa.array(rows, pa.large_string())


def _rows_per_batch(group: pq.RowGroupMetaData, column: str) -> int:
    """Return the number of rows that hold about `BATCH_BYTES` of text, by the row group's average."""
    sizes = [group.column(i) for i in range(group.num_columns)]
    size = next(c.total_uncompressed_size for c in sizes if c.path_in_schema == column)
    return max(1, min(group.num_rows, BATCH_BYTES * group.num_rows // max(1, size)))


def columns_in(schema: pa.Schema, file: object, dataset: Dataset) -> dict[str, str]:
    """Return the columns that are read from a file by their settings, without an id column that is missing.

    Raises `ValueError` like `require_strings`, or if the column of a filter is missing.
    """
    for setting, column in dataset.optional.items():
        require_column(schema, file, setting, column)
    wanted = {"text_column": dataset.text_column, "id_column": dataset.id_column}
    if dataset.split_by:
        wanted["split_by.column"] = dataset.split_by.column
    if dataset.answer_column:
        wanted["answer_column"] = dataset.answer_column
    if dataset.id_column not in schema.names:
        del wanted["id_column"]
    for setting, column in wanted.items():
        require_strings(schema, file, setting, column)
    return wanted


def require_strings(schema: pa.Schema, file: object, setting: str, column: str) -> None:
    """Raise `ValueError` that names the file if a column is absent or does not hold strings.

    An id may also be of any other kind but a list or a struct.
    """
    require_column(schema, file, setting, column)
    kind = schema.field(column).type
    if pa.types.is_nested(_stored(kind)) if setting == "id_column" else not _is_one(kind, _TEXTS):
        remedy = f"set {setting} to another, or write a column of text into the file"
        raise ValueError(f"{file}: column {column!r} holds {kind}, not strings; {remedy}")


_STRINGS = ("string", "large_string", "string_view", "null")
_TEXTS = (*_STRINGS, "binary", "large_binary", "binary_view")


def _stored(kind: pa.DataType) -> pa.DataType:
    """Return the type that a dictionary or an extension type stores, such as string for JSON."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_one(kind: pa.DataType, names: tuple[str, ...]) -> bool:
    return any(getattr(pa.types, f"is_{name}")(_stored(kind)) for name in names)


def as_text(column: Any, is_id: bool = False) -> Any:
    """Return a column, an array or a chunked one, as large_string. Bytes of a text are not decoded.

    An id of another kind is written as by Python, but a whole number without a point, and bytes that are no
    printable UTF-8 in hexadecimal.
    """
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([as_text(one, is_id) for one in column.chunks], pa.large_string())
    if is_id and not _is_one(column.type, (*_STRINGS, "integer")):
        return pa.array(map(_id, column.to_pylist()), pa.large_string())
    if not is_id and _is_one(column.type, _TEXTS):
        return column.cast(pa.large_binary()).view(pa.large_string())
    return column.cast(pa.large_string())


def _id(value: Any) -> str | None:
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
        return text if text.isprintable() and "\ufffd" not in text else value.hex()
    if value is None or value != value:  # NaN
        return None
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def require_column(schema: pa.Schema, file: object, setting: str, column: str) -> None:
    """Raise `ValueError` that names the file and its columns if a column is absent, or there are several."""
    if schema.names.count(column) > 1:
        raise ValueError(f"{file}: several columns are named {column!r}; give each but one another name")
    if column not in schema.names:
        columns = ", ".join(schema.names) or "none"
        remedy = f"set {setting} to one of them"
        optional = setting.startswith(("split_by", "cleaning"))
        remedy += f", or leave {setting.removesuffix('.column')} out" if optional else ""
        raise ValueError(f"{file}: no column {column!r} (there are: {columns}); {remedy}")


# -------------------------------------------------------------------------------------------- documents


def _bytes(strings: pa.Array) -> list[bytes]:
    plain: list[bytes] = strings.view(pa.large_binary()).to_numpy(zero_copy_only=False).tolist()
    return plain


def _without_blank(documents: Documents, counts: dict[str, Any]) -> Documents:
    """Leave out null and empty documents, and count them."""
    keep = pc.greater(pc.binary_length(documents.texts), 0).fill_null(False)
    blank = len(keep) - keep.true_count
    counts["null"] += documents.texts.null_count
    counts["empty"] += blank - documents.texts.null_count
    return documents.filter(keep)


def _keys(texts: pa.Array, ids: pa.Array) -> list[bytes]:
    """Return the key that decides each document's split: its id, or its text if the id is empty."""
    keys = _bytes(ids.fill_null(""))
    if b"" in keys:
        keys = [key or text for key, text in zip(keys, _bytes(texts), strict=True)]
    return keys


def _truncate(texts: pa.Array, limit: int | None, rows: dict[str, int]) -> pa.Array:
    """Truncate documents that are longer than ``limit`` bytes, and count them."""
    long = pc.greater(pc.binary_length(texts), limit)  # null without a limit
    if not long.true_count:
        return texts
    rows["truncated"] += long.true_count
    heads = [truncate(text, limit) for text in _bytes(texts.filter(long))]
    return pc.replace_with_mask(texts, long, pa.array(heads, pa.large_binary()).view(texts.type))


# ----------------------------------------------------------------------------------------------- writing


class ShardWriter:
    """Append documents to a split's ``.bin`` and ``.idx``, which get these names when ``files`` closes."""

    def __init__(self, name: Path, files: contextlib.ExitStack, vocabulary: Tokens) -> None:
        self.tokens = 0
        self.documents = 0
        self.bytes = 0
        self.rows: list[np.ndarray] = []
        """Rows of the documents in the raw file, uint32; empty for imported ids."""
        self._vocabulary = vocabulary
        temporary = [files.enter_context(replacing(name.with_suffix(suffix))) for suffix in (".bin", ".idx")]
        opened = [files.enter_context(path.open("wb")) for path in temporary]
        self._tokens_file, self._index_file = map(BlockWriter, opened)
        self._piece = np.empty(PIECE, DTYPE)
        self._flushed = 0

    def write(self, ids: np.ndarray, begins: np.ndarray) -> None:
        """Append tokens, among which documents begin at the given positions."""
        self._tokens_file.write(ids.astype(DTYPE, copy=False))
        self._count(len(ids), begins, int(self._vocabulary.bytes_of[ids].sum()))

    def splice(self, joined: np.ndarray, offsets: np.ndarray) -> None:
        """Append documents as bytes, with the arguments of `ByteTokens.splice`."""
        for piece in BYTES.splice(joined, offsets, self._piece):
            self._tokens_file.write(piece)
        self._count(int(offsets[-1]), offsets[:-1], int(offsets[-1]) - 2 * (len(offsets) - 1))

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the blocks of both files (`spider.data.shards`)."""
        return {"bin": "".join(self._tokens_file.digests), "idx": "".join(self._index_file.digests)}

    def _count(self, tokens: int, begins: np.ndarray, size: int) -> None:
        first = (begins + self.tokens).astype("<u8")
        self._index_file.write(first * np.uint64(DTYPE.itemsize))
        self.tokens += tokens
        self.documents += len(begins)
        self.bytes += size
        # The kernel writes new pages to disk while we decode, so that the final fsync finds few. DONTNEED
        # makes Linux start on dirty pages at once; being dirty, they also stay in the cache.
        ready = self.tokens * DTYPE.itemsize - self._flushed
        if ready >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._tokens_file.file.fileno(), self._flushed, ready, os.POSIX_FADV_DONTNEED)
            self._flushed += ready


@dataclass
class PartShards:
    """The shards of a part while they are written."""

    writers: dict[str, ShardWriter]
    """Writers by split."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the records beside the counts and settings."""
    groups: list[bytes] = field(default_factory=list)
    """Group of each held-out document under ``split_by``, at least of the first `MOST_DOCUMENTS`."""
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Records by split, filled when the shards are complete."""


@contextlib.contextmanager
def writing(folder: Path, part: str, dataset: Dataset, tokens: Tokens) -> Iterator[PartShards]:
    """Write ``folder/{split}/{part}.bin``, ``.idx`` and ``.json`` for each of a dataset's splits.

    The JSON records are renamed into place last, so a part with records is complete. An encode without an
    ngram share removes the ngram shards of an earlier one. Raises `OSError` with the remedy if the shards
    cannot be written.
    """
    names = {split: folder / split / part for split in dataset.splits}
    try:
        with contextlib.ExitStack() as files:
            shards = PartShards({split: ShardWriter(name, files, tokens) for split, name in names.items()})
            yield shards
            for name in names.values():  # a record of an earlier encode must not describe the new shard
                name.with_suffix(".json").unlink(missing_ok=True)
            if not dataset.ngram:
                for suffix in (".json", ".bin", ".idx", ".rows"):
                    (folder / "ngram" / part).with_suffix(suffix).unlink(missing_ok=True)
        for split, writer in shards.writers.items():
            record = {"format": FORMAT, "file": f"{split}/{part}.bin", "part": part}
            record |= {name: getattr(writer, name) for name in COUNTS}
            record |= {**dataset.encoding(), **shards.extra, BLOCKS_KEY: writer.digests}
            if tokens.digest:
                record["tokenizer"] = tokens.digest
            if split == "validation" and shards.groups:
                runs = groupby(truncate(group, NAME_BYTES) for group in shards.groups[:MOST_DOCUMENTS])
                record["groups"] = [[group.decode(errors="replace"), len([*run])] for group, run in runs]
            shards.records[split] = record
            if writer.rows:
                rows = np.concatenate(writer.rows).astype("<u4", copy=False)
                write_bytes(names[split].with_suffix(".rows"), rows.tobytes())
            write_json(names[split].with_suffix(".json"), record)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free space (a shard is twice the size of its text)" if full else "make the folder writable"
        raise OSError(
            f"{folder}: cannot write the shards of part {part} ({error.strerror}); {remedy} and run again, "
            "no incomplete shard was kept"
        ) from error


def _append(writer: ShardWriter, texts: pa.Array, encode: Callable[[bytes], np.ndarray] | None) -> None:
    """Write documents, none of them null, by their encoding; None copies their bytes."""
    if not len(texts):
        return
    if encode is None:
        empty = pa.scalar("", texts.type)
        placeholder = pa.scalar("\0", texts.type)
        _, offsets, joined = pc.binary_join_element_wise(empty, texts, empty, placeholder).buffers()
        writer.splice(np.frombuffer(joined, np.uint8), np.frombuffer(offsets, np.int64, len(texts) + 1))
        return
    ids = [encode(text) for text in _bytes(texts)]
    lengths = np.array([len(document) for document in ids])
    writer.write(np.concatenate(ids), np.cumsum(lengths) - lengths)
