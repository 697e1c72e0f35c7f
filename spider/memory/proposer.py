"""Proposals for all who need them: windows of shards in training, a stream that is scored, a text written.

All three are the same function of a document's ids so far, wherever a window begins, so a model meets in use
what it was trained on.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from spider.config.memory import MemoryConfig
from spider.data.shards import Shards
from spider.memory.contexts import name_of
from spider.memory.layout import Layout
from spider.memory.propose import BACK, Span, propose
from spider.memory.store import Memory, open_memory
from spider.memory.symbols import BEGIN, symbols_of
from spider.tokens import Tokens


class Proposer:
    """What a memory and a document propose, as bytes of `Layout`. Safe to use from several threads.

    Raises:
        ValueError: the memory was counted with other settings.
    """

    def __init__(self, memory: Memory, config: MemoryConfig, alphabet: Tokens) -> None:
        if memory.description.counted != config.counted:
            raise ValueError(
                f"{memory.folder}: counted with other settings than model.memory has (it has contexts of "
                f"{', '.join(memory.description.contexts)}, asked for are "
                f"{', '.join(map(name_of, config.contexts))}); run its jobs again"
            )
        self.memory, self.config, self.layout = memory, config, Layout.of(config)
        self.alphabet, self.symbols = alphabet, symbols_of(alphabet)

    @classmethod
    def of(
        cls, folder: Path, digest: str | None, config: MemoryConfig, alphabet: Tokens, remedy: str
    ) -> Proposer:
        """Of the memory in a folder; `ValueError` where that is missing, damaged, or another than the one of
        this digest, ends with the ``remedy``."""
        if (memory := open_memory(folder)).description.digest != digest:
            raise ValueError(
                f"{folder}: another memory ({memory.description.digest}) than the model is to be read with "
                f"({digest}); {remedy}"
            )
        return cls(memory, config, alphabet)

    def after(self, tokens_N: np.ndarray, lo: int, hi: int) -> np.ndarray:
        """What may follow each of the ids ``lo`` to ``hi`` of a stream: (hi - lo, width) uint8."""
        out = np.zeros((hi - lo, self.layout.width), np.uint8)
        first = max(0, lo - BACK)
        text = self.symbols[tokens_N[first:hi]]
        begins = np.flatnonzero(text == BEGIN)
        starts = np.unique(np.concatenate([[0], begins[begins > lo - first]]))
        inside = begins[begins <= lo - first]
        starts[0] = inside[-1] if len(inside) else 0
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            at = max(int(start), lo - first)
            span = Span(at - int(start), at + first - lo, int(end) - at)
            self._propose(text[start:end], [span], out)
        return out

    def windows(self, shards: Shards, starts: np.ndarray, length: int) -> np.ndarray:
        """What may follow each id of windows (n,) of a split: (n, length, width) uint8.

        A document is read once, from its beginning, for all windows in it.
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
            inside = list(group)
            first = max(begin, inside[0][2] - BACK)
            last = max(at + size for _, _, at, size, _ in inside)
            spans = [Span(at - first, row, size) for _, _, at, size, row in inside]
            self._propose(self.symbols[shards.maps[shard][first:last]], spans, out)
        return out.reshape(len(starts), length, -1)

    def _propose(self, text: np.ndarray, spans: list[Span], out_NW: np.ndarray) -> None:
        propose(text, spans, out_NW, self.layout, self.memory.tables, self.config.pointers)
