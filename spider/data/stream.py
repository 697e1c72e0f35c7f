"""Training windows directly from the hub, without storing the dataset.

The documents of the named parquet files come through `datasets` streaming, one after the other. Each epoch
reads the files in a new order, and documents keep their order within a file. The hash that encoding uses
leaves out the held-out documents, or the held-out groups of ``split_by``. The rest become
``[BOS] + bytes + [EOS]``, back to back, and are cut into windows of seq_len + 1 tokens that overlap by one.
A window may straddle two epochs, so nothing is lost at an end.

A position is the state of the stream before a document, and an offset in that document, where the next window
begins. A new process reads that document again and continues at the exact byte.

Trade-offs: documents are not shuffled, because a shuffle buffer could not be resumed exactly. Each of several
ranks reads the whole stream and keeps its slice of each step, so the order does not depend on their number.
To train on the same data more than once, download and encode it instead.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError

from spider.config import Dataset
from spider.data.encode import require_strings
from spider.data.hub import PATIENCE, DownloadError, HubFile, Patience, cause_of, download_error, look_up
from spider.data.loader import Batch, Batches
from spider.data.split import document_key, group_key, is_validation, salted, truncate
from spider.tokens import BYTES

BREAKS = (HTTPError, OSError, RuntimeError, pa.ArrowInvalid)
"""Errors that `datasets` raises while it opens or reads."""


class StreamLoader(Batches):
    """Batches of the documents in ``files`` on the hub; the other arguments are those of `Loader`.

    ``patience`` is for the first requests. Later `datasets` itself retries for minutes.

    Raises:
        DownloadError: A file, revision or repository is missing or not accessible, or the network fails.
        ValueError: The text column or the column of ``split_by`` is missing, or all documents are left out.
    """

    def __init__(
        self,
        dataset: Dataset,
        files: list[HubFile],
        *,
        seq_len: int,
        seed: int,
        position: dict[str, Any] | None = None,
        patience: Patience = PATIENCE,
        **share: int,
    ) -> None:
        self._dataset = dataset
        self._files = files
        order: dict[str, Any] = {"repo": files[0].repo, "revision": files[0].revision}
        order["files"] = [file.name for file in files]
        order |= dataset.model_dump(include={"validation", "max_document_bytes"})
        if dataset.split_by is not None:
            order |= dataset.model_dump(include={"split_by"})
        order |= {"seq_len": seq_len, "seed": seed}
        super().__init__("stream", order, position=position, **share)
        self._columns: list[str] | None = None
        self._columns = self._look_up(patience)
        start: dict[str, Any] = position or {"epoch": 0, "state": None, "offset": 0}
        self._documents = self._read(start["epoch"], start["state"])
        self._begun: deque[tuple[int, int, Any]] = deque()
        """Documents in or after the next window: (position of its first token, epoch, state before it)."""
        self._rest = np.empty(0, np.uint16)
        """Tokens from position ``_at`` on, where the next window begins."""
        self._at = 0
        self._skipped = int(start["offset"])
        """Tokens of the next document before the resumed position."""

    def epoch(self, position: dict[str, Any]) -> float:
        """Return the number of finished passes. It is a whole number, because a stream's size is unknown."""
        return float(position["epoch"])

    def _block(self) -> list[Batch]:
        length = self._order["seq_len"]
        rows = np.empty((self._rows, length + 1), np.uint16)
        first = self._rank * self._rows
        for i in range(self._world * self._rows):
            while len(self._rest) <= length:
                epoch, state, tokens = next(self._documents)
                self._begun.append((self._at + len(self._rest) - self._skipped, epoch, state))
                self._rest = np.concatenate([self._rest, tokens[self._skipped :]])
                self._skipped = 0
            if first <= i < first + self._rows:
                rows[i - first] = self._rest[: length + 1]
            self._rest = self._rest[length:]
            self._at += length
            while len(self._begun) > 1 and self._begun[1][0] <= self._at:
                self._begun.popleft()
        begin, epoch, state = self._begun[0]
        return [Batch(rows, {"epoch": epoch, "state": state, "offset": self._at - begin, **self._order})]

    def _read(self, epoch: int, state: Any) -> Iterator[tuple[int, Any, np.ndarray]]:
        """Yield training documents from ``state`` on without end: (epoch, state before it, tokens)."""
        while True:
            dataset = self._open(epoch)
            if state is not None:
                dataset.load_state_dict(state)
            before = dataset.state_dict()
            any_document = state is not None
            try:
                for row in dataset:
                    tokens = self._encode(row)
                    if tokens is not None:
                        any_document = True
                        yield epoch, before, tokens
                    before = dataset.state_dict()
            except BREAKS as error:
                raise self._broken(error, epoch, dataset) from error
            if not any_document:
                raise ValueError(f"{self._files[0]}: no text is left; lower validation, or set text_column")
            epoch += 1
            state = None

    def _encode(self, row: dict[str, Any]) -> np.ndarray | None:
        """Return the tokens of a document, or None if it is null, empty or held out."""
        raw = (row[self._dataset.text_column] or "").encode("utf-8")
        key = document_key(row.get(self._dataset.id_column), raw)
        split_by = self._dataset.split_by
        if split_by is not None:
            group = group_key(row[split_by.column], re.compile(split_by.pattern), key)
            key = salted(group, split_by.salt)
        if not raw or is_validation(key, self._dataset.validation):
            return None
        return BYTES.encode(truncate(raw, self._dataset.max_document_bytes))

    def _in_order(self, epoch: int) -> list[HubFile]:
        """Return the files in the order of an epoch."""
        order = np.random.default_rng([self._order["seed"], epoch]).permutation(len(self._files))
        return [self._files[i] for i in order]

    def _open(self, epoch: int) -> Any:
        from datasets import load_dataset

        urls = [f"hf://datasets/{file.repo}@{file.revision}/{file.name}" for file in self._in_order(epoch)]
        options = {"split": "train", "streaming": True, "columns": self._columns}
        try:
            return load_dataset("parquet", data_files={"train": urls}, **options)
        except BREAKS as error:
            raise self._broken(error, epoch) from error

    def _look_up(self, patience: Patience) -> list[str]:
        """Check that every file can be read, and return the columns to read."""
        if constants.HF_HUB_OFFLINE:
            raise DownloadError(f"{self._files[0]}: a stream needs the hub; unset HF_HUB_OFFLINE")
        for file in self._files:
            look_up(file, patience)
        schema = self._open(0).features.arrow_schema
        require_strings(schema, self._files[0], "text_column", self._dataset.text_column)
        if self._dataset.split_by is not None:
            require_strings(schema, self._files[0], "split_by.column", self._dataset.split_by.column)
        return [name for name in self._dataset.columns if name in schema.names]

    def _broken(self, error: Exception, epoch: int, dataset: Any = None) -> DownloadError:
        cause = cause_of(error)
        if isinstance(cause, HTTPError):
            return download_error(cause, self._files[0])
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        when = "opening it"
        if dataset is not None:
            # The state that resumes a stream counts files, and rows of each.
            state = dataset.state_dict()
            while "examples_iterable" in state:
                state = state["examples_iterable"]
            file, row = self._in_order(epoch)[state["shard_idx"]], state["shard_example_idx"]
            when = f"reading {file.name} after row {row}, epoch {epoch}"
        return DownloadError(
            f"{self._files[0].repo}@{self._files[0].revision}: the stream broke while {when} ({first_line}); "
            "run again to continue. If it breaks at the same row again, that file is damaged: leave it out, "
            "or name another revision"
        )
