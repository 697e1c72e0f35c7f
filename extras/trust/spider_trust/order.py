"""Invert the order of samples: which steps read a token, and what a step read.

The order is a pure function of the position in a stage's receipt (`spider.data.loader`,
`spider.data.mixture`), so nothing is stored for each token. A query inverts the permutation of an epoch for
the few windows over the tokens, and finds the numbers of a mixture's source by bisection. It takes about
a millisecond an epoch. The number of processes does not matter: all see one global order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spider.checkpoints.metrics import read_rows
from spider.checkpoints.records import Receipt
from spider.common.results import Results
from spider.config import Config, StageSpec
from spider.data.loader import Loader, batch_digest, digest_text, epoch_keys, scrambled
from spider.data.mixture import Mixture, positions_of, read_of_each
from spider.data.packing import PackedRows
from spider.data.shards import Shards
from spider.evaluation.text import orders
from spider_trust.traces import Read


class Row(NamedTuple):
    """Text that one row of a step read."""

    dataset: str
    shards: Shards
    spans: list[tuple[int, int]]
    """First token in the split and end of each piece, in the order of the row."""


class Source(NamedTuple):
    """A dataset that a stage read."""

    dataset: str
    split: Shards
    loader: Loader
    rows: PackedRows | None
    seq_len: int


@dataclass(frozen=True)
class StageOrder:
    """The order of the samples of one trained stage."""

    receipt: Receipt
    windows: int
    """Windows of a step."""
    sources: list[Source]
    """The sources in the order of the mixture's numbers."""

    @cached_property
    def mixture(self) -> Mixture | None:
        """Return the mixture that the stage read, or None for one dataset."""
        position = self.receipt.position or {}
        return Mixture(position["weights"], position.get("switches", ())) if "weights" in position else None

    @property
    def first(self) -> int:
        """Return the first sample of the stage, which may continue the order of the stage before."""
        assert self.receipt.position is not None
        return int(self.receipt.position["sample"]) - self.receipt.steps * self.windows

    @property
    def end(self) -> int:
        return self.first + self.receipt.steps * self.windows

    def global_step(self, step: int) -> int:
        """Return the step of the run for a step of this stage."""
        return self.receipt.global_step - self.receipt.steps + step

    def _numbers(self, samples: int) -> list[int]:
        """Return how many windows of each source the first samples have."""
        if self.mixture is None:
            return [samples]
        assert self.receipt.position is not None
        read = read_of_each(self.receipt.position | {"sample": samples}, self.mixture)
        return [read[source.dataset] for source in self.sources]

    @cached_property
    def _mixed(self) -> np.ndarray | None:
        """The source of each sample of the stage, or None for one dataset."""
        return None if self.mixture is None else self.mixture.locate(np.arange(self.first, self.end))[0]

    def reads(self, digest: str, begin: int, end: int) -> Iterator[Read]:
        """Yield the rows that read any token from ``begin`` to before ``end`` of the split of a digest."""
        ranges = zip(self.sources, self._numbers(self.first), self._numbers(self.end), strict=True)
        for i, (source, first, last) in enumerate(ranges):
            if source.split.digest != digest:
                continue
            numbers = samples_over(source, begin, end, first, last)
            at = numbers - first if self._mixed is None else np.flatnonzero(self._mixed == i)[numbers - first]
            for sample in at.tolist():
                step, row = divmod(sample, self.windows)
                yield Read(self.receipt.stage, step + 1, self.global_step(step + 1), row)

    def batch(self, step: int) -> tuple[np.ndarray, list[Row]]:
        """Return what a step of the stage read: ids, (rows, seq_len + 1) uint16, and where they stand."""
        name = f"{self.receipt.run}/{self.receipt.stage}"
        if not 1 <= step <= self.receipt.steps:
            raise ValueError(f"{name}: has no step {step}; it was trained for {self.receipt.steps} steps")
        samples = self.first + (step - 1) * self.windows + np.arange(self.windows)
        which = np.zeros(self.windows, np.int64)
        if self.mixture is not None:
            which, samples = self.mixture.locate(samples)
            samples += np.array(self._numbers(0))[which]
        ids: list[np.ndarray] = []
        rows: list[Row] = []
        for i, number in zip(which.tolist(), samples.tolist(), strict=True):
            source, at = self.sources[i], np.array([number])
            ids.append(source.loader.read(at).rows_BT1[0])
            rows.append(Row(source.dataset, source.split, _spans(source, at)))
        return np.stack(ids), rows

    def digest(self, step: int) -> str:
        """Return the digest of a step's batch, as the trainer logs it."""
        return digest_text(batch_digest(self.batch(step)[0]))


