"""Read the documents of a parquet file: those that the filters keep, and the split of each.

Arrow decodes about four megabytes of text at a time, so memory is constant. Only a single document that is
larger takes more. Documents that the filters of a dataset refuse are left out first, so all that reads them
sees the same ones.

Odd rows: null and empty documents are skipped and counted. A document longer than ``max_document_bytes`` is
truncated at a UTF-8 boundary and counted. If the id is missing, null or empty, the text is hashed instead.
Text is copied without decoding, so malformed UTF-8 inside a parquet file is kept as it is.

The first 64 bits of the BLAKE2b hash of a document's key, as a fraction of 2**64, are a position in the unit
interval, which the shares divide into three:

    0       validation        validation + ngram                    1
    |  held out  |  n-gram index  |             training             |

The key is the document's id, or its text if it has none. With ``split_by`` it is the name of a group (a site,
a package), so that a whole group is in one split; a salt chooses other groups. The order, the number of
parts, the machine and the seed do not matter. So a document keeps its split when the corpus is divided anew,
and both copies of a duplicated id are in the same split. The held-out documents do not depend on the share of
the index, and a larger share contains every document of a smaller one. The shares are met in expectation,
with a difference of few documents.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.common.formatting import Pace
from spider.config import Dataset
from spider.config.data import SIZE, Filter
from spider.data import chat

logger = logging.getLogger(__name__)

BATCH_BYTES = 1 << 22
"""Text decoded at a time, enough to hide the cost of calls."""


class RemoteParquet(Protocol):
    """A parquet file that is not on this machine. Its text form is its address."""

    def parquet(self) -> pq.ParquetFile:
        """Return the opened file."""


class Documents(NamedTuple):
    """A batch of documents: their texts, ids and values of ``split_by.column``, as large_string."""

    texts: pa.Array
    ids: pa.Array
    groups: pa.Array
    rows: np.ndarray
    """Row of the parquet file of each document, uint32, rising."""

    def filter(self, keep: np.ndarray) -> Documents:
        """Return the documents of a mask."""
        if keep.all():
            return self
        texts, ids, groups = (column.filter(pa.array(keep)) for column in self[:3])
        return Documents(texts, ids, groups, self.rows[keep])

    def among(self, rows: np.ndarray) -> np.ndarray:
        """Return which documents are at these rows, which rise."""
        begin, end = np.searchsorted(rows, [self.rows[0], self.rows[-1] + 1]) if len(self.rows) else (0, 0)
        return np.isin(self.rows, rows[begin:end])


class Placed(NamedTuple):
    """Documents that cleaning does not remove, and the split of each."""

    documents: Documents
    masks: dict[str, np.ndarray]
    """The documents of each split, as bool."""
    id_hashes: np.ndarray
    groups: list[bytes]
    """Group of each document under ``split_by``; empty without it."""


def row_counts() -> dict[str, Any]:
    """Return the counts of the rows of a part before it is read."""
    return {"read": 0, "null": 0, "empty": 0, "truncated": 0, "duplicates": 0}


def read_documents(
    parquet: Path | RemoteParquet,
    dataset: Dataset,
    counts: dict[str, Any],
    rows: np.ndarray | None = None,
    only: int | None = None,
) -> Iterator[Documents]:
    """Yield batches of the documents that meet the filters and are not empty, and count all others.

    With ``rows``, which rise, only these are read, from the row groups that have them. With ``only``, the row
    group of this number is read. A column that does not exist is null.

    Raises:
        ValueError: the file is missing or incomplete, it lacks a column, a column does not fit its filter, or
            a row is not a conversation.
    """
    left_out = Counter({one.written: 0 for one in dataset.filters})
    row_group = 0
    try:
        with _opened(parquet) as file:
            wanted = columns_in(file.schema_arrow, parquet, dataset)
            if "id_column" not in wanted and not only:
                instead = "" if dataset.split_by else ", the text itself decides the split"
                logger.warning("%s: no column %r%s", parquet, dataset.id_column, instead)
            columns = sorted({*wanted.values(), *dataset.optional.values()})
            pace = Pace("read {done} of {total} documents", file.metadata.num_rows)
            for row_group in range(file.num_row_groups):
                group = file.metadata.row_group(row_group)
                begin, end = counts["read"], counts["read"] + group.num_rows
                needed = rows is None or np.any((rows >= begin) & (rows < end))
                if not needed or only not in (None, row_group):
                    counts["read"] = end
                    continue
                # About `BATCH_BYTES` of text, by the row group's average.
                size = max(1, BATCH_BYTES * group.num_rows // max(1, text_bytes(group, dataset)))
                for batch in file.iter_batches(size, [row_group], columns, use_threads=False):
                    documents = _documents(batch, wanted, dataset, counts["read"])
                    counts["read"] += len(batch)
                    keep = _passing(dataset.filters, batch, documents.texts, left_out, parquet)
                    documents = documents.filter(keep if rows is None else keep & documents.among(rows))
                    if dataset.format == "chat":
                        _check_chat(documents, parquet)
                    has_text = _mask(pc.greater(pc.binary_length(documents.texts), 0))
                    counts["null"] += documents.texts.null_count
                    counts["empty"] += int((~has_text).sum()) - documents.texts.null_count
                    yield documents.filter(has_text)
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
    if dataset.filters:
        counts["left_out"] = dict(left_out)


def placed_documents(
    parquet: Path | RemoteParquet,
    dataset: Dataset,
    counts: dict[str, Any],
    removed: Mapping[str, np.ndarray] | None = None,
    only: int | None = None,
) -> Iterator[Placed]:
    """Yield batches of the documents that cleaning keeps, truncated, with their splits.

    ``removed`` has the rows that cleaning removes, by reason. Reads, raises and counts like `read_documents`.
    """
    gone = np.sort(np.concatenate([np.empty(0, np.uint32), *(removed or {}).values()]))
    found = 0
    for documents in read_documents(parquet, dataset, counts, only=only):
        is_gone = documents.among(gone)
        found += int(is_gone.sum())
        documents = documents.filter(~is_gone)
        id_hashes, hashes, groups = split_hashes(documents, dataset)
        long = pc.greater(pc.binary_length(documents.texts), dataset.max_document_bytes)  # null: no limit
        if long.true_count:
            counts["truncated"] += long.true_count
            texts = as_bytes(documents.texts.filter(long))
            heads = [truncate(text, dataset.max_document_bytes) for text in texts]
            short = pa.array(heads, pa.large_binary()).view(pa.large_string())
            documents = documents._replace(texts=pc.replace_with_mask(documents.texts, long, short))
        masks = split_masks(hashes, dataset.validation, dataset.ngram)
        yield Placed(documents, masks, id_hashes, groups)
    if removed is not None:
        counts.setdefault("left_out", {}).update({reason: len(rows) for reason, rows in removed.items()})
        if found != len(gone):
            has = f"has {found:,} of the {len(gone):,} documents that were removed from it"
            raise ValueError(f"{parquet}: {has}; its evidence is of other text, so make that again")


def plain_documents(
    parquet: Path, dataset: Dataset, removed: Mapping[str, np.ndarray] | None = None
) -> Iterator[tuple[Documents, np.ndarray]]:
    """Yield batches of documents without the form of conversations, and which documents are held out.

    Raises like `read_documents`.
    """
    for found, masks, _, _ in placed_documents(parquet, dataset, row_counts(), removed):
        if dataset.format == "chat":
            plain = pa.array(map(chat.plain, as_bytes(found.texts)), pa.large_binary())
            found = found._replace(texts=plain.view(pa.large_string()))
        yield found, masks["validation"]


def learned_texts(
    parquet: Path, dataset: Dataset, removed: Mapping[str, np.ndarray] | None = None
) -> Iterator[bytes]:
    """Yield the text of a part's documents that are neither removed nor held out; raise like
    `read_documents`."""
    for found, held_out in plain_documents(parquet, dataset, removed):
        yield from as_bytes(found.filter(~held_out).texts)


def as_bytes(strings: pa.Array) -> list[bytes]:
    """Return strings as bytes, without decoding them."""
    plain: list[bytes] = strings.view(pa.large_binary()).to_numpy(zero_copy_only=False).tolist()
    return plain


def _mask(values: pa.BooleanArray) -> np.ndarray:
    """Return Arrow's booleans as an array; null is False."""
    mask: np.ndarray = values.fill_null(False).to_numpy(zero_copy_only=False)
    return mask


