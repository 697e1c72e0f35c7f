"""Training windows directly from the hub, without storing the dataset.

The row groups of the named parquet files, or those that `take` chooses, are read in a new order each epoch.
The files come in a random order, and the row groups of `TOGETHER` files are mixed at a time. Of each row
group, about four megabytes of text are decoded at a time, and these documents are shuffled: the *window* of
the shuffle. A row group of FineWeb-Edu has 1,000 documents, which are one or two windows.

Documents that encoding would hold out are left out, those that do not meet the filters too. The rest become
``[BOS] + ids + [EOS]``, in bytes or in the ids of a tokenizer that was learned from other, stored text.

The row groups of an epoch are dealt to L *lanes*. A lane is the tokens of its documents back to back, cut
into rows of seq_len + 1 tokens that overlap by one, so nothing is lost at an end. A step of W rows reads W/L
of each lane, lane after lane:

    rows of a step   |0 0 1 1 2 2 3 3|    W = 8, L = 4: the lane of each row
    processes        |   0   |   1   |    each reads two lanes, thus half of the row groups

L divides W, and does not depend on the number of processes. So any number of them sees the same order. One
that divides L requests each row group once. More processes than lanes, or 3 of 4, share a lane, and each of
these reads it. The place of a lane, where its next row begins, is five numbers: the epoch, the row group, the
window in it, the document in the permuted window, and an offset. A new process requests the row group again
and continues at the exact token. A process knows only its own lanes, so its position has zeros for the
others. A checkpoint has the places of all.

Before the first row the footers of all files are read, so a file that lacks a column is known at once. Only
the configured columns are requested. A file that changes on the hub is an error.

Trade-offs: a lane holds a window and the compressed pages of its row group, some 10 MB, and begins with two
requests, so there are at most `MOST_LANES`. Lanes of different sizes end their epochs at different steps.
To shuffle all documents, or to train on the same data many times, download and encode it instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from huggingface_hub import constants

from spider.config import Dataset
from spider.config.spec import largest_divisor
from spider.data.documents import BATCH_BYTES, as_bytes, columns_in, placed_documents, row_counts
from spider.data.hub import PATIENCE, DownloadError, HubFile, Patience, RemoteFile
from spider.data.listing import Section
from spider.data.loader import Batch, Batches
from spider.data.take import RowGroup, choose, row_groups
from spider.tokens import BYTES, Tokens

FORMAT = 3
"""Version of the positions."""
FOOTERS = 8
"""Footers that are requested at the same time."""
TOGETHER = 8
"""Files whose row groups are mixed. A footer of 700 row groups takes some megabytes."""
MOST_LANES = 32
FEWEST_GROUPS = 4
"""Row groups of a lane in an epoch, at least."""
SEARCHED = 10
"""Epochs of a lane that may be without any document."""
PLACE = 5
"""Numbers of the place of a lane: epoch, row group in the epoch, window, document and offset."""


class StreamLoader(Batches):
    """Batches of the documents in ``files`` on the hub; the other arguments are those of `Loader`.

    ``tokens`` encode the text. A ``section`` takes some of the row groups (`spider.data.take`).

    Raises:
        DownloadError: A file, revision or repository is missing or not accessible, a file is not parquet, or
            the network fails. ``next`` raises it too.
        ValueError: The text column or the column of ``split_by`` is missing, or the files hold less text than
            the section. ``next`` raises it if a row group does not decode, or all documents are left out.
    """

    def __init__(
        self,
        dataset: Dataset,
        files: list[HubFile],
        section: Section | None = None,
        *,
        seq_len: int,
        seed: int,
        position: dict[str, Any] | None = None,
        patience: Patience = PATIENCE,
        tokens: Tokens = BYTES,
        **share: int,
    ) -> None:
        self._dataset, self._tokens = dataset, tokens
        order: dict[str, Any] = {"repo": files[0].repo, "revision": files[0].revision}
        order["files"] = [file.name for file in files]
        order |= dataset.encoding()
        order |= {"take": section.name} if section else {}
        order |= {"tokenizer": tokens.digest} if tokens.digest else {}
        order |= {"seq_len": seq_len, "seed": seed, "window": BATCH_BYTES, "format": FORMAT}
        super().__init__("stream", order, position=position, **share)
        if constants.HF_HUB_OFFLINE:
            raise DownloadError(f"{files[0]}: a stream needs the hub; unset HF_HUB_OFFLINE")
        with ThreadPoolExecutor(FOOTERS) as pool:
            self._files = [*pool.map(partial(RemoteFile, folder=None, patience=patience), files)]
            self._opened = lru_cache(2 * TOGETHER)(lambda number: _Opened(self._files[number]))
            found = [one for groups in pool.map(self._groups_of, range(len(files))) for one in groups]
        numbers = {file.name: number for number, file in enumerate(files)}
        chosen = choose(found, section, str(files[0])) if section else found
        self._groups = np.array([(numbers[one.file], one.number) for one in chosen]).reshape(-1, 2)
        most = max(1, min(MOST_LANES, len(chosen) // FEWEST_GROUPS))
        windows = self._rows * self._world
        self._count = position["lanes"] if position else largest_divisor(windows, most)
        if windows % self._count:
            raise ValueError(
                f"stream: the position to resume has {self._count} lanes, which {windows} windows of a step "
                "do not share evenly; start again, or restore the batch"
            )
        self._each = windows // self._count
        first = self._rank * self._rows
        flat = position["places"] if position else [0] * PLACE * self._count
        self._lanes: dict[int, _Lane] = {}
        for lane in range(first // self._each, -(-(first + self._rows) // self._each)):
            *place, offset = flat[PLACE * lane : PLACE * (lane + 1)]
            self._lanes[lane] = _Lane(self._read(lane, *place), offset)

    def epoch(self, position: dict[str, Any]) -> float:
        """Return the passes over the row groups of the first lane, which the first process reads."""
        return float(position["places"][0] + position["places"][1] / len(self._groups[:: self._count]))

    def _block(self) -> list[Batch]:
        length = self.order["seq_len"]
        first = self._rank * self._rows
        places = np.zeros((self._count, PLACE), int)
        rows = []
        for number, lane in self._lanes.items():
            rows += [lane.row(length) for _ in range(self._each)]
            if number * self._each >= first:  # else the process before tells the place of a shared lane
                places[number] = lane.place
        begin = first % self._each
        position = {"lanes": self._count, "places": places.ravel().tolist(), **self.order}
        return [Batch(np.stack(rows[begin : begin + self._rows]), position)]

    def _groups_of(self, number: int) -> list[RowGroup]:
        parquet = self._opened(number).parquet()
        columns_in(parquet.schema_arrow, self._files[number], self._dataset)
        return row_groups(self._files[number].file.name, parquet, self._dataset)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the row groups of an epoch in their order, each as the numbers of file and row group."""
        rng = np.random.default_rng([self.order["seed"], epoch])
        together = rng.permutation(len(self._files)) // TOGETHER
        shuffled = rng.permutation(self._groups)
        return shuffled[np.argsort(together[shuffled[:, 0]], kind="stable")]

    def _read(
        self, lane: int, epoch: int, group: int, window: int, document: int
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield the training documents of a lane from a place on, without end: their places and tokens."""
        empty = 0
        while True:
            order = self._order(epoch)[lane :: self._count].tolist()
            for number in range(group, len(order)):
                file, found = order[number]
                batches = placed_documents(self._opened(file), self._dataset, row_counts(), only=found)
                for at, placed in enumerate(batches):
                    if at < window:
                        continue
                    texts = as_bytes(placed.documents.filter(placed.masks["train"]).texts)
                    rng = np.random.default_rng([self.order["seed"], epoch, file, found, at])
                    for one, chosen in enumerate(rng.permutation(len(texts)).tolist()):
                        if one >= document:
                            empty = 0
                            yield [epoch, number, at, one], self._tokens.encode(texts[chosen])
                    document = 0
                window = 0
            epoch, group, empty = epoch + 1, 0, empty + 1
            if empty > SEARCHED:
                raise ValueError(f"{self._files[0]}: no text is left; lower validation, or set text_column")


class _Opened:
    """A file whose footer is requested once.

    Lanes read it at the same time, each with a reader of its own: `iter_batches` of pyarrow sets the size of
    the batches of all iterators of a reader.
    """

    def __init__(self, remote: RemoteFile) -> None:
        self._remote, self._footer = remote, remote.parquet().metadata

    def parquet(self) -> pq.ParquetFile:
        return self._remote.parquet(self._footer)

    def __str__(self) -> str:
        return str(self._remote)


class _Lane:
    """Rows of documents that follow each other, each with its place."""

    def __init__(self, documents: Iterator[tuple[list[int], np.ndarray]], offset: int) -> None:
        self._documents = documents
        self._begun: deque[tuple[int, list[int]]] = deque()
        """Documents in or after the next row: (position of its first token, its place)."""
        self._rest = np.empty(0, np.uint16)
        """Tokens from position ``_at`` on, where the next row begins."""
        self._at = 0
        self._skipped = offset
        """Tokens of the next document before the resumed position."""

    @property
    def place(self) -> list[int]:
        """The place where the next row begins."""
        begin, place = self._begun[0]
        return [*place, self._at - begin]

    def row(self, length: int) -> np.ndarray:
        """Return the next row of ``length`` targets."""
        while len(self._rest) <= length:
            place, tokens = next(self._documents)
            self._begun.append((self._at + len(self._rest) - self._skipped, place))
            self._rest = np.concatenate([self._rest, tokens[self._skipped :]])
            self._skipped = 0
        row = self._rest[: length + 1]
        self._rest = self._rest[length:]
        self._at += length
        while len(self._begun) > 1 and self._begun[1][0] <= self._at:
            self._begun.popleft()
        return row
