"""Training windows in an order that needs no memory and can resume at any position.

The split's T tokens are a ring. An epoch divides it, from an offset of its own, into N = ceil(T / seq_len)
windows of seq_len + 1 tokens that overlap by one (the last target of a window is the first input of the
next). So every token is a target at least once, and fewer than seq_len tokens are targets twice. Windows
cross shard borders, and once per epoch the end of the ring, so no text is lost and epochs differ. Packed rows
(`spider.data.packing`) replace the windows, in the same order of numbers.

Global sample n is window ``permute(n % N)`` of epoch ``n // N``: a pure function of (seed, n). A step of R
ranks consumes the next R * rows samples, and rank r gets the r-th slice of them. So a position is one number,
any number of ranks sees the same global order, and a run resumes exactly on another number of ranks. In the
order of the text (``shuffled=False``) sample n is the n-th window around the ring, and epochs follow on.
Packed rows then come in the order of the first piece of each row.

The permutation is a generalized Feistel network on pairs (left, right) of Z_a x Z_b with a b just above N. It
is repeated until the result is below N (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002). It takes a tenth of a microsecond per row; a stored permutation of 45 million windows would take 360 MB
per rank. Python's overhead is paid once per block of `BLOCK` rows, which a background thread reads ahead.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from spider.data.mixture import Mix, Mixture, read_of_each
from spider.data.shards import Shards, damaged

if TYPE_CHECKING:
    from spider.data.ngram.lookup import NgramLookup
    from spider.data.packing import PackedRows

ROUNDS = 6
"""Feistel rounds. Four make a pseudorandom permutation; the others help if the domain is tiny."""
BLOCK = 1024
"""Rows read at a time (at least a batch)."""
MIXED_BLOCK = 4 * BLOCK
"""Rows of a mixture that are read at a time, because each source adds a constant cost to a block."""
MIXED_TOKENS = 1 << 22
"""Tokens of such a block, unless `BLOCK` rows have more."""
DEPTH = 2
"""Blocks read ahead."""
CANDIDATE_TOKENS = 1 << 14
"""Tokens of a block with candidates of an n-gram index. One takes about 16 microseconds, for which the first
step waits, and 400 bytes. What is read ahead at the end of a stage is of no use."""


@dataclass(frozen=True)
class Batch:
    """One rank's rows of one step."""

    rows_BT1: np.ndarray
    """Tokens, (rows, seq_len + 1) uint16: inputs are [:, :-1], targets [:, 1:]."""
    position: dict[str, Any]
    """Position after this batch; a new `Loader` can continue there."""
    candidates_BTW: np.ndarray | None = None
    """Candidates of the n-gram index after each input, (rows, seq_len, width) uint8."""
    learned_BT: np.ndarray | None = None
    """Targets that count, (rows, seq_len) bool; None: all except padding."""
    document_BT: np.ndarray | None = None
    """Number of each input's document in its packed row, (rows, seq_len) uint16 from 1; 0 for padding."""
    reward_B: np.ndarray | None = None
    """Reward of the sampled answer in each row, (rows,); None for text that was not sampled."""
    advantage_B: np.ndarray | None = None
    """Reward of each row minus the mean of its prompt's answers, (rows,) float32."""

    def split(self, count: int) -> list[Batch]:
        """Divide the rows into so many micro-batches."""
        parts: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, values in self.arrays().items():
            for part, rows in zip(parts, np.split(values, count), strict=True):
                part[name] = rows
        return [replace(self, **part) for part in parts]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that are there, by name. The first axis of each is that of the rows."""
        names = ("rows_BT1", "candidates_BTW", "learned_BT", "document_BT", "reward_B", "advantage_B")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class Batches(Iterator[Batch]):
    """Endless batches that a background thread reads ahead; ``waited`` are the seconds spent waiting for it.

    Args:
        name: Name in errors.
        order: Fields that decide the order of the windows, including ``seq_len`` and ``seed``.
        rows: Rows per step of this rank.
        rank: Slice of each global step that this rank gets.
        world: Number of ranks.
        position: Position of a `Batch` to continue from; None starts at the beginning.

    Raises `ValueError` for a position of another order, with the field that differs.
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
                    f"{value!r}; their orders differ, so start again or restore the old value"
                )
        self._rows = rows
        self._rank = rank
        self._world = world
        self.order = order
        self.waited = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._ahead: deque[Future[list[Batch]]] = deque()
        self._ready: deque[Batch] = deque()

    def _block(self) -> list[Batch]:
        """Return the next few batches; the background thread calls this."""
        raise NotImplementedError

    def epoch(self, position: dict[str, Any]) -> float:
        """Return the number of passes over the data at a position: 1.25 is a quarter into the second pass."""
        raise NotImplementedError

    def epochs(self, position: dict[str, Any]) -> dict[str, float]:
        """Return `epoch` for each source of a mixture, by name."""
        return {}

    def __next__(self) -> Batch:
        if not self._ready:
            while len(self._ahead) <= DEPTH:
                self._ahead.append(self._pool.submit(self._block))
            began = time.perf_counter()
            self._ready.extend(self._ahead.popleft().result())
            self.waited += time.perf_counter() - began
        return self._ready.popleft()

    def close(self) -> None:
        """Stop reading; the loader cannot be used afterwards."""
        self._pool.shutdown(cancel_futures=True)


