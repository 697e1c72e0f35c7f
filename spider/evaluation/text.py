"""Define the texts of an evaluation: the held-out text, and what a model has learned from.

The held-out text is the beginning of a validation split, or of each of its groups.

Receipts record how many windows each stage read. The order of windows is a pure function of the seed
(`spider.data.loader`), so the windows are known without a list. Two training texts are found. The *stage's
text* is the union of these windows, in the order of the split, after the n-gram splits that the model looks
up. *All training text* is all text that is not held out. Each dataset adds its ngram split, if it has one,
and then its train split. The ngram split counts for models without an index too: it is part of the corpus.

Either text has at most ``limit`` ids: the windows that were read first, or the beginning of the splits. The
share that this is stands beside every number. A hash assigns documents to splits, so the beginning of the
ngram split is as good a sample as any other.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spider.checkpoints.records import Receipt
from spider.common.record import Record
from spider.common.results import Results
from spider.config import Config
from spider.config.run import EvaluationConfig
from spider.data.loader import Loader
from spider.data.mixture import positions_of
from spider.data.packing import PackedRows
from spider.data.shards import Shards, balanced, load_metadata
from spider.evaluation.bpb import clip_stream
from spider.tokens import BYTES, Tokens

#: Title of the column of scores on the bytes outside the train/test overlap.
OUTSIDE_OVERLAP = "outside overlap"


@dataclass(frozen=True)
class Text:
    """Documents end to end: their bytes (uint8), and the offset of each, followed by the end of the last."""

    bytes_N: np.ndarray
    bounds_D: np.ndarray

    @classmethod
    def of(cls, tokens_N: np.ndarray, vocabulary: Tokens) -> Text:
        """Return the text of a stream of ids. Text before the first BOS counts as a document."""
        ends = np.cumsum(vocabulary.bytes_of[tokens_N], dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        begins = ends[tokens_N == vocabulary.bos]
        raw = np.frombuffer(vocabulary.raw(tokens_N), np.uint8)
        return cls(raw, np.unique(np.concatenate([[0], begins, [total]])))

    def __len__(self) -> int:
        return len(self.bytes_N)

    def documents(self) -> list[bytes]:
        return [self.bytes_N[a:b].tobytes() for a, b in pairwise(self.bounds_D.tolist())]

    @property
    def sha256(self) -> str:
        """Return the digest of all bytes."""
        return hashlib.sha256(self.bytes_N.tobytes()).hexdigest()

    def lengths(self) -> np.ndarray:
        """Return the bytes of each document: (D,)."""
        return np.diff(self.bounds_D)


class Overlap(Record):
    """``overlap/NAME.json``: what of a held-out text also occurs in the training text."""

    WHAT: ClassVar[str] = "a record of overlap"

    text_sha256: str
    edges: tuple[int, ...] = ()
    """Bytes where a match of 50 bytes with the training text begins, and where it ends, in turn."""
    searched: float | None = None
    """Share of the training text that was searched; None if it is unknown."""
    left_out: tuple[str, ...] = ()
    """Why the training text is unknown."""

    def covered(self, size: int) -> np.ndarray:
        """Return which bytes of a text of this size are in a match: (size,) bool."""
        edges_N = np.zeros(size + 1, np.int8)
        edges_N[list(self.edges)] = 1
        return np.cumsum(edges_N)[:-1] % 2 == 1


def holds_out(data: Path) -> bool:
    """Return whether a dataset has a validation text."""
    split = load_metadata(data).splits.get("validation")
    return split is not None and split.bytes > 0


def held_out_text(data: Path, settings: EvaluationConfig) -> Text:
    """Return the text that the models of a stage are scored on; raises as `validation_stream`."""
    stream_N, _ = validation_stream(data, settings.max_bytes, largest_group=settings.largest_group)
    return Text.of(stream_N, BYTES)


def validation_stream(
    data: Path, max_bytes: int, tokens: Tokens = BYTES, largest_group: float | None = None
) -> tuple[np.ndarray, str]:
    """Return the first ``max_bytes`` bytes of a validation split in a model's ids, and the dataset's digest.

    With ``largest_group``, no group has a larger share of the text (`spider.data.shards.balanced`).

    The text is cut in bytes and then encoded, so every vocabulary is scored on the same text. Special ids are
    the same in all vocabularies and are kept. The text of published shards is cut after a whole id and keeps
    its ids, because encoding it again could give other ids.

    Raises:
        ValueError: The dataset does not hold out any text, or too few groups.
    """
    metadata = load_metadata(data)
    if not holds_out(data):
        raise ValueError(
            f"{data}: has no validation text to score; raise `validation` in datasets.{metadata.dataset} "
            "(the share of documents held out) and encode again"
        )
    vocabulary = metadata.vocabulary
    if largest_group is None:
        shards = Shards(data, "validation")
        # A document of n bytes has n + 2 ids at most, and none is empty: three ids a byte suffice.
        count = min(shards.tokens, 3 * max_bytes)
        stream_N = clip_stream(np.asarray(shards.read(0, count)), max_bytes, vocabulary)
    else:
        stream_N, _ = balanced(data, max_bytes, largest_group)
    if vocabulary.digest == tokens.digest and (vocabulary.digest is None or metadata.imported):
        return stream_N, metadata.digest
    left = len(vocabulary.raw(stream_N)) if metadata.imported else max_bytes
    return _encoded(stream_N, vocabulary, tokens, left), metadata.digest


def _encoded(stream_N: np.ndarray, vocabulary: Tokens, tokens: Tokens, left: int) -> np.ndarray:
    """Return a stream's first ``left`` bytes of text in the ids of ``tokens``, with its special ids."""
    pieces = []
    for run_N in np.split(stream_N, np.flatnonzero(np.diff(vocabulary.bytes_of[stream_N] > 0)) + 1):
        text = vocabulary.raw(run_N)[:left]
        left -= len(text)
        pieces.append(tokens.encode(text)[1:-1] if text else run_N)
    return np.concatenate(pieces)


