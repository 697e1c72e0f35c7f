"""Candidates for windows of shards (training), for streams (evaluation), and during generation.

All are the same function of a document's tokens so far, wherever a window begins. So a model reads the same
features in training and in use.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from spider.config.model import NgramConfig
from spider.data.ngram.candidates import Document, empty_counts, history_of
from spider.data.ngram.layout import BEGIN, Layout, symbols_of
from spider.data.ngram.store import NgramIndex, open_index
from spider.data.shards import Shards
from spider.tokens import Tokens


class NgramLookup:
    """Candidates from an n-gram index and the document, as bytes of `Layout`. Several threads may use it.

    Raises:
        ValueError: The n-gram index was counted with other settings.
    """

    def __init__(self, index: NgramIndex, config: NgramConfig, vocabulary: Tokens) -> None:
        index.check_counted(config)
        self.index = index
        self.config = config
        self.layout = Layout.of(config)
        self.vocabulary = vocabulary
        self.symbols = symbols_of(vocabulary)

    @classmethod
    def of(
        cls, folder: Path, digest: str | None, config: NgramConfig, vocabulary: Tokens, remedy: str
    ) -> NgramLookup:
        """Open the index in a folder.

        Raises `ValueError` if it is missing, damaged or has another digest, with the remedy.
        """
        index = open_index(folder)
        if index.description.digest != digest:
            raise ValueError(
                f"{folder}: another n-gram index ({index.description.digest}) than the model needs "
                f"({digest}); {remedy}"
            )
        return cls(index, config, vocabulary)

    def stream(self, carry_over: int = 0) -> Stream:
        """Begin a stream of tokens that grows, such as generated text."""
        return Stream(self, carry_over)

    def document(
        self, size: int = 0, carry_over: int = 0, counts: tuple[np.ndarray, np.ndarray] | None = None
    ) -> Document:
        """Begin a document of ``size`` symbols, if their number is known; ``counts`` are empty."""
        return Document(self.layout, self.index.tables, self.config, size, carry_over, counts)

    def after(self, tokens_N: np.ndarray, lo: int, hi: int, carry_over: int = 0) -> np.ndarray:
        """Return the candidates after each of a stream's tokens ``lo`` to ``hi``: (hi - lo, width) uint8."""
        first = max(0, lo - history_of(self.config, carry_over))
        begins = np.flatnonzero(self.symbols[tokens_N[first : lo + 1]] == BEGIN)
        if len(begins) and not carry_over:
            first += int(begins[-1])
        stream = self.stream(carry_over)
        stream.read(tokens_N[first:lo])
        return stream.extend(tokens_N[lo:hi])

    def windows(self, shards: Shards, starts: np.ndarray, length: int) -> np.ndarray:
        """Return the candidates after each token of windows (n,) of a split: (n, length, width) uint8.

        A document is read once for all windows in it, from its beginning or from `history_of` before the
        first of them. If two windows are farther apart, the text between them is not read. Where the
        configuration has a carry-over, a window of the share that looks back reads its shard as one document.
        """
        out = np.zeros((len(starts) * length, self.layout.width), np.uint8)
        pieces = []
        carry_over_n = np.where(self._carried(starts), self.config.carry_over, 0).tolist()
        for row, (start, carry_over) in enumerate(zip(starts.tolist(), carry_over_n, strict=True)):
            column = 0
            while column < length:
                shard, begin, at, end = shards.document((start + column) % shards.tokens)
                size = min(length - column, end - at)
                begin = 0 if carry_over else begin
                pieces.append((shard, carry_over, begin, at, size, row * length + column))
                column += size
        # All documents use the same memory, because clearing what one has counted costs less than new memory.
        counts = {carry_over: empty_counts(self.config, carry_over) for carry_over in set(carry_over_n)}
        for (shard, carry_over, begin), group in groupby(sorted(pieces), itemgetter(0, 1, 2)):
            own = [piece[3:] for piece in group]
            self._of_document(shards, shard, begin, own, carry_over, counts[carry_over], out)
        return out.reshape(len(starts), length, -1)

    def _carried(self, starts_n: np.ndarray) -> np.ndarray:
        """Return which windows look back, if any do, by a hash of their first token: (n,) bool."""
        fraction_n = (starts_n.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) / 2.0**64
        return fraction_n < self.config.CARRY_SHARE

    def _of_document(
        self,
        shards: Shards,
        shard: int,
        begin: int,
        pieces: list[tuple[int, int, int]],
        carry_over: int,
        counts: tuple[np.ndarray, np.ndarray],
        out_NW: np.ndarray,
    ) -> None:
        """Write the candidates of pieces of one document (first token, size, first row), in rising order."""
        document = None
        history = history_of(self.config, carry_over)
        read = begin
        offset = 0
        last = max(at + size for at, size, _ in pieces)
        for at, size, row in pieces:
            # The part that an earlier piece has as well is copied; its rows are `offset` behind its tokens.
            shared = max(0, min(size, read - at))
            out_NW[row : row + shared] = out_NW[offset + at : offset + at + shared]
            if shared == size:
                continue
            start = at + shared
            end = at + size
            if document is None or start > read + history:
                read = max(read, start - history)
                if document is not None:
                    document.clear_counts()
                document = self.document(last - read, carry_over, counts)
            document.read(self.symbols[shards.within(shard, read, start)])
            document.read(self.symbols[shards.within(shard, start, end)], out_NW[row + shared : row + size])
            read = end
            offset = row - at
        if document is not None:
            document.clear_counts()


class Stream:
    """A stream of tokens that grows, and the candidates after each; each token takes the same time.

    A stream begins at a document's beginning, or at least `history_of` tokens before the first one whose
    candidates are needed. A document's first token ends the document before it, unless there is a carry-over.
    """

    def __init__(self, lookup: NgramLookup, carry_over: int = 0) -> None:
        self._lookup = lookup
        self._carry_over = carry_over
        self._document = lookup.document(carry_over=carry_over)

    def extend(self, tokens_N: np.ndarray) -> np.ndarray:
        """Read more tokens and return the candidates after each of them: (N, width) uint8."""
        out_NW = np.zeros((len(tokens_N), self._lookup.layout.width), np.uint8)
        self.read(tokens_N, out_NW)
        return out_NW

    def read(self, tokens_N: np.ndarray, out_NW: np.ndarray | None = None) -> None:
        """Read more tokens, and write the candidates after each into ``out_NW`` (zeros), if given."""
        text = self._lookup.symbols[tokens_N]
        begins = [] if self._carry_over else np.flatnonzero(text == BEGIN).tolist()
        for start, end in pairwise([0, *begins, len(text)]):
            if end > start and text[start] == BEGIN and not self._carry_over:
                self._document = self._lookup.document()
            self._document.read(text[start:end], None if out_NW is None else out_NW[start:end])