class Loader(Batches):
    """Batches of one split.

    Rows are windows of the ring with ``seq_len`` targets, or ``packed`` rows. With ``answers`` only the
    assistant's answers are learned. Without ``shuffled`` they come in the order of the text. The other
    arguments are those of `Batches`.

    Raises `ValueError` for less than seq_len + 1 tokens, and, from ``next``, `DamagedShard` for a block that
    differs from its digest, or a token outside the vocabulary.
    """

    def __init__(
        self,
        shards: Shards,
        packed: PackedRows | None = None,
        *,
        seq_len: int,
        rows: int,
        seed: int,
        position: dict[str, Any] | None = None,
        lookup: NgramLookup | None = None,
        answers: bool = False,
        shuffled: bool = True,
        **share: int,
    ) -> None:
        if packed is None and shards.tokens < seq_len + 1:
            raise ValueError(
                f"{shards.name}: {shards.tokens} tokens are less than one window of seq_len + 1 = "
                f"{seq_len + 1}; lower seq_len or encode more text"
            )
        order = {"data": shards.digest, "seq_len": seq_len, "seed": seed}
        order |= {"packing": packed.packing.digest} if packed else {}
        order |= {} if shuffled else {"order": "text"}
        super().__init__("loader", order, rows=rows, position=position, **share)
        self._shards = shards
        self._lookup = lookup
        self._packed = packed
        self._answers = answers
        self.shuffled = shuffled
        self._next_sample = int(position["sample"]) if position is not None else 0
        self.windows = packed.count if packed else -(-shards.tokens // seq_len)
        self._rows_of_text: np.ndarray | None = None
        if packed and not shuffled:
            self._rows_of_text = np.argsort(packed.pieces["first"][packed.first[:-1]], kind="stable")
        self._steps = max(1, (CANDIDATE_TOKENS // seq_len if lookup else BLOCK) // rows)

    def epoch(self, position: dict[str, Any]) -> float:
        return int(position["sample"]) / self.windows

    def _block(self) -> list[Batch]:
        """Return this rank's batches of the next ``_steps`` steps."""
        step = self._rows * self._world
        sample = self._next_sample
        self._next_sample += self._steps * step
        firsts = sample + self._rank * self._rows + step * np.arange(self._steps)
        samples = (firsts[:, None] + np.arange(self._rows)).ravel()
        return [
            replace(batch, position={"sample": sample + step * (i + 1), **self.order})
            for i, batch in enumerate(self.read(samples).split(self._steps))
        ]

    def read(self, samples: np.ndarray) -> Batch:
        """Return the rows of global samples as one batch without a position."""
        return self._of_packed(samples) if self._packed else self._of_ring(samples)

    def _of_packed(self, samples: np.ndarray) -> Batch:
        assert self._packed is not None
        pad = self._shards.vocabulary.pad
        numbers = self.packed_rows(samples)
        rows, segments = self._packed.rows(numbers, pad)
        if rows.max() >= self._shards.vocabulary.size:
            raise ValueError(f"{self._shards.name}: a shard is damaged; `spider data verify` finds it")
        counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        if self._answers:
            counted &= self._packed.answers(numbers, rows)
        return Batch(rows, {}, learned_BT=counted, document_BT=segments[:, :-1])

    def _of_ring(self, samples: np.ndarray) -> Batch:
        starts = self.starts(samples)
        rows = self._shards.gather(starts, self.order["seq_len"] + 1)
        size = self._shards.vocabulary.size
        if rows.max() >= size:
            i, t = np.argwhere(rows >= size)[0].tolist()
            shard, at = self._shards.locate((int(starts[i]) + t) % self._shards.tokens)
            raise damaged(shard, f"token {at}", f"{rows[i, t]} is not one of the {size} token ids")
        candidates = self._lookup.windows(self._shards, starts, rows.shape[1] - 1) if self._lookup else None
        return Batch(rows, {}, candidates)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Return the first token of each global sample's window of the ring, (n,) int64."""
        windows, offsets = self._placed(samples)
        return (offsets % self._shards.tokens + windows * self.order["seq_len"]) % self._shards.tokens

    def packed_rows(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of each global sample's packed row, (n,) int64."""
        numbers = self._placed(samples)[0]
        return numbers if self._rows_of_text is None else self._rows_of_text[numbers]

    def _placed(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each global sample's window in the order of its epoch, and the epoch's offset."""
        epochs, index = np.divmod(samples, self.windows)
        if not self.shuffled:
            return index, epochs * self.windows * self.order["seq_len"]
        windows, offsets = np.empty_like(index), np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            keys, offset = epoch_keys(self.order["seed"], epoch)
            windows[chosen] = permute(index[chosen], self.windows, keys)
            offsets[chosen] = offset % self._shards.tokens
        return windows, offsets


class MixedLoader(Loader):
    """Batches of several splits in given shares (`spider.data.mixture`), each in the order of its loader.

    Args:
        sources: loader of each source, by name. All have rows of the same kind, length and seed.
        weights: weight of each source.
        switches: other weights, each from a sample on.

    A position with other weights or switches continues: each source goes on at its own number.
    """

    def __init__(
        self,
        sources: Mapping[str, Loader],
        weights: Mapping[str, float],
        switches: Sequence[Mix] = (),
        *,
        rows: int,
        position: dict[str, Any] | None = None,
        **share: int,
    ) -> None:
        self._mixture = Mixture(weights, switches)
        names = self._mixture.names
        self._sources = [sources[name] for name in names]
        orders = [loader.order for loader in self._sources]
        own: dict[str, Any] = {"weights": dict(weights)}
        if switches:
            own["switches"] = [[begin, dict(mix)] for begin, mix in switches]
        order = orders[0] | own
        for field in ("data", "packing"):
            if field in order:
                order[field] = {name: one[field] for name, one in zip(names, orders, strict=True)}
        before = dict.fromkeys(names, 0)
        if position is not None and "weights" in position:
            before = position["before"]
            if any(position.get(field) != own.get(field) for field in ("weights", "switches")):
                read, counts = read_of_each(position), self._mixture.counts(position["sample"])
                before = {name: read[name] - counts[name] for name in names}
                position = position | own
        Batches.__init__(self, "loader", order, rows=rows, position=position, **share)
        self.order = order | {"before": before}
        self._before_S = np.array([before[name] for name in names])
        self._next_sample = int(position["sample"]) if position is not None else 0
        self.windows = sum(loader.windows for loader in self._sources)
        self._steps = min(loader._steps for loader in self._sources)
        if not any(loader._lookup for loader in self._sources):
            block = min(MIXED_BLOCK, max(BLOCK, MIXED_TOKENS // order["seq_len"]))
            self._steps = max(1, block // rows)

    def epoch(self, position: dict[str, Any]) -> float:
        return sum(read_of_each(position, self._mixture).values()) / self.windows

    def epochs(self, position: dict[str, Any]) -> dict[str, float]:
        read = read_of_each(position, self._mixture)
        named = zip(self._mixture.names, self._sources, strict=True)
        return {name: read[name] / loader.windows for name, loader in named}

    def read(self, samples: np.ndarray) -> Batch:
        sources, numbers = self._mixture.locate(samples)
        numbers += self._before_S[sources]
        arrays: dict[str, np.ndarray] = {}
        for source in np.unique(sources).tolist():
            chosen = sources == source
            for name, values in self._sources[source].read(numbers[chosen]).arrays().items():
                if name not in arrays:
                    arrays[name] = np.empty((len(samples), *values.shape[1:]), values.dtype)
                arrays[name][chosen] = values
        return Batch(position={}, **arrays)


def epoch_keys(seed: int, epoch: int) -> tuple[list[np.uint64], int]:
    """Return the keys of an epoch's permutation, and a random number for its offset."""
    *keys, offset = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS + 1, np.uint64)
    return keys, int(offset)


def permute(index: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    """Map each index by a pseudorandom permutation of 0..size-1 that depends on ``keys``: (n,) int64."""
    a = np.uint64(math.isqrt(size - 1) + 1)
    b = np.uint64(-(-size // int(a)))
    value = index.astype(np.uint64)
    outside = np.ones(len(value), dtype=bool)
    while outside.any():
        left, right = np.divmod(value[outside], b)
        for i, key in enumerate(keys):
            if i % 2 == 0:
                left = (left + scrambled(right ^ key)) % a
            else:
                right = (right + scrambled(left ^ key)) % b
        value[outside] = left * b + right
        outside = value >= size
    return value.astype(np.int64)


def batch_digest(rows_BT1: np.ndarray, first: int = 0) -> int:
    """Return a digest of rows of a step, the first of which has the number ``first`` in the step.

    It is a sum of signed 64-bit hashes, one a row. So the sum over all processes is the digest of the step.
    """
    total = 0
    for number, row_T1 in enumerate(np.ascontiguousarray(rows_BT1, "<u2"), start=first):
        hashed = blake2b(row_T1.data, digest_size=8, salt=number.to_bytes(8, "little"))
        total += int.from_bytes(hashed.digest(), "little")
    return (total + 2**63) % 2**64 - 2**63


def digest_text(total: int) -> str:
    """Return a sum of `batch_digest` as 16 hexadecimal digits."""
    return f"{total % 2**64:016x}"


def scrambled(x: np.ndarray) -> np.ndarray:
    """Return the top 63 bits of splitmix64's finalizer (Steele, Lea and Flood 2014); sums cannot overflow."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(1)
