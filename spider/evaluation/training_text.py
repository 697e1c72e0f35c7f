"""The text a model has learned from, found again: what its stages read, and the splits they read it in.

Receipts say how far into the order of windows each stage came, and that order is a pure function of its seed
(`spider.data.loader`), so the windows can be named without having been written down. Their union, in the
order of the split, is what a compressor has to be given for a comparison on equal terms.

What could have been learned from is all that was not held out: of each dataset the ngram split, if it has
one, and then the train split, whether the model has an index or not, for a share of documents that is kept
for one makes no less text of the corpus. What was learned from is the windows, behind the ngram splits that
the model looks things up in.

No more than ``limit`` ids are taken of either: of the windows those that were read first, of splits their
beginning. The share that this is stands beside every figure. That a beginning may be of the index alone is
no matter: a hash tells it from the rest, so both are samples of one text, and it is mostly the larger one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spider.checkpoints.records import Receipt
from spider.config import Config
from spider.data.loader import Loader
from spider.data.metadata import load_metadata
from spider.data.packing import PackedRows
from spider.data.shards import Shards
from spider.results import Results
from spider.tokens import Tokens

#: Ids read at a time.
_PIECE = 1 << 22


@dataclass(frozen=True)
class TrainingText:
    """Spans of splits of encoded datasets: ``(shards, first id, end)``, in order, at least one."""

    spans: Sequence[tuple[Shards, int, int]]
    share: float
    """Of what there is."""

    @property
    def vocabulary(self) -> Tokens:
        return self.spans[0][0].vocabulary

    @property
    def size(self) -> int:
        """In ids."""
        return _size(self.spans)

    def pieces(self, overlap: int = 0) -> Iterator[np.ndarray]:
        """Its ids (uint16), some millions at a time, each piece with so many more of what follows it."""
        for shards, begin, end in self.spans:
            for at in range(begin, end, _PIECE):
                yield shards.read(at, min(_PIECE + overlap, end - at))

    def raw(self) -> bytes:
        """Its bytes."""
        return b"".join(self.vocabulary.raw(piece) for piece in self.pieces())


@dataclass(frozen=True)
class LearnedFrom:
    """Where what a model has learned from lies."""

    stages: Sequence[tuple[Path, Path | None]] = ()
    """Receipt, and shards folder (None: a stream), of each of its stages."""
    indexes: Sequence[Path] = ()
    """Shards folders of which the model looks things up in the n-gram index split."""


def learned_from(config: Config, run: str, stage: str) -> LearnedFrom:
    """Of a run up to this stage."""
    results, last = Results(Path(config.results)), config.stage(run, stage).index
    specs = [config.stage(run, one.name) for one in config.run(run).stages[: last + 1]]
    return LearnedFrom(
        [
            (results.stage(run, spec.stage).receipt, None if spec.stream else results.shards(spec.data))
            for spec in specs
        ],
        [results.shards(config.run(run).data)] if config.run(run).model.ngram else [],
    )


def training_texts(
    learned: LearnedFrom, of_stage: int | None, of_split: int | None
) -> tuple[TrainingText | None, TrainingText | None, list[str]]:
    """What was learned from, and all that could have been, no more ids than given; None where that cannot be
    read again, and why."""
    receipts, splits, why = [], [], []
    there: dict[str, Shards] = {}
    for path, folder in learned.stages:
        receipt = Receipt.read(path)
        name = f"{receipt.run}/{receipt.stage}"
        if folder is None:
            why.append(f"{name} was trained on a stream: compressors cannot be given its text")
        elif receipt.position is None:
            why.append(f"{name}: its receipt has no position in its data")
        else:
            try:
                *ngram, split = _not_held_out(folder)
            except ValueError as error:
                why.append(f"the training text of {name} cannot be read: {error}")
                continue
            if split.digest != receipt.position["data"]:
                why.append(f"the training text of {name} was encoded anew since: {folder}")
            else:
                receipts.append(receipt)
                splits.append(split)
                there |= {one.digest: one for one in (*ngram, split)}
    indexes = []
    for folder in learned.indexes:
        try:
            indexes.append(Shards(folder, "ngram"))
        except ValueError as error:
            why.append(f"the text of the n-gram index cannot be read: {error}")
    if why or not splits:
        return None, None, why or ["what the model was trained on is unknown: compressors alone"]
    there = {one.digest: one for one in indexes} | there
    return of_stages(receipts, splits, of_stage, indexes), of_splits(list(there.values()), of_split), []


def _not_held_out(folder: Path) -> list[Shards]:
    """The splits of a dataset that may be learned from, the last of them the one that is trained on."""
    names = load_metadata(folder).splits
    return [Shards(folder, name) for name in ("ngram", "train") if name == "train" or name in names]


def of_splits(splits: Sequence[Shards], limit: int | None) -> TrainingText:
    """All of them, or the beginning."""
    spans = _beginning(splits, limit)
    return TrainingText(spans, _size(spans) / sum(split.tokens for split in splits))


def of_stages(
    receipts: Sequence[Receipt], splits: Sequence[Shards], limit: int | None, indexes: Sequence[Shards] = ()
) -> TrainingText:
    """All of these indexes, and the windows that these stages read, each from its own split; or the first.

    The receipts have positions in these splits.
    """
    orders: dict[tuple[str, int, int, bool], tuple[Shards, int]] = {}
    for receipt, split in zip(receipts, splits, strict=True):
        assert receipt.position is not None, "the caller asks for no other"
        position = receipt.position
        order = split.digest, position["seq_len"], position["seed"], "packing" in position
        _, before = orders.get(order, (split, 0))
        orders[order] = split, max(before, position["sample"])  # a stage may go on where one stopped
    spans = _beginning(indexes, limit)
    there = sum(index.tokens for index in indexes)
    room = None if limit is None else limit - _size(spans)
    for (_, seq_len, seed, packed), (split, samples) in orders.items():
        rows = PackedRows.open(split.files[0].parents[1], split, seq_len) if packed else None
        windows = rows.count if rows else -(-split.tokens // seq_len)
        there += min(split.tokens, samples * seq_len)
        # Once all windows were read, all of the split was: no more than an epoch has to be looked at.
        count = min(samples, windows) if room is None else min(samples, windows, room // seq_len)
        spans += _seen(split, seq_len, seed, count, rows)
        room = None if room is None else room - count * seq_len
    return TrainingText(spans, min(1.0, _size(spans) / there))


def _seen(
    split: Shards, seq_len: int, seed: int, count: int, rows: PackedRows | None
) -> list[tuple[Shards, int, int]]:
    """The union of the first windows of an order, or of its packed rows, as spans of the split."""
    loader = Loader(split, seq_len=seq_len, rows=1, seed=seed, packed=rows)
    if rows:
        pieces = np.sort(rows.spans(loader.packed_rows(np.arange(count))), order="first")
        begins = pieces["first"].astype(np.int64)
        ends = begins + pieces["length"]
    else:
        begins = np.sort(loader.starts(np.arange(count)))
        ends = begins + seq_len + 1
    round_the_ring = np.maximum(0, ends - split.tokens).max(initial=0)
    begins, ends = np.append(0, begins), np.append(round_the_ring, np.minimum(ends, split.tokens))
    first = np.append(True, begins[1:] > np.maximum.accumulate(ends)[:-1])
    last = np.append(np.flatnonzero(first)[1:], len(begins)) - 1
    reach = np.maximum.accumulate(ends)[last]
    return [(split, int(a), int(b)) for a, b in zip(begins[first], reach, strict=True) if b > a]


def _beginning(splits: Sequence[Shards], limit: int | None) -> list[tuple[Shards, int, int]]:
    """All of the splits, or the beginning, as spans."""
    spans, room = [], limit
    for split in splits:
        count = split.tokens if room is None else min(room, split.tokens)
        spans.append((split, 0, count))
        room = None if room is None else room - count
    return spans


def _size(spans: Sequence[tuple[Shards, int, int]]) -> int:
    return sum(end - begin for _, begin, end in spans)
