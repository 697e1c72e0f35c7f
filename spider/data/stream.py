"""Training windows directly from the hub, without storing the dataset.

The row groups of the named parquet files are requested one after the other. Each epoch reads the files in a
new order, and documents keep their order within a file. `spider.data.encode` reads the documents, so those
that it would hold out are left out, or the groups of ``split_by``. The rest become ``[BOS] + bytes + [EOS]``,
back to back, and are cut into windows of seq_len + 1 tokens that overlap by one. A window may straddle two
epochs, so nothing is lost at an end.

A position is a document, by the number of its file in the epoch and by its row, and an offset in it, where
the next window begins. A new process requests the row group of that document again and continues at the exact
byte.

Before the first window the footers of all files are read, so a file that lacks a column is known at once.
Only the configured columns are requested. A file that changes on the hub is an error.

Trade-offs: documents are not shuffled, because a shuffle buffer could not be resumed exactly. Each of several
ranks reads the whole stream and keeps its slice of each step, so the order does not depend on their number.
To train on the same data more than once, download and encode it instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from huggingface_hub import constants

from spider.config import Dataset
from spider.data.documents import columns_in
from spider.data.encode import encoded
from spider.data.hub import PATIENCE, DownloadError, HubFile, Patience, RemoteFile
from spider.data.loader import Batch, Batches

FORMAT = 2
"""Version of the positions."""
FOOTERS = 8
"""Footers that are requested at the same time."""


class StreamLoader(Batches):
    """Batches of the documents in ``files`` on the hub; the other arguments are those of `Loader`.

    Raises:
        DownloadError: A file, revision or repository is missing or not accessible, a file is not parquet, or
            the network fails. ``next`` raises it too.
        ValueError: The text column or the column of ``split_by`` is missing. ``next`` raises it if a row
            group does not decode, or all documents are left out.
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
        order: dict[str, Any] = {"repo": files[0].repo, "revision": files[0].revision}
        order["files"] = [file.name for file in files]
        order |= dataset.model_dump(include={"validation", "max_document_bytes"})
        if dataset.split_by is not None:
            order |= dataset.model_dump(include={"split_by"})
        order |= {"seq_len": seq_len, "seed": seed, "format": FORMAT}
        super().__init__("stream", order, position=position, **share)
        if constants.HF_HUB_OFFLINE:
            raise DownloadError(f"{files[0]}: a stream needs the hub; unset HF_HUB_OFFLINE")
        with ThreadPoolExecutor(FOOTERS) as pool:
            self._files = [*pool.map(partial(RemoteFile, folder=None, patience=patience), files)]
            for remote, parquet in zip(self._files, pool.map(RemoteFile.parquet, self._files), strict=True):
                columns_in(parquet.schema_arrow, remote, dataset)
        start: dict[str, Any] = position or {"epoch": 0, "file": 0, "row": 0, "offset": 0}
        self._documents = self._read(start["epoch"], start["file"], start["row"])
        self._begun: deque[tuple[int, dict[str, int]]] = deque()
        """Documents in or after the next window: (position of its first token, its place)."""
        self._rest = np.empty(0, np.uint16)
        """Tokens from position ``_at`` on, where the next window begins."""
        self._at = 0
        self._skipped = int(start["offset"])
        """Tokens of the next document before the resumed position."""

    def epoch(self, position: dict[str, Any]) -> float:
        """Return the number of finished passes. It is a whole number, because a stream's size is unknown."""
        return float(position["epoch"])

    def _block(self) -> list[Batch]:
        length = self.order["seq_len"]
        rows = np.empty((self._rows, length + 1), np.uint16)
        first = self._rank * self._rows
        for i in range(self._world * self._rows):
            while len(self._rest) <= length:
                place, tokens = next(self._documents)
                self._begun.append((self._at + len(self._rest) - self._skipped, place))
                self._rest = np.concatenate([self._rest, tokens[self._skipped :]])
                self._skipped = 0
            if first <= i < first + self._rows:
                rows[i - first] = self._rest[: length + 1]
            self._rest = self._rest[length:]
            self._at += length
            while len(self._begun) > 1 and self._begun[1][0] <= self._at:
                self._begun.popleft()
        begin, place = self._begun[0]
        return [Batch(rows, {**place, "offset": self._at - begin, **self.order})]

    def _read(self, epoch: int, first: int, row: int) -> Iterator[tuple[dict[str, int], np.ndarray]]:
        """Yield training documents from a row of the file ``first`` of an epoch on, without end.

        Each is its place and its tokens.
        """
        any_document = (first, row) != (0, 0)
        while True:
            order = np.random.default_rng([self.order["seed"], epoch]).permutation(len(self._files))
            for number in range(first, len(order)):
                for one in encoded(self._files[order[number]], self._dataset, first=row):
                    if one.split == "train":
                        any_document = True
                        yield {"epoch": epoch, "file": number, "row": one.row}, one.tokens_N
                row = 0
            if not any_document:
                raise ValueError(f"{self._files[0]}: no text is left; lower validation, or set text_column")
            epoch, first, any_document = epoch + 1, 0, False
