"""A part of a dataset as it comes to lie on disk: its shards, renamed into place whole, then its records."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spider.config import Dataset
from spider.data.metadata import COUNTS, DTYPE
from spider.files import replacing, write_json
from spider.tokens import BYTES, Tokens

FORMAT = 1

PIECE = 1 << 18
"""Bytes widened and written at a time."""
FLUSH_BYTES = 1 << 23
"""Written bytes after which the kernel is told to start on them."""


class ShardWriter:
    """Appends documents to one split's ``.bin`` and ``.idx``, which get these names when ``files`` closes."""

    def __init__(self, name: Path, files: contextlib.ExitStack, vocabulary: Tokens) -> None:
        self.tokens = self.documents = self.bytes = 0
        self._vocabulary = vocabulary
        beside = [files.enter_context(replacing(name.with_suffix(suffix))) for suffix in (".bin", ".idx")]
        self._tokens_file, self._index_file = (files.enter_context(path.open("wb")) for path in beside)
        self._piece = np.empty(PIECE, DTYPE)
        self._flushed = 0

    def write(self, ids: np.ndarray, begins: np.ndarray) -> None:
        """Go on with these ids, among which documents begin at these places."""
        self._tokens_file.write(ids.astype(DTYPE, copy=False).data)
        self._wrote(len(ids), begins, int(self._vocabulary.bytes_of[ids].sum()))

    def splice(self, joined: np.ndarray, offsets: np.ndarray) -> None:
        """Go on with documents that are their bytes, as `ByteTokens.splice` takes them."""
        for piece in BYTES.splice(joined, offsets, self._piece):
            self._tokens_file.write(piece.data)
        self._wrote(int(offsets[-1]), offsets[:-1], int(offsets[-1]) - 2 * (len(offsets) - 1))

    def _wrote(self, tokens: int, begins: np.ndarray, size: int) -> None:
        first = (begins + self.tokens).astype("<u8")
        self._index_file.write((first * np.uint64(DTYPE.itemsize)).data)
        self.tokens += tokens
        self.documents += len(begins)
        self.bytes += size
        # Have the kernel write new pages to disk while we decode, so that the final fsync finds few. "Not
        # needed" makes Linux start on dirty pages at once; being dirty, they also stay in the cache.
        ready = self.tokens * DTYPE.itemsize - self._flushed
        if ready >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._tokens_file.fileno(), self._flushed, ready, os.POSIX_FADV_DONTNEED)
            self._flushed += ready


@dataclass
class Part:
    writers: dict[str, ShardWriter]
    """By split."""
    said: dict[str, Any] = field(default_factory=dict)
    """What its records hold beside the counts and settings."""
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By split, once it is whole."""


@contextlib.contextmanager
def writing(folder: Path, part: str, dataset: Dataset, tokens: Tokens) -> Iterator[Part]:
    """Write ``folder/{split}/{part}.bin``, ``.idx`` and ``.json`` for each of a dataset's splits.

    The records are renamed into place last, so that a part whose records stand is whole; what an encode with
    an n-gram index left is removed by one without. `OSError`, with the remedy, where they cannot be written.
    """
    names = {split: folder / split / part for split in dataset.splits}
    try:
        with contextlib.ExitStack() as files:
            made = Part({split: ShardWriter(name, files, tokens) for split, name in names.items()})
            yield made
            for name in names.values():  # a record left by an earlier encode must not vouch for the new shard
                name.with_suffix(".json").unlink(missing_ok=True)
            if not dataset.ngram:
                for suffix in (".json", ".bin", ".idx"):
                    (folder / "ngram" / part).with_suffix(suffix).unlink(missing_ok=True)
        for split, writer in made.writers.items():
            counts = {name: getattr(writer, name) for name in COUNTS}
            record = {"format": FORMAT, "file": f"{split}/{part}.bin", "part": part, **counts}
            record |= {**dataset.encoding(), **made.said}
            made.records[split] = record | ({"tokenizer": tokens.digest} if tokens.digest else {})
            write_json(names[split].with_suffix(".json"), made.records[split])
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room (a shard is twice the size of its text)" if full else "make the folder writable"
        raise OSError(
            f"{folder}: cannot write the shards of part {part} ({error.strerror}); {remedy} and run again, "
            "nothing half written was kept"
        ) from error