def text_bytes(group: pq.RowGroupMetaData, dataset: Dataset) -> int:
    """Return the size of the text column of a row group, with its nested ones, by the footer of its file."""
    columns = [group.column(i) for i in range(group.num_columns)]
    name = dataset.text_column
    own = (one for one in columns if one.path_in_schema == name or one.path_in_schema.startswith(f"{name}."))
    return sum(one.total_uncompressed_size for one in own)


def _opened(parquet: Path | RemoteParquet) -> pq.ParquetFile:
    if isinstance(parquet, Path):
        return pq.ParquetFile(parquet, pre_buffer=False, buffer_size=1 << 20)
    return parquet.parquet()


def _documents(batch: pa.RecordBatch, wanted: dict[str, str], dataset: Dataset, first: int) -> Documents:
    """Return the documents of a batch that begins at a row; a question and its answer make a conversation."""
    nulls = pa.nulls(len(batch), pa.large_string())
    texts, ids, groups, answers = (
        as_text(batch[wanted[one]], is_id=one == "id_column") if one in wanted else nulls
        for one in ("text_column", "id_column", "split_by.column", "answer_column")
    )
    if dataset.answer_column:
        pairs = zip(texts.to_pylist(), answers.to_pylist(), strict=True)
        asked = [
            None if question is answer is None else chat.asked(question, answer) for question, answer in pairs
        ]
        texts = pa.array(asked, pa.large_string())
    return Documents(texts, ids, groups, np.arange(first, first + len(batch), dtype=np.uint32))


