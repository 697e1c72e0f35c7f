"""Training windows in a shuffled order that needs no memory and can be entered anywhere.

The split's T tokens are a ring. An epoch cuts it, from an offset of its own, into N = ceil(T / seq_len)
windows of seq_len + 1 tokens that overlap by one (the last target of a window is the first input of the
next), so that every token is a target at least once and fewer than seq_len of them twice. Windows straddle
shards, and once an epoch the end of the ring: nothing is thrown away at a tail, and epochs differ. Rows that
were packed (`spider.data.packing`) take the place of the windows, in the same order of numbers.

Global sample n is window ``permute(n % N)`` of epoch ``n // N``: a pure function of (seed, n). A step of R
ranks consumes the next R * rows samples, rank r the r-th slice of them. So a position is one number, any
number of ranks sees the same global order, and a run resumes to the sample on another number of ranks.

The permutation is a generalized Feistel network on pairs (left, right) of Z_a x Z_b with a b just above N,
walked until it lands below N (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). It
costs a tenth of a microsecond a row; a stored permutation of 45 million windows would cost 360 MB a rank.
Python's price for a call is paid once a block of `BLOCK` rows, which one background thread gathers ahead.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spider.data.shards import Shards
from spider.tokens import IGNORED

if TYPE_CHECKING:
    from spider.data.packing import PackedRows
    from spider.ngram.lookup import NgramLookup

ROUNDS = 6
"""Feistel rounds; four make a pseudorandom permutation, the rest help where the domain is tiny."""
BLOCK = 1024
"""Rows gathered in one go (at least a batch)."""
DEPTH = 2
"""Blocks gathered ahead."""
PROPOSED = 1 << 17
"""Ids of a block where an n-gram index proposes what follows each, in some 400 bytes."""


@dataclass(frozen=True)
class Batch:
    """One rank's rows of one step."""

    rows_BT1: np.ndarray
    """(rows, seq_len + 1) uint16: inputs are [:, :-1], targets [:, 1:]."""
    position: dict[str, Any]
    """Give it to a new `Loader` to continue right after this batch."""
    candidates_BTW: np.ndarray | None = None
    """What an index proposes to follow each input, (rows, seq_len, width) uint8, where there is one."""
    learned_BT: np.ndarray | None = None
    """Which targets count, (rows, seq_len) bool; None: all that are no padding."""
    segments_BT: np.ndarray | None = None
    """Which of its row's documents each input is of, (rows, seq_len) uint16 from 1, 0 for padding, where rows
    are packed."""

    def split(self, count: int) -> list[Batch]:
        """Its rows as so many micro-batches."""
        names = ("rows_BT1", "candidates_BTW", "learned_BT", "segments_BT")
        there = {name: v for name in names if (v := getattr(self, name)) is not None}
        parts = {name: np.split(values, count) for name, values in there.items()}
        return [
            Batch(position=self.position, **{name: values[i] for name, values in parts.items()})
            for i in range(count)
        ]


