"""Training windows straight from the hub: nothing is downloaded first, nothing is kept.

The documents of the named parquet files come through `datasets` streaming, one after the other; the files
are put in a new order every epoch, documents keep their order within a file. Held-out documents are left
out by the hash that encoding uses. The rest become ``[BOS] + bytes + [EOS]``, back to back, and are cut
into windows of seq_len + 1 tokens that overlap by one; a window may straddle two epochs, so nothing is lost
at an end.

A position is the state of the stream before the document in which the next window begins, and how far into
that document it begins: a new process reads that document again and goes on to the byte.

Trade-offs: there is no shuffling among documents (a shuffle buffer could not be resumed exactly), and each
of several ranks reads the whole stream and keeps its slice of each step, so that the order does not depend
on their number. Where the same data is trained on more than once, download and encode it instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from spider.config import Dataset, StreamSource
from spider.data.hub import DownloadError, Patience, explain, look_up
from spider.data.loader import Batch, Batches
from spider.data.split import document_key, is_validation
from spider.tokens import BYTES


class StreamLoader(Batches):
    """Batches of a dataset on the hub.

    Args:
        dataset: one whose source is a `StreamSource`.
        seq_len: targets a row.
        seed: of the order of the files.
        rows, rank, world, position: as `Batches` has them.
        attempts, backoff: tries to reach the hub at the start, and seconds before the second. Once reading,
            `datasets` itself tries again for minutes.

    Raises `ValueError` for a file, revision or repository that is not there or not open to us and no network
    (`DownloadError`, one line with the remedy), no text column, no document to train on.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seq_len: int,
        seed: int,
        position: dict[str, Any] | None = None,
        attempts: int = 6,
        backoff: float = 1.0,
        **share: int,
    ) -> None:
        assert isinstance(dataset.source, StreamSource), "not a stream"
        source = dataset.source
        self._repo, self._revision, self._files = source.repo, source.revision, source.files
        self._dataset = dataset
        order = source.model_dump(include={"repo", "revision", "files"})
        order |= dataset.model_dump(include={"validation", "max_document_bytes"})
        order |= {"seq_len": seq_len, "seed": seed}
        super().__init__("stream", order, position=position, **share)
        self._columns = self._look_up(Patience(attempts, backoff))
        start: dict[str, Any] = position or {"epoch": 0, "state": None, "offset": 0}
        self._documents = self._read(start["epoch"], start["state"])
        self._held: deque[tuple[int, Any, np.ndarray]] = deque()
        """Documents of which some tokens are still to come: (epoch, state before it, its tokens)."""
        self._offset = int(start["offset"])
        """Where in the first of them the next window begins."""
        self._tokens = -self._offset
        """Tokens in ``_held`` from there on."""

    def _block(self) -> list[Batch]:
        length = self._order["seq_len"]
        rows = np.empty((self._rows, length + 1), dtype=np.uint16)
        first = self._rank * self._rows
        for i in range(self._world * self._rows):
            while self._tokens <= length:
                self._held.append(next(self._documents))
                self._tokens += len(self._held[-1][2])
            if first <= i < first + self._rows:
                self._copy(rows[i - first])
            self._offset += length
            self._tokens -= length
            while self._offset >= len(self._held[0][2]):
                self._offset -= len(self._held.popleft()[2])
        epoch, state, _ = self._held[0]
        return [Batch(rows, {"epoch": epoch, "state": state, "offset": self._offset, **self._order})]

    def _copy(self, row: np.ndarray) -> None:
        done, start = 0, self._offset
        for _, _, tokens in self._held:
            part = tokens[start : start + len(row) - done]
            row[done : done + len(part)] = part
            done, start = done + len(part), 0
            if done == len(row):
                return

    def _read(self, epoch: int, state: Any) -> Iterator[tuple[int, Any, np.ndarray]]:
        """Every training document from ``state`` on, for ever: (epoch, state before it, tokens)."""
        while True:
            dataset = self._open(epoch)
            if state is not None:
                dataset.load_state_dict(state)
            before, any_document = dataset.state_dict(), state is not None
            try:
                for row in dataset:
                    tokens = self._encode(row)
                    if tokens is not None:
                        any_document = True
                        yield epoch, before, tokens
                    before = dataset.state_dict()
            except (OSError, RuntimeError, pa.ArrowInvalid) as error:
                raise self._broken(error, self._reading(epoch, dataset)) from error
            if not any_document:
                raise ValueError(f"{self._name()}: holds no document to train on; look at its text column")
            epoch, state = epoch + 1, None

    def _encode(self, row: dict[str, Any]) -> np.ndarray | None:
        """Tokens of a document, or None for one that is null, empty or held out."""
        text, limit = row[self._dataset.text_column], self._dataset.max_document_bytes
        if not text:
            return None
        raw = text.encode("utf-8")
        key = document_key(row.get(self._dataset.id_column), raw)
        if is_validation(key, self._dataset.validation):
            return None
        if limit is not None and len(raw) > limit:
            while raw[limit] & 0xC0 == 0x80:
                limit -= 1
            raw = raw[:limit]
        return BYTES.encode(raw)

    def _in_order(self, epoch: int) -> list[str]:
        """The files as that epoch reads them."""
        order = np.random.default_rng([self._order["seed"], epoch]).permutation(len(self._files))
        return [self._files[i] for i in order]

    def _reading(self, epoch: int, dataset: Any) -> str:
        """What is being read: the state that resumes a stream counts files and the rows of each."""
        state = dataset.state_dict()
        while "examples_iterable" in state:
            state = state["examples_iterable"]
        file = self._in_order(epoch)[state["shard_idx"]]
        return f"reading {file} behind row {state['shard_example_idx']}, epoch {epoch}"

    def _open(self, epoch: int, columns: list[str] | None = None) -> Any:
        from datasets import load_dataset

        urls = [f"hf://datasets/{self._repo}@{self._revision}/{file}" for file in self._in_order(epoch)]
        try:
            return load_dataset(
                "parquet",
                data_files={"train": urls},
                split="train",
                streaming=True,
                columns=columns or self._columns,
            )
        except (OSError, RuntimeError, pa.ArrowInvalid) as error:
            raise self._broken(error, "opening it") from error

    def _look_up(self, patience: Patience) -> list[str] | None:
        """Check that every file can be had, then the columns to read."""
        from huggingface_hub import constants
        from huggingface_hub.errors import HFValidationError, HTTPError

        if constants.HF_HUB_OFFLINE:
            raise DownloadError(f"{self._name()}: a stream needs the hub; unset HF_HUB_OFFLINE")
        for file in self._files:
            try:
                look_up(self._repo, self._revision, file, patience)
            except (HTTPError, HFValidationError, OSError) as error:
                raise DownloadError(explain(error, self._repo, self._revision, file)) from None
        self._columns = None
        names = list(self._open(0).features or [])
        text, id = self._dataset.text_column, self._dataset.id_column
        if text not in names:
            raise ValueError(
                f"{self._name()}: has no column {text!r} (columns: {', '.join(names)}); set text_column"
            )
        return [name for name in (text, id) if name in names]

    def _broken(self, error: Exception, when: str) -> DownloadError:
        from huggingface_hub.errors import HTTPError

        cause = error.__cause__ if isinstance(error.__cause__, HTTPError) else error
        if isinstance(cause, HTTPError):
            return DownloadError(explain(cause, self._repo, self._revision, self._files[0]))
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return DownloadError(
            f"{self._repo}@{self._revision}: the stream broke while {when} ({first}); run again to go on. "
            "Where it breaks at the same place again, that file is damaged: leave it out, or name a revision "
            "where it is whole"
        )

    def _name(self) -> str:
        return f"{self._files[0]} of {self._repo}@{self._revision}"