def _check_chat(documents: Documents, parquet: object) -> None:
    for text, row in zip(documents.texts.to_pylist(), documents.rows.tolist(), strict=True):
        try:
            chat.parse(text or "[]")
        except ValueError as error:
            raise ValueError(f"{parquet}: row {row} is not a conversation: {error}") from None


# ------------------------------------------------------------------------------------------------ columns

_STRINGS = ("string", "large_string", "string_view", "null")
_TEXTS = (*_STRINGS, "binary", "large_binary", "binary_view")


def columns_in(schema: pa.Schema, file: object, dataset: Dataset) -> dict[str, str]:
    """Return the columns that are read from a file by their settings, without an id column that is missing.

    Raises:
        ValueError: A column is absent, there are several of its name, or it does not hold strings. An id may
            be of any kind but a list or a struct, and conversations may be lists. The message names the file
            and its columns.
    """
    wanted = {"text_column": dataset.text_column, "id_column": dataset.id_column}
    if dataset.split_by:
        wanted["split_by.column"] = dataset.split_by.column
    if dataset.answer_column:
        wanted["answer_column"] = dataset.answer_column
    if dataset.id_column not in schema.names:
        del wanted["id_column"]
    for setting, column in (dataset.optional | wanted).items():
        if schema.names.count(column) > 1:
            raise ValueError(f"{file}: several columns are named {column!r}; give each but one another name")
        if column not in schema.names:
            columns = ", ".join(schema.names) or "none"
            remedy = f"set {setting} to one of them"
            if setting in dataset.optional:
                remedy += f", or leave {setting.removesuffix('.column')} out"
            raise ValueError(f"{file}: no column {column!r} (there are: {columns}); {remedy}")
        kind = schema.field(column).type
        is_id = setting == "id_column"
        if setting == "text_column" and dataset.format == "chat" and pa.types.is_nested(kind):
            continue
        if setting in wanted and (pa.types.is_nested(_stored(kind)) if is_id else not _is_one(kind, _TEXTS)):
            remedy = f"set {setting} to another, or write a column of text into the file"
            raise ValueError(f"{file}: column {column!r} holds {kind}, not strings; {remedy}")
    return wanted