class Batches(Iterator[Batch]):
    """Endless batches, made ahead by one background thread; ``waited`` are the seconds they were late.

    Args:
        name: what to begin an error with.
        order: what decides the order of the windows, ``seq_len`` and ``seed`` among it.
        rows: rows this rank gets at each step.
        rank, world: which slice of each global step is ours.
        position: where to go on, from a `Batch`; None starts at the beginning.

    Raises `ValueError` for a position of another order, naming the field that differs.
    """

    def __init__(
        self,
        name: str,
        order: dict[str, Any],
        *,
        rows: int,
        rank: int = 0,
        world: int = 1,
        position: dict[str, Any] | None = None,
    ) -> None:
        if rows < 1 or not 0 <= rank < world:
            raise ValueError(f"{name}: needs rows >= 1 and 0 <= rank < world (got {rows}, {rank}, {world})")
        for field, value in order.items():
            if position is not None and position.get(field) != value:
                raise ValueError(
                    f"{name}: the position to resume has {field} = {position.get(field)!r}, this run has "
                    f"{value!r}; their orders differ, so start anew or restore the old value"
                )
        self._rows, self._rank, self._world, self._order = rows, rank, world, order
        self.waited = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._ahead: deque[Future[list[Batch]]] = deque()
        self._ready: deque[Batch] = deque()

    def _block(self) -> list[Batch]:
        """The next few batches; called in the thread."""
        raise NotImplementedError

    def epoch(self, position: dict[str, Any]) -> float:
        """Return the number of passes over the data at a position: 1.25 is a quarter into the second pass."""
        raise NotImplementedError

    def __next__(self) -> Batch:
        if not self._ready:
            while len(self._ahead) <= DEPTH:
                self._ahead.append(self._pool.submit(self._block))
            began = time.perf_counter()
            self._ready.extend(self._ahead.popleft().result())
            self.waited += time.perf_counter() - began
        return self._ready.popleft()

    def close(self) -> None:
        """Stop reading; the loader is not usable afterwards."""
        self._pool.shutdown(cancel_futures=True)