#: The share of a text that its sample has, and that of its documents.
_SAMPLE, _SAMPLED = 20, 4


def beginnings(tokens_N: np.ndarray, tokens: Tokens, *, whole_ids: bool) -> np.ndarray:
    """Return a sample of a stream: the beginnings, equally long, of every fourth document.

    Together they have at most a twentieth of the bytes. They are cut in bytes, as by `validation_stream`, so
    every vocabulary has the same sample; with ``whole_ids`` they are cut after an id.
    """
    documents = np.split(tokens_N, np.flatnonzero(tokens_N == tokens.bos)[1:])[::_SAMPLED]
    bytes_D = np.array([tokens.bytes_of[one_N].sum(dtype=np.int64) for one_N in documents])
    most = max(1, int(tokens.bytes_of[tokens_N].sum(dtype=np.int64)) // _SAMPLE)
    length = bisect_right(range(1, most + 1), most, key=lambda n: int(np.minimum(bytes_D, n).sum()))
    cut = [clip_stream(one_N, max(1, length), tokens) for one_N in documents]
    if not whole_ids:
        cut = [_encoded(one_N, tokens, tokens, max(1, length)) for one_N in cut]
    return np.concatenate(cut)


#: Ids that are read at a time.
_PIECE = 1 << 22

#: A part of a split: ``(shards, first id, end)``.
Span = tuple[Shards, int, int]


@dataclass(frozen=True)
class TrainingText:
    """Spans of encoded datasets, in order. There is at least one."""

    spans: Sequence[Span]
    share: float
    """Share of the whole text, before the limit."""

    @property
    def vocabulary(self) -> Tokens:
        return self.spans[0][0].vocabulary

    @property
    def size(self) -> int:
        """Return the number of ids."""
        return _size(self.spans)

    def pieces(self, overlap: int = 0) -> Iterator[np.ndarray]:
        """Yield the ids (uint16), some millions at a time, each piece with ``overlap`` ids of the next."""
        for shards, begin, end in self.spans:
            for at in range(begin, end, _PIECE):
                yield shards.read(at, min(_PIECE + overlap, end - at))

    def raw(self, boundary: bytes = b"") -> bytes:
        """Return the bytes, with a boundary before each document."""
        vocabulary = self.vocabulary
        pieces = (np.split(piece, np.flatnonzero(piece == vocabulary.bos)) for piece in self.pieces())
        return b"".join(boundary.join(map(vocabulary.raw, documents)) for documents in pieces)


@dataclass(frozen=True)
class LearnedFrom:
    """Paths of the data that a model has learned from."""

    stages: Sequence[tuple[Path, Path | None]] = ()
    """Receipt and shards folder of each stage, of a mixture once for each dataset; None for a stream."""
    indexes: Sequence[Path] = ()
    """Shards folders whose ngram split the model looks up."""
    split_index: Path | None = None
    """The n-gram index without the train split; None for a model without an index."""


def learned_from(config: Config, run: str, stage: str) -> LearnedFrom:
    """Return the data that a run has learned from by the end of a stage."""
    results = Results(Path(config.results))
    settings = config.run(run)
    last = config.stage(run, stage).index
    specs = [config.stage(run, one.name) for one in settings.stages[: last + 1]]
    return LearnedFrom(
        stages=[
            (results.stage(run, spec.stage).receipt, None if spec.stream else results.shards(name))
            for spec in specs
            for name in spec.weights
        ],
        indexes=[results.shards(settings.dataset)] if settings.model.ngram else [],
        split_index=(
            results.ngram(settings.dataset, settings.model.ngram.counted, "split")
            if settings.model.ngram
            else None
        ),
    )


def all_text(learned: LearnedFrom, limit: int | None) -> tuple[TrainingText | None, list[str]]:
    """Return the first ``limit`` ids of all text that is not held out, or None and the reasons."""
    splits: dict[str, Shards] = {}
    reasons: list[str] = []
    for index in learned.indexes:
        with _explained("the text of the n-gram index", reasons):
            splits |= {(one := Shards(index, "ngram")).digest: one}
    for path, folder in learned.stages:
        name = f"{path.parent.parent.name}/{path.parent.name}"
        if folder is None:
            reasons.append(f"{name} was trained on a stream: compressors cannot be given its text")
            continue
        with _explained(f"the training text of {name}", reasons):
            splits |= {one.digest: one for one in _not_held_out(folder)}
    if reasons or not splits:
        return None, reasons or ["what the model was trained on is unknown: compressors alone"]
    return of_splits(list(splits.values()), limit), []


def stage_text(learned: LearnedFrom, limit: int | None) -> tuple[TrainingText | None, list[str]]:
    """Return the first ``limit`` ids that the stages have read, or None and the reasons."""
    _, reasons = all_text(learned, limit)
    if reasons:
        return None, reasons
    positions: list[dict[str, Any]] = []
    splits: list[Shards] = []
    for path, folder in learned.stages:
        assert folder is not None, "a stream is a reason"
        receipt = Receipt.read(path)
        name = f"{receipt.run}/{receipt.stage}"
        *_, split = _not_held_out(folder)
        if receipt.position is None:
            reasons.append(f"{name}: its receipt has no position in its data")
        elif position := positions_of(receipt.position).get(split.digest):
            positions.append(position)
            splits.append(split)
        else:
            reasons.append(f"the training text of {name} was encoded again since: {folder}")
    indexes = [Shards(folder, "ngram") for folder in learned.indexes]
    return (None if reasons else of_stages(positions, splits, limit, indexes)), reasons


@contextmanager
def _explained(what: str, reasons: list[str]) -> Iterator[None]:
    """Add a `ValueError` to the reasons why a text is missing."""
    try:
        yield
    except ValueError as error:
        reasons.append(f"{what} cannot be read: {error}")


def _not_held_out(folder: Path) -> list[Shards]:
    """Return the splits of a dataset that models may learn from; the last one is the train split."""
    names = load_metadata(folder).splits
    return [Shards(folder, name) for name in ("ngram", "train") if name == "train" or name in names]


def of_splits(splits: Sequence[Shards], limit: int | None) -> TrainingText:
    """Return the first ``limit`` ids of splits."""
    spans = _beginning(splits, limit)
    return TrainingText(spans, _size(spans) / sum(split.tokens for split in splits))


def of_stages(
    positions: Sequence[dict[str, Any]],
    splits: Sequence[Shards],
    limit: int | None,
    indexes: Sequence[Shards] = (),
) -> TrainingText:
    """Return the text of these indexes and of the windows before these positions, each in its own split."""
    spans = _beginning(indexes, limit)
    if limit is not None:
        limit -= _size(spans)
    total = sum(index.tokens for index in indexes)
    for split, loader, seq_len, rows, samples in orders(positions, splits):
        total += min(split.tokens, samples * seq_len)
        # One epoch reads the whole split, so later windows add nothing.
        count = min(samples, loader.windows)
        if limit is not None:
            count = min(count, limit // seq_len)
            limit -= count * seq_len
        spans += _windows_read(split, loader, seq_len, count, rows)
    return TrainingText(spans, min(1.0, _size(spans) / total))


class Order(NamedTuple):
    """An order in which a model has read a split, and how many of its windows."""

    split: Shards
    loader: Loader
    seq_len: int
    rows: PackedRows | None
    """The plan of packed rows; None for windows of the ring."""
    samples: int


def orders(positions: Sequence[dict[str, Any]], splits: Sequence[Shards]) -> Iterator[Order]:
    """Yield the orders that these positions, each in its own split, belong to."""
    found: dict[tuple[str, int, int, bool, bool], tuple[Shards, int]] = {}
    for position, split in zip(positions, splits, strict=True):
        ways = "packing" in position, "order" not in position
        order = (split.digest, position["seq_len"], position["seed"], *ways)
        _, before = found.get(order, (split, 0))
        found[order] = (split, max(before, position["sample"]))  # a stage may continue the order of another
    for (_, seq_len, seed, packed, shuffled), (split, samples) in found.items():
        rows = PackedRows.open(split.files[0].parents[1], split, seq_len) if packed else None
        loader = Loader(split, seq_len=seq_len, rows=1, seed=seed, packed=rows, shuffled=shuffled)
        yield Order(split, loader, seq_len, rows, samples)


def _windows_read(
    split: Shards, loader: Loader, seq_len: int, count: int, rows: PackedRows | None
) -> list[Span]:
    """Return the union of the first windows of an order, or of its packed rows, as spans of the split."""
    if rows:
        pieces = np.sort(rows.spans(loader.packed_rows(np.arange(count))), order="first")
        begins = pieces["first"].astype(np.int64)
        ends = begins + pieces["length"]
    else:
        begins = np.sort(loader.starts(np.arange(count)))
        ends = begins + seq_len + 1
    # A window that reaches over the end of the split continues at its beginning.
    wrapped = np.maximum(0, ends - split.tokens).max(initial=0)
    begins = np.append(0, begins)
    ends = np.append(wrapped, np.minimum(ends, split.tokens))
    reach = np.maximum.accumulate(ends)
    first = np.append(True, begins[1:] > reach[:-1])
    last = np.append(np.flatnonzero(first)[1:], len(begins)) - 1
    return [(split, int(a), int(b)) for a, b in zip(begins[first], reach[last], strict=True) if b > a]


def _beginning(splits: Sequence[Shards], limit: int | None) -> list[Span]:
    """Return the first ``limit`` ids of splits as spans."""
    spans = []
    for split in splits:
        count = split.tokens if limit is None else min(limit, split.tokens)
        spans.append((split, 0, count))
        limit = None if limit is None else limit - count
    return spans


def _size(spans: Sequence[Span]) -> int:
    return sum(end - begin for _, begin, end in spans)