class Order:
    """The orders of the trained stages of a run, up to its ``last`` one.

    Raises `ValueError` for a run without a trained stage. The methods raise it for a stage whose order is not
    recorded, or whose data or settings have changed since.
    """

    def __init__(self, config: Config, run: str, last: str | None = None) -> None:
        self.config = config
        self.run = run
        self.results = Results(Path(config.results))
        stages = config.run(run).stages
        end = config.stage(run, last or stages[-1].name).index + 1
        self.names = [one.name for one in stages[:end] if self.results.stage(run, one.name).receipt.is_file()]
        """Names of the trained stages."""
        if not self.names or last not in (None, self.names[-1]):
            missing = self.results.stage(run, last or stages[0].name).receipt
            raise ValueError(f"{missing}: no such receipt; train {run} first")
        self._known: dict[str, StageOrder] = {}

    def stage(self, name: str) -> StageOrder:
        """Return the order of a stage."""
        if name not in self.names:
            trained = ", ".join(self.names)
            raise ValueError(f"{self.run}: has no trained stage {name!r} (there are: {trained})")
        if name not in self._known:
            spec = self.config.stage(self.run, name)
            folder = self.results.stage(self.run, name)
            receipt = Receipt.of_stage(folder.receipt, spec)
            self._known[name] = stage_order(spec, receipt, self.results.shards(spec.data))
        return self._known[name]

    def at(self, global_step: int) -> tuple[StageOrder, int]:
        """Return the stage of a step of the run, and the step of that stage."""
        for name in self.names:
            stage = self.stage(name)
            step = global_step - stage.global_step(0)
            if 1 <= step <= stage.receipt.steps:
                return stage, step
        last = self.stage(self.names[-1]).receipt.global_step
        raise ValueError(f"{self.run}: step {global_step} was never trained; its steps are 1 to {last}")

    def reads(self, digest: str, begin: int, end: int) -> list[Read]:
        """Return each row of each step that read any token from ``begin`` to before ``end`` of a split.

        ``digest`` is that of the split (`spider.data.shards.Shards`).
        """
        return [read for name in self.names for read in self.stage(name).reads(digest, begin, end)]


def stage_order(spec: StageSpec, receipt: Receipt, data: Path) -> StageOrder:
    """Return the order of a stage. ``data`` is the folder of the shards of its first dataset.

    Raises:
        ValueError: the order is not recorded, or the settings or the data are others by now.
    """
    name = f"{receipt.run}/{receipt.stage}"
    if spec.stream is not None or spec.settings.rollouts:
        read = "answers that it sampled itself" if spec.stream is None else f"the stream {spec.data}"
        raise ValueError(f"{name}: was trained on {read}, so no order of stored text says what it read")
    if receipt.identity not in spec.identities:
        raise ValueError(f"{name}: was trained with other settings than those of this configuration")
    if receipt.position is None:
        raise ValueError(f"{name}: its receipt has no position in its data")
    positions = positions_of(receipt.position)
    sources = []
    for dataset, folder in sorted(spec.folders(data).items()):
        split = Shards(folder, "train")
        if split.digest not in positions:
            raise ValueError(f"{folder}: was encoded again since {name} was trained on it")
        ((_, loader, seq_len, rows, _),) = orders([positions[split.digest]], [split])
        sources.append(Source(dataset, split, loader, rows, seq_len))
    if "weights" in receipt.position:
        names = Mixture(receipt.position["weights"], receipt.position.get("switches", ())).names
        sources = [next(one for one in sources if one.dataset == name) for name in names]
    stage = StageOrder(receipt, spec.windows_per_step, sources)
    if stage.first < 0:
        raise ValueError(f"{name}: went on from another training with another batch; its order is not known")
    return stage


