"""Candidates for all who need them: windows of shards in training, a stream that is scored, a text written.

All three are the same function of a document's ids so far, wherever a window begins, so a model meets in use
what it was trained on.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from spider.config.ngram import NgramConfig
from spider.data.shards import Shards
from spider.ngram.candidates import BACK, Document
from spider.ngram.layout import BEGIN, Layout, symbols_of
from spider.ngram.store import NgramIndex, open_index
from spider.tokens import Tokens


class NgramLookup:
    """What an n-gram index and a document propose, as bytes of `Layout`. Safe to use from several threads.

    Raises:
        ValueError: the n-gram index was counted with other settings.
    """

    def __init__(self, index: NgramIndex, config: NgramConfig, vocabulary: Tokens) -> None:
        index.check_counted(config)
        self.index, self.config, self.layout = index, config, Layout.of(config)
        self.vocabulary, self.symbols = vocabulary, symbols_of(vocabulary)

    @classmethod
    def of(
        cls, folder: Path, digest: str | None, config: NgramConfig, vocabulary: Tokens, remedy: str
    ) -> NgramLookup:
        """Open the index in a folder; `ValueError` where that is missing, damaged, or another than the one of
        this digest, ends with the ``remedy``."""
        if (index := open_index(folder)).description.digest != digest:
            raise ValueError(
                f"{folder}: another index ({index.description.digest}) than the model is to be read with "
                f"({digest}); {remedy}"
            )
        return cls(index, config, vocabulary)

    def stream(self) -> Stream:
        """Begin a stream of ids that grows, such as a text that is generated."""
        return Stream(self)

    def document(self, size: int = 0) -> Document:
        """Begin to read a document; ``size`` symbols of it, where that is known."""
        return Document(self.layout, self.index.tables, self.config.match_orders, size)

    def after(self, tokens_N: np.ndarray, lo: int, hi: int) -> np.ndarray:
        """Return the candidates after each of a stream's ids ``lo`` to ``hi``: (hi - lo, width) uint8."""
        first = max(0, lo - BACK)
        begins = np.flatnonzero(self.symbols[tokens_N[first : lo + 1]] == BEGIN)
        if len(begins):
            first += int(begins[-1])
        stream = self.stream()
        stream.skip(tokens_N[first:lo])
        return stream.extend(tokens_N[lo:hi])

    def windows(self, shards: Shards, starts: np.ndarray, length: int) -> np.ndarray:
        """Return the candidates after each id of windows (n,) of a split: (n, length, width) uint8.

        A document is read once for all windows in it, from its beginning or from `BACK` before the first of
        them. Where two windows lie further apart than `BACK`, what is between them is not read.
        """
        out = np.zeros((len(starts) * length, self.layout.width), np.uint8)
        pieces = []
        for row, start in enumerate(starts.tolist()):
            column = 0
            while column < length:
                shard, begin, at, end = shards.document((start + column) % shards.tokens)
                size = min(length - column, end - at)
                pieces.append((shard, begin, at, size, row * length + column))
                column += size
        for (shard, begin), group in groupby(sorted(pieces), itemgetter(0, 1)):
            self._of_document(shards.maps[shard], begin, [piece[2:] for piece in group], out)
        return out.reshape(len(starts), length, -1)

    def _of_document(
        self, tokens: np.ndarray, begin: int, pieces: list[tuple[int, int, int]], out_NW: np.ndarray
    ) -> None:
        """Write the candidates of pieces of one document, in rising order: first id, size, first row."""
        document, known, offset = None, begin, 0
        last = max(at + size for at, size, _ in pieces)
        for at, size, row in pieces:
            # What an earlier piece has as well is copied; its rows are `offset` behind its ids.
            shared = max(0, min(size, known - at))
            out_NW[row : row + shared] = out_NW[offset + at : offset + at + shared]
            if shared == size:
                continue
            start, end = at + shared, at + size
            if document is None or start > known + BACK:
                known = max(known, start - BACK)
                document = self.document(last - known)
            document.read(self.symbols[tokens[known:start]])
            document.read(self.symbols[tokens[start:end]], out_NW[row + shared : row + size])
            known, offset = end, row - at


class Stream:
    """A stream of ids that grows, and the candidates after each: an id costs the same at every place.

    A stream begins at a document's beginning, or at least `BACK` ids before the first whose candidates are
    needed. A document's first id ends the document before it.
    """

    def __init__(self, lookup: NgramLookup) -> None:
        self._lookup, self._document = lookup, lookup.document()

    def extend(self, tokens_N: np.ndarray) -> np.ndarray:
        """Read more ids and return the candidates after each of them: (N, width) uint8."""
        out_NW = np.zeros((len(tokens_N), self._lookup.layout.width), np.uint8)
        self._read(tokens_N, out_NW)
        return out_NW

    def skip(self, tokens_N: np.ndarray) -> None:
        """Read more ids whose candidates are not needed."""
        self._read(tokens_N, None)

    def _read(self, tokens_N: np.ndarray, out_NW: np.ndarray | None) -> None:
        text = self._lookup.symbols[tokens_N]
        begins = np.flatnonzero(text == BEGIN).tolist()
        for start, end in pairwise([0, *begins, len(text)]):
            if end > start and text[start] == BEGIN:
                self._document = self._lookup.document()
            self._document.read(text[start:end], None if out_NW is None else out_NW[start:end])
