"""Encode one parquet file into uint16 shards. For bytes this is a memory copy.

Arrow gives a batch of documents as one contiguous UTF-8 buffer and an array of offsets. The shard is that
buffer widened to uint16, with BOS and EOS spliced around every document:

    texts    |T h e   c a t|A   d o g|          one uint8 buffer, offsets [0, 7, 12]
    tokens   |B T h e   c a t E|B A   d o g E|  each slice widened into its place; then BOS and EOS

With a tokenizer (`spider.tokens.stored`), and in conversations (`spider.data.chat`), each document is encoded
separately, which is much slower. For bytes, Python handles single documents only to copy their bytes, to hash
their ids for the split, and to truncate long ones (`spider.data.documents`). A repeated id is kept (every
copy falls into the same split), counted and reported by a warning.

Memory is constant: about four megabytes of text are decoded at a time, so that the constant cost of a batch
is small. Only a single document larger than that takes more (about three times its size).

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from spider.common.files import replacing, write_bytes, write_json
from spider.config import Dataset
from spider.data import chat
from spider.data.documents import BATCH_BYTES, as_bytes, placed_documents, row_counts, truncate
from spider.data.shards import BLOCKS_KEY, COUNTS, DTYPE, MOST_DOCUMENTS, NAME_BYTES, BlockWriter
from spider.tokens import BYTES, Tokens

logger = logging.getLogger(__name__)

FORMAT = 1
DUPLICATE_ROWS = 1 << 24
"""Rows at the beginning of a part that are searched for repeated ids (8 bytes each)."""
FLUSH_BYTES = 1 << 23
"""Written bytes after which the kernel is asked to write them to disk."""


def encode_part(
    parquet: Path,
    folder: Path,
    part: str,
    dataset: Dataset,
    tokens: Tokens = BYTES,
    removed: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Encode one parquet file into ``folder/{split}/{part}.bin``, ``.idx`` and ``.json``.

    The splits are those of the dataset: train and validation, and ngram if it has a share. A ``.rows`` has
    each document's row in the parquet file (little-endian uint32). ``removed`` has the rows that are
    left out, by reason.

    Returns the records by split: file, part, tokens, documents, bytes, the settings, and counts of the rows.

    Raises `ValueError` if the file is missing, incomplete, or lacks a text column of strings, and `OSError`
    with the remedy if the shards cannot be written.
    """
    rows = row_counts()
    hashes = [np.empty(0, np.uint64)]
    encode = None if tokens is BYTES and dataset.format != "chat" else _encoder(dataset, tokens)
    with writing(folder, part, dataset, tokens) as shards:
        for documents, masks, id_hashes, groups in placed_documents(parquet, dataset, rows, removed):
            for split, writer in shards.writers.items():
                writer.append(documents.texts, masks[split], encode)
                writer.rows.append(documents.rows[masks[split]])
            if rows["read"] <= DUPLICATE_ROWS:
                hashes.append(id_hashes)
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
    parquet: Path,
    dataset: Dataset,
    tokens: Tokens = BYTES,
    removed: Mapping[str, np.ndarray] | None = None,
    until: int | None = None,
) -> Iterator[Encoded]:
    """Yield each document of the shards that `encode_part` writes, or those of the rows before ``until``.

    The other arguments are those of `encode_part`.
    """
    encode = _encoder(dataset, tokens)
    for found, masks, _, _ in placed_documents(parquet, dataset, row_counts(), removed):
        wanted = np.full(len(found.rows), True) if until is None else found.rows < until
        if len(wanted) and not wanted.any():
            return
        for split in dataset.splits:
            chosen = found.filter(masks[split] & wanted)
            rows = zip(chosen.rows.tolist(), chosen.ids.to_pylist(), as_bytes(chosen.texts), strict=True)
            yield from (Encoded(split, row, id, encode(text)) for row, id, text in rows)


def _encoder(dataset: Dataset, tokens: Tokens) -> Callable[[bytes], np.ndarray]:
    return partial(chat.ids_of, tokens=tokens) if dataset.format == "chat" else tokens.encode


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
        self._buffer = np.empty(2 * BATCH_BYTES, DTYPE)
        self._flushed = 0

    def write(self, ids: np.ndarray, begins: np.ndarray) -> None:
        """Append tokens, among which documents begin at the given positions."""
        self._write(ids, begins, int(self._vocabulary.bytes_of[ids].sum()))

    def append(
        self, texts: pa.Array, chosen: np.ndarray, encode: Callable[[bytes], np.ndarray] | None
    ) -> None:
        """Append the documents of a mask, none of them null, by their encoding; None copies their bytes."""
        if not chosen.any():
            return
        if encode is not None:
            documents = [encode(text) for text in as_bytes(texts.filter(pa.array(chosen)))]
            lengths = np.array([len(document) for document in documents])
            self.write(np.concatenate(documents), np.cumsum(lengths) - lengths)
            return
        _, offsets, data = texts.buffers()
        bounds = np.frombuffer(offsets, np.int64)[texts.offset :][: len(texts) + 1]
        text = np.frombuffer(data, np.uint8)
        ids, begins = BYTES.splice(text, bounds[:-1][chosen], bounds[1:][chosen], self._buffer)
        self._write(ids, begins, len(ids) - 2 * len(begins))

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the blocks of both files (`spider.data.shards`)."""
        return {"bin": "".join(self._tokens_file.digests), "idx": "".join(self._index_file.digests)}

    def _write(self, ids: np.ndarray, begins: np.ndarray, size: int) -> None:
        """Append tokens that stand for so many bytes."""
        self._tokens_file.write(ids.astype(DTYPE, copy=False))
        first = (begins + self.tokens).astype("<u8")
        self._index_file.write(first * np.uint64(DTYPE.itemsize))
        self.tokens += len(ids)
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