def samples_over(source: Source, begin: int, end: int, first: int, last: int) -> np.ndarray:
    """Return the samples from ``first`` to before ``last`` that read any token of a part of the split.

    The part is that from token ``begin`` to before ``end``. The samples rise, (n,) int64.
    """
    loader = source.loader
    found = [np.empty(0, np.int64)]
    for epoch in range(first // loader.windows, -(-last // loader.windows)):
        keys, offset = epoch_keys(loader.order["seed"], epoch)
        if not loader.shuffled:
            offset = epoch * loader.windows * source.seq_len
        placed = _windows_over(source, begin - offset, end - offset)
        if source.rows is not None:
            placed = _rows_over(source.rows, begin, end)
            if not loader.shuffled:
                placed = np.argsort(loader.packed_rows(np.arange(loader.windows)))[placed]
        index = unpermute(placed, loader.windows, keys) if loader.shuffled else placed
        found.append(np.sort(index) + epoch * loader.windows)
    samples = np.concatenate(found)
    return samples[(samples >= first) & (samples < last)]


def _windows_over(source: Source, begin: int, end: int) -> np.ndarray:
    """Return the windows of an epoch that have a token of a part, counted from where the epoch begins."""
    tokens, seq_len = source.split.tokens, source.seq_len
    low = begin % tokens
    # The epoch goes round the ring once and up to a window further.
    spans = []
    for turn in (-tokens, 0, tokens):
        first = max(0, -(-(low + turn) // seq_len) - 1)
        last = min(source.loader.windows - 1, (low + turn + end - begin - 1) // seq_len)
        spans.append(np.arange(first, last + 1))
    return np.unique(np.concatenate(spans))


def _rows_over(rows: PackedRows, begin: int, end: int) -> np.ndarray:
    """Return the numbers of the packed rows that hold any token of a part, (n,) int64."""
    first_P = rows.pieces["first"].astype(np.int64)
    pieces = np.flatnonzero((first_P < end) & (first_P + rows.pieces["length"] > begin))
    return np.unique(np.searchsorted(rows.first, pieces, side="right") - 1)


def unpermute(value: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    """Return the index that `spider.data.loader.permute` maps to each value: (n,) int64."""
    a = np.uint64(math.isqrt(size - 1) + 1)
    b = np.uint64(-(-size // int(a)))
    index = value.astype(np.uint64)
    outside = np.ones(len(index), dtype=bool)
    while outside.any():
        left, right = np.divmod(index[outside], b)
        for i, key in reversed(list(enumerate(keys))):
            if i % 2 == 0:
                left = (left + a - scrambled(right ^ key) % a) % a
            else:
                right = (right + b - scrambled(left ^ key) % b) % b
        index[outside] = left * b + right
        outside = index >= size
    return index.astype(np.int64)


def _spans(source: Source, number: np.ndarray) -> list[tuple[int, int]]:
    """Return the parts of the split that a row consists of."""
    if source.rows is not None:
        pieces = source.rows.spans(source.loader.packed_rows(number)).tolist()
        return [(first, first + length) for first, length in pieces]
    begin = int(source.loader.starts(number)[0])
    end, tokens = begin + source.seq_len + 1, source.split.tokens
    return [(begin, end)] if end <= tokens else [(begin, tokens), (0, end - tokens)]


def logged(metrics: Path) -> dict[int, str]:
    """Return the digest of each step of the run that a stage's ``metrics.jsonl`` has, by step."""
    return {
        step: digest
        for row in read_rows(metrics)
        for step, digest in enumerate(row.batches, start=row.step - len(row.batches) + 1)
    }