def _stored(kind: pa.DataType) -> pa.DataType:
    """Return the type that a dictionary or an extension type stores, such as string for JSON."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_one(kind: pa.DataType, names: tuple[str, ...]) -> bool:
    return any(getattr(pa.types, f"is_{name}")(_stored(kind)) for name in names)


def as_text(column: Any, is_id: bool = False) -> Any:
    """Return a column, an array or a chunked one, as large_string. Bytes of a text are not decoded.

    A list, which is a conversation, is written as JSON. An id of another kind is written as by Python, but a
    whole number without a point, and bytes that are no printable UTF-8 in hexadecimal.
    """
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([as_text(one, is_id) for one in column.chunks], pa.large_string())
    if pa.types.is_nested(column.type):
        rows = column.to_pylist()
        texts = (None if row is None else json.dumps(row, ensure_ascii=False, default=str) for row in rows)
        return pa.array(texts, pa.large_string())
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


# ------------------------------------------------------------------------------------------------ filters

_ORDER = {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_ORDER |= {"==": pc.equal, "!=": pc.not_equal}


def _passing(
    filters: list[Filter], batch: pa.RecordBatch, texts: pa.Array, left_out: Counter[str], file: object
) -> np.ndarray:
    """Return which documents meet all conditions, and count each of the others by the first that it fails.

    A document without a value in a column does not meet a condition on it. A document without text meets them
    all, because it is counted as empty. Raises `ValueError` if a column does not fit its filter.
    """
    keep = np.ones(len(texts), bool)
    if not filters:
        return keep
    sizes = pc.binary_length(texts)
    blank = ~_mask(pc.greater(sizes, 0))
    for one in filters:
        values = sizes if one.column == SIZE else batch[one.column]
        try:
            met = _mask(_met(one, values)) | blank
        except pa.ArrowException as error:
            problem = f"column {one.column!r} ({values.type}) does not fit the filter {one.written!r}"
            raise ValueError(f"{file}: {problem}: {str(error).splitlines()[0]}") from None
        left_out[one.written] += int((keep & ~met).sum())
        keep &= met
    return keep


def _met(one: Filter, values: pa.Array) -> pa.BooleanArray:
    """Return which values meet a condition; null for a value that is null."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if isinstance(one.value, float):
        return _ORDER[one.operator](values.cast(pa.float64()), one.value)
    if isinstance(one.value, str):
        met = pc.match_substring_regex(values.cast(pa.large_string()), one.value)
    else:
        found = pc.is_in(values, pa.array(one.value, pa.string()).cast(values.type))
        met = pc.if_else(values.is_valid(), found, None)
    return met if one.operator in ("~", "==", "in") else pc.invert(met)


# -------------------------------------------------------------------------------------------------- split


def split_hashes(documents: Documents, dataset: Dataset) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """Return the hashes of ids, those that decide the splits, and the groups under ``split_by``.

    The key of a group is the first group of the pattern in the column's value, or the whole match if that
    group is empty. A document without a match keeps its own key.
    """
    keys = as_bytes(documents.ids.fill_null(""))
    if b"" in keys:
        keys = [key or text for key, text in zip(keys, as_bytes(documents.texts), strict=True)]
    id_hashes = hash_keys(keys)
    if not dataset.split_by:
        return id_hashes, id_hashes, []
    pattern, salt = re.compile(dataset.split_by.pattern), dataset.split_by.salt
    groups = []
    for value, key in zip(documents.groups.to_pylist(), keys, strict=True):
        match = pattern.search(value) if value else None
        name = match and ((match[1] if pattern.groups else "") or match[0])
        groups.append(key if name is None else name.encode())
    return id_hashes, hash_keys(salted(group, salt) for group in groups), groups


def salted(key: bytes, salt: int) -> bytes:
    """Return the key of a group with the salt in front of it; salt 0 returns the key."""
    return b"%d/%b" % (salt, key) if salt else key


def hash_keys(keys: Iterable[bytes]) -> np.ndarray:
    """Return the first 64 bits of each key's hash, uint64."""
    return np.frombuffer(b"".join([blake2b(key, digest_size=8).digest() for key in keys]), dtype="<u8")


def split_masks(hashes: np.ndarray, validation: float, ngram: float = 0.0) -> dict[str, np.ndarray]:
    """Return a mask for each split of many documents, from the hashes of their keys. Each is in one split.

    The shares are at least 0, and their sum is below 1 (`spider.config.data.Dataset` checks it).
    """
    held_out = hashes < np.uint64(validation * 2**64)
    trained_on = hashes >= np.uint64((validation + ngram) * 2**64)
    return {"train": trained_on, "validation": held_out, "ngram": ~(held_out | trained_on)}


def truncate(text: bytes, limit: int | None) -> bytes:
    """Return at most ``limit`` bytes of UTF-8 that end with a whole character; None returns all of it."""
    if limit is None or len(text) <= limit:
        return text
    for _ in range(3):  # a character has at most three continuation bytes, 10xxxxxx
        limit -= text[limit] & 0xC0 == 0x80
    return text[:limit]