class Loader(Batches):
    """Batches of one split; ``seq_len`` are the targets of a row, the rest is as `Batches` has it. Rows are
    windows of the ring, or those ``packed``; with ``answers`` only what an assistant says in them is learned.

    Raises `ValueError` for less than seq_len + 1 tokens, and, from ``next``, for an id outside the vocabulary
    (naming shard and token).
    """

    def __init__(
        self,
        shards: Shards,
        *,
        seq_len: int,
        rows: int,
        seed: int,
        position: dict[str, Any] | None = None,
        lookup: NgramLookup | None = None,
        packed: PackedRows | None = None,
        answers: bool = False,
        **share: int,
    ) -> None:
        if packed is None and shards.tokens < seq_len + 1:
            raise ValueError(
                f"{shards.name}: {shards.tokens} tokens are less than one window of seq_len + 1 = "
                f"{seq_len + 1}; lower seq_len or encode more text"
            )
        order = {"data": shards.digest, "seq_len": seq_len, "seed": seed}
        order |= {"packing": packed.packing.digest} if packed else {}
        super().__init__("loader", order, rows=rows, position=position, **share)
        self._shards, self._lookup, self._packed, self._answers = shards, lookup, packed, answers
        self._next_sample = int(position["sample"]) if position is not None else 0
        self.windows = packed.count if packed else -(-shards.tokens // seq_len)
        self._steps = max(1, (PROPOSED // seq_len if lookup else BLOCK) // rows)

    def epoch(self, position: dict[str, Any]) -> float:
        return int(position["sample"]) / self.windows

    def _block(self) -> list[Batch]:
        """Our batches of the next ``_steps`` steps."""
        step = self._rows * self._world
        sample, self._next_sample = self._next_sample, self._next_sample + self._steps * step
        firsts = sample + self._rank * self._rows + step * np.arange(self._steps)
        samples = (firsts[:, None] + np.arange(self._rows)).ravel()
        batches = self._of_packed(samples) if self._packed else self._of_ring(samples)
        return [
            replace(batch, position={"sample": sample + step * (i + 1), **self._order})
            for i, batch in enumerate(batches)
        ]

    def _of_packed(self, samples: np.ndarray) -> Iterator[Batch]:
        """The batches of these samples, whose position is still to be told."""
        assert self._packed is not None
        pad = self._shards.vocabulary.pad
        numbers, _ = self._shuffled(samples)
        rows, segments = self._packed.rows(numbers, pad)
        if rows.max() >= self._shards.vocabulary.size:
            raise ValueError(f"{self._shards.name}: a shard is damaged; `spider verify` finds which")
        counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        if self._answers:
            counted &= self._packed.answers(numbers, rows)
        for row, count, segment in zip(
            *(np.split(values, self._steps) for values in (rows, counted, segments[:, :-1])), strict=True
        ):
            yield Batch(row, {}, learned_BT=count, segments_BT=segment)

    def _of_ring(self, samples: np.ndarray) -> Iterator[Batch]:
        starts = self.starts(samples)
        rows = self._shards.gather(starts, self._order["seq_len"] + 1)
        if rows.max() >= (size := self._shards.vocabulary.size):
            i, t = np.argwhere(rows >= size)[0].tolist()
            where = self._shards.locate((int(starts[i]) + t) % self._shards.tokens)
            raise ValueError(
                f"{where}: {rows[i, t]} is not one of the {size} ids, the shard is damaged; encode its "
                "part again and run again to go on (`spider verify` finds other damaged ones)"
            )
        candidates: list[np.ndarray] | list[None] = [None] * self._steps
        if self._lookup:
            candidates = np.split(self._lookup.windows(self._shards, starts, rows.shape[1] - 1), self._steps)
        for batch, proposed in zip(np.split(rows, self._steps), candidates, strict=True):
            yield Batch(batch, {}, proposed)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """First token of each global sample's window of the ring: (n,) int64 of (n,) int64."""
        windows, offsets = self._shuffled(samples)
        return (offsets % self._shards.tokens + windows * self._order["seq_len"]) % self._shards.tokens

    def packed_rows(self, samples: np.ndarray) -> np.ndarray:
        """Number of each global sample's packed row: (n,) int64 of (n,) int64."""
        return self._shuffled(samples)[0]

    def _shuffled(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each global sample its window, in the order of its epoch, and that epoch's offset."""
        epochs, index = np.divmod(samples, self.windows)
        windows, offsets = np.empty_like(index), np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            of = epochs == epoch
            seeds = np.random.SeedSequence([self._order["seed"], epoch])
            *keys, offset = seeds.generate_state(ROUNDS + 1, np.uint64)
            windows[of] = permute(index[of], self.windows, keys)
            offsets[of] = int(offset) % self._shards.tokens
        return windows, offsets


def permute(index: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    """Where a pseudorandom permutation of 0..size-1, chosen by ``keys``, sends each index: (n,) int64."""
    a = np.uint64(math.isqrt(size - 1) + 1)
    b = np.uint64(-(-size // int(a)))
    value = index.astype(np.uint64)
    outside = np.ones(len(value), dtype=bool)
    while outside.any():
        left, right = np.divmod(value[outside], b)
        for i, key in enumerate(keys):
            if i % 2 == 0:
                left = (left + _mix(right ^ key)) % a
            else:
                right = (right + _mix(left ^ key)) % b
        value[outside] = left * b + right
        outside = value >= size
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), its top 63 bits so that a sum cannot wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(1)


def beside(batch: Batch, device: torch.device, documents: bool) -> dict[str, Tensor]:
    """What a model is given with a batch's rows; with ``documents``, of which each id is."""
    given = {}
    if batch.candidates_BTW is not None:
        given["candidates_BTW"] = torch.from_numpy(batch.candidates_BTW).to(device)
    if documents and batch.segments_BT is not None:
        given["segments_BT"] = torch.from_numpy(np.ascontiguousarray(batch.segments_BT)).to(device).long()
    return given


def to_device(batch: Batch, device: torch.device, pad: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a batch, (B, T) int64 each; targets that are ``pad``, or are not to be learned,
    are `IGNORED`.

    Rows move as uint16 and are widened on the device: a quarter of the traffic of int64.
    """
    rows = torch.from_numpy(np.ascontiguousarray(batch.rows_BT1))
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    rows = rows.long()
    labels_BT = rows[:, 1:]
    if batch.learned_BT is not None:
        learned_BT = torch.from_numpy(np.ascontiguousarray(batch.learned_BT)).to(device)
        return rows[:, :-1], labels_BT.masked_fill(~learned_BT, IGNORED)
    return rows[:, :-1], labels_BT.masked_fill(labels_BT == pad, IGNORED)
