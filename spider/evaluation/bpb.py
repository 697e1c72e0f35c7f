"""Measure bits per byte of a model on a token stream. Every report of Spider uses this one definition.

    bpb        = nats of targets that stand for text    / (ln 2 * bytes they stand for)
    bpb_strict = the same, plus those of EOS and BOS    / (ln 2 * bytes they stand for)

The vocabulary says how many bytes an id stands for, so models of different vocabularies are comparable.

There are two figures of a model, which differ in what it may read before a byte:

    each document alone       windows begin at each document's BOS
    with what came before     windows run over the bounds of documents, and the n-gram index looks back on
                              earlier documents of the text (``Scoring.carry_over``)

A window of ``seq_len`` targets slides over each document, or over all of them, back to back as in training.
In each window but the first, the first ``overlap`` share is context only, so that no byte is predicted
without context just because a window begins there. Every target is scored exactly once:

    targets    0 ........................................ M-1
    window 0   [SSSSSSSSSSSS]                               S scored, c context only, p padding
    window 1         [ccccccSSSSSS]
    window 2               [ccccccSSSSSS]
    window 3                     [ccccccSSSpp]

The stream begins with BOS, which is not scored. More overlap costs more compute (a share of 0.5 reads the
text twice) and lowers bpb slightly: quote it beside the number.

The loss is computed here, from the model's logits, so it does not depend on a family's own loss. `Score`
states how far the probabilities of all ids are from a sum of one, at the position where they are farthest.
Nats leave the device as fp32 and are summed on the host in float64.

Shape suffixes: N tokens of the stream, B windows of a batch, T targets of a window, S scored targets of a
batch, V ids of the vocabulary.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spider.common.formatting import Pace
from spider.model.interface import Model
from spider.model.layers import wide
from spider.model.reading import Scoring
from spider.tokens import BYTES, IGNORED, Tokens

if TYPE_CHECKING:
    from spider.data.ngram.lookup import NgramLookup

log = logging.getLogger(__name__)

#: Kinds of targets: text, the ends and beginnings of documents, other special ids.
KINDS = ("byte", "eos", "bos", "other")

#: Largest deviation of the sum of a distribution from one.
TOLERANCE = 1e-4
#: Most bytes of the logits of a batch.
_LOGITS = 1 << 30

#: Cause of a loss that is not finite, for a model that does not learn while it is scored.
DIVERGED = "its weights have diverged"


@dataclass(frozen=True)
class Score:
    """Nats and counts of the scored targets, by `KINDS`."""

    nats: dict[str, float]
    counts: dict[str, int]
    """Number of targets; for ``byte``, the bytes that they stand for."""
    seconds: float
    tokens_N: np.ndarray
    """The stream."""
    vocabulary: Tokens
    by_target_S: np.ndarray
    """Nats of each target, in order: (N - 1,) float32."""
    deviation: float
    """Largest deviation from one, over all targets, of the sum of the probabilities of all ids."""
    metrics: dict[str, float]
    """The model's own metrics (patches, loops, ...), averaged over windows."""

    @property
    def bpb(self) -> float:
        return self.nats["byte"] / (math.log(2) * self.counts["byte"])

    @property
    def bpb_strict(self) -> float:
        nats = self.nats["byte"] + self.nats["eos"] + self.nats["bos"]
        return nats / (math.log(2) * self.counts["byte"])

    @property
    def bits_B(self) -> np.ndarray:
        """Return the bits of each byte of text: (bytes,) float64. The bytes of a token share its bits."""
        bytes_S = self.vocabulary.bytes_of[self.tokens_N[1:]].astype(np.int64)
        bits_S = self.by_target_S / math.log(2) / np.maximum(1, bytes_S)
        return np.repeat(bits_S.astype(np.float64), bytes_S)

    @property
    def document_bits(self) -> list[float]:
        """Return the bits of the text of each document."""
        is_text_S = self.vocabulary.bytes_of[self.tokens_N[1:]] > 0
        return [round(bits, 3) for bits in self._by_document(self._bits_S * is_text_S).tolist()]

    def intervals(self, bytes_D: np.ndarray | None = None) -> dict[str, tuple[float, float]]:
        """Return the intervals of bpb and bpb_strict over documents, by name; none for a single document.

        Args:
            bytes_D: Bytes of each document (default: those that its ids stand for).
        """
        target_S, tokens = self.tokens_N[1:], self.vocabulary
        is_text_S = tokens.bytes_of[target_S] > 0
        if bytes_D is None:
            bytes_D = self._by_document(tokens.bytes_of[target_S])
        counted = {"bpb": is_text_S, "bpb_strict": is_text_S | np.isin(target_S, [tokens.bos, tokens.eos])}
        found = {
            name: bootstrap_interval(self._by_document(self._bits_S * counted_S), bytes_D)
            for name, counted_S in counted.items()
        }
        return {name: interval for name, interval in found.items() if interval is not None}

    @property
    def _bits_S(self) -> np.ndarray:
        return self.by_target_S / math.log(2)

    def _by_document(self, values_S: np.ndarray) -> np.ndarray:
        """Return the sum of some values of targets in each document: (D,)."""
        document_S = np.cumsum(self.tokens_N == self.vocabulary.bos)[1:] - 1
        return np.bincount(document_S, values_S)


#: Resamples of a bootstrap.
RESAMPLES = 1000


def bootstrap_interval(bits_D: np.ndarray, bytes_D: np.ndarray) -> tuple[float, float] | None:
    """Return the 95% percentile interval of bits per byte over resampled documents.

    A resample draws as many documents as there are, with replacement, and divides the sum of their bits by
    the sum of their bytes. The draws depend on the number of documents alone, so two models on one text have
    the same resamples (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).

    Args:
        bits_D: Bits that a model or a compressor spent on each document.
        bytes_D: Bytes of each document.

    Returns:
        The bounds in bits per byte; None for fewer than two documents.
    """
    if len(bits_D) < 2:
        return None
    random = np.random.default_rng(0)
    drawn = (random.integers(len(bits_D), size=len(bits_D)) for _ in range(RESAMPLES))
    low, high = np.percentile([bits_D[i_D].sum() / bytes_D[i_D].sum() for i_D in drawn], [2.5, 97.5])
    return float(low), float(high)


def clip_stream(tokens_N: np.ndarray, max_bytes: int, vocabulary: Tokens = BYTES) -> np.ndarray:
    """Return the shortest prefix of a stream that holds ``max_bytes`` bytes of text, beginning with BOS.

    A stream that starts inside a document gets a BOS in front, so that its first byte is a target as well. A
    stream with fewer bytes is returned whole.
    """
    bytes_N = np.cumsum(vocabulary.bytes_of[tokens_N], dtype=np.int64)
    end = int(np.searchsorted(bytes_N, max_bytes)) + 1
    prefix_N = tokens_N[:end]
    if len(prefix_N) and prefix_N[0] != vocabulary.bos:
        prefix_N = np.concatenate([np.array([vocabulary.bos], prefix_N.dtype), prefix_N])
    return prefix_N


def spans(tokens_N: np.ndarray, reading: Scoring, bos: int) -> np.ndarray:
    """Return the first target of each window, its first scored one, and the end of its text: (3, W)."""
    targets = len(tokens_N) - 1
    begins = {0} if reading.carry_over else {0, *np.flatnonzero(tokens_N[:-1] == bos).tolist()}
    context = reading.seq_len - reading.stride
    found = []
    for begin, end in pairwise([*sorted(begins), targets]):
        more = max(0, math.ceil((end - begin - reading.seq_len) / reading.stride))
        starts = range(begin, begin + more * reading.stride + 1, reading.stride)
        found += [(start, start if start == begin else start + context, end) for start in starts]
    return np.array(found, np.int64).T


def windows(
    tokens_N: np.ndarray, reading: Scoring, vocabulary: Tokens = BYTES, only: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield batches of windows as ``(start_B, inputs_BT, labels_BT)``, int64.

    The labels that are not `IGNORED` are ``tokens_N[1:]`` in order. With ``only``, yield the windows of these
    numbers alone.
    """
    start_W, scored_W, end_W = spans(tokens_N, reading, vocabulary.bos)
    chosen = np.arange(len(start_W)) if only is None else only
    for first in range(0, len(chosen), reading.batch):
        part = chosen[first : first + reading.batch]
        start_B = start_W[part]
        at_BT = start_B[:, None] + np.arange(reading.seq_len)
        inside_BT = at_BT < end_W[part, None]
        scored_BT = inside_BT & (at_BT >= scored_W[part, None])
        at_BT = np.minimum(at_BT, len(tokens_N) - 2)
        inputs_BT = np.where(inside_BT, tokens_N[at_BT], vocabulary.pad).astype(np.int64)
        labels_BT = np.where(scored_BT, tokens_N[at_BT + 1].astype(np.int64), IGNORED)
        yield start_B, inputs_BT, labels_BT


def rows_that_fit(length_R: np.ndarray, vocabulary: Tokens) -> int:
    """Return how many of the first rows may share a batch by the memory of their logits, at least one.

    Args:
        length_R: Lengths of the rows in targets, rising.
    """
    bytes_R = 4 * vocabulary.size * length_R * np.arange(1, len(length_R) + 1)
    return max(1, int(np.searchsorted(bytes_R, _LOGITS, side="right")))


class Learner(Protocol):
    """Changes a model while it is scored, using scored targets only (`spider.evaluation.adapt`)."""

    end: int
    """First target that needs new weights, counted from 0."""
    remedy: str
    """Advice for a loss that is not finite now."""

    def learn(self) -> None:
        """Learn from the targets before ``end``, which are scored by now, and raise ``end``."""
        ...


def score(
    model: Model,
    tokens_N: np.ndarray,
    reading: Scoring,
    *,
    observe: Callable[[Any, np.ndarray], None] | None = None,
    learner: Learner | None = None,
    consume: Callable[[np.ndarray, np.ndarray], None] | None = None,
    lookup: NgramLookup | None = None,
) -> Score:
    """Score every target of a uint16 stream that begins with BOS (see `clip_stream`) exactly once.

    Args:
        model: Scored in evaluation mode on the device of its parameters. Its mode is restored afterwards.
        reading: Windows, loops and precision.
        observe: Called with the ``trace`` of every forward pass and the (B, T) mask of its scored positions.
        learner: Learns between targets. The windows do not change. If weights change within a batch, the
            batch is read again, and the targets scored before keep their nats.
        consume: Called for each batch, in order, with the scored targets (S,) and the logarithms of the
            probabilities of all ids before each of them, (S, V) float32.
        lookup: Replaces the model's own n-gram index.

    Raises:
        ValueError: The stream has only special ids, an id is outside the vocabulary, the loss is not finite,
            or probabilities do not sum to one.
    """
    vocabulary = model.tokens
    _check(tokens_N, vocabulary)
    device = next(model.parameters()).device
    # Tensors that are made in inference mode cannot be used for learning.
    without_gradients = torch.inference_mode if learner is None else torch.no_grad
    nats = np.zeros(len(KINDS))
    counts = np.zeros(len(KINDS))
    sums = defaultdict[str, float](float)
    deviation = 0.0
    rows = 0
    done = 0
    by_target: list[np.ndarray] = []
    began = time.perf_counter()
    most = rows_that_fit(np.full(reading.batch, reading.seq_len), vocabulary)
    if most < reading.batch:
        log.info("scoring %d windows at once, because logits of %d need more memory", most, reading.batch)
        reading = replace(reading, batch=most)
    pace = Pace("scored {done} of {total} ids", len(tokens_N) - 1)
    with reading.of(model):
        for read in ModelInput(model, tokens_N, lookup, carry_over=reading.carry_over).batches(reading):
            scored_BT = read.labels_BT != IGNORED
            label_S = read.labels_BT[scored_BT]
            nats_S = np.zeros(len(label_S))
            at = 0
            weights_changed = True
            while at < len(label_S):
                if learner is not None and learner.end == done + at:
                    learner.learn()
                    weights_changed = True
                if weights_changed:
                    with without_gradients(), reading.precision(device):
                        output = model(
                            read.inputs,
                            n_loops=reading.n_loops,
                            trace=observe is not None,
                            candidates_BTW=read.candidates,
                        )
                        log_p_SV = wide(output.logits)[read.labels != IGNORED].log_softmax(-1)
                    label_S1 = read.labels[read.labels != IGNORED][:, None]
                    nats_S[at:] = -log_p_SV.gather(-1, label_S1)[at:, 0].cpu().numpy()
                    deviation = max(deviation, _deviation(log_p_SV))
                    weights_changed = False
                at = len(label_S) if learner is None else min(len(label_S), learner.end - done)
            if not np.isfinite(nats_S).all():
                at = 1 + done + int(np.argmin(np.isfinite(nats_S)))
                reason = DIVERGED if learner is None else learner.remedy
                raise ValueError(f"the model's loss at token {at} of the stream is not finite: {reason}")
            check_deviation(deviation, "the model")
            if consume is not None:
                consume(label_S, log_p_SV.cpu().numpy())
            bytes_S = vocabulary.bytes_of[label_S]
            kind_S = np.select(
                [bytes_S > 0, label_S == vocabulary.eos, label_S == vocabulary.bos], [0, 1, 2], 3
            )
            nats += np.bincount(kind_S, weights=nats_S, minlength=len(KINDS))
            counts += np.bincount(kind_S, weights=np.maximum(bytes_S, 1), minlength=len(KINDS))
            by_target.append(nats_S.astype(np.float32))
            done += len(label_S)
            pace(done)
            rows += len(read.labels_BT)
            for name, value in output.metrics.items():
                sums[name] += float(value) * len(read.labels_BT)
            if observe is not None:
                observe(output.trace, scored_BT)
    return Score(
        nats=dict(zip(KINDS, nats.tolist(), strict=True)),
        counts=dict(zip(KINDS, counts.astype(int).tolist(), strict=True)),
        seconds=time.perf_counter() - began,
        tokens_N=tokens_N,
        vocabulary=vocabulary,
        by_target_S=np.concatenate(by_target),
        deviation=deviation,
        metrics={name: value / rows for name, value in sums.items()},
    )


def _deviation(log_p_SV: Tensor) -> float:
    """Return the largest deviation of the sums of probabilities from one; infinite if one is not a number."""
    total_S = log_p_SV.exp().sum(-1, dtype=torch.float64)
    return float((total_S - 1).abs().nan_to_num(nan=math.inf).max())


def check_deviation(deviation: float, what: str) -> None:
    """Raise `ValueError` if probabilities of ``what`` do not sum to one."""
    if deviation > TOLERANCE:
        raise ValueError(
            f"the probabilities of {what} sum to one only within {deviation:.1e} (allowed: {TOLERANCE}): "
            "the score would not be a code length"
        )


def _check(tokens_N: np.ndarray, vocabulary: Tokens) -> None:
    outside_N = tokens_N >= vocabulary.size
    if np.any(outside_N):
        at = int(np.argmax(outside_N))
        raise ValueError(
            f"token {at} of the stream is {int(tokens_N[at])}, outside the vocabulary of {vocabulary.size}"
        )
    if not np.any(vocabulary.bytes_of[tokens_N[1:]]):
        raise ValueError("the stream has no byte to score after its first token")


class Batch(NamedTuple):
    """A batch of windows: the labels on the host, and the model's inputs on its device."""

    labels_BT: np.ndarray
    inputs: Tensor
    labels: Tensor
    candidates: Tensor | None
    """Candidates of the n-gram index; None for a model without one."""


class ModelInput:
    """A stream prepared for a model: windows on the model's device, with candidates of its n-gram index.

    The index reads all of each document before. Windows in ascending order are fast.
    """

    #: Ids that the index looks up at once, so that each document is read once and not for every batch.
    AHEAD = 1 << 16

    def __init__(
        self, model: Model, tokens_N: np.ndarray, lookup: NgramLookup | None = None, carry_over: int = 0
    ) -> None:
        """Prepare the stream; ``lookup`` replaces the model's own n-gram index."""
        self.tokens_N = tokens_N
        self.vocabulary = model.tokens
        self.device = next(model.parameters()).device
        self.lookup = lookup or model.lookup
        self.carry_over = carry_over
        self._first = 0
        self._known_NW = np.zeros((0, 0), np.uint8)

    def batches(self, reading: Scoring, start: int = 0, end: int | None = None) -> Iterator[Batch]:
        """Yield the `windows` of the ids from ``start`` to ``end``."""
        for start_B, inputs_BT, labels_BT in windows(self.tokens_N[start:end], reading, self.vocabulary):
            candidates = None
            if self.lookup is not None:
                candidates = self._candidates(self.lookup, start + start_B, reading.seq_len).to(self.device)
            inputs = torch.from_numpy(inputs_BT).to(self.device)
            labels = torch.from_numpy(labels_BT).to(self.device)
            yield Batch(labels_BT, inputs, labels, candidates)

    def evenly(self, reading: Scoring) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return a batch of windows spread evenly over the stream: inputs (B, T), labels, and candidates."""
        total = len(spans(self.tokens_N, reading, self.vocabulary.bos)[0])
        chosen_B = ((np.arange(reading.batch) + 0.5) * total / reading.batch).astype(np.int64)
        ((start_B, inputs_BT, labels_BT),) = windows(self.tokens_N, reading, self.vocabulary, chosen_B)
        candidates_BTW = None
        if self.lookup is not None:
            ends = start_B + reading.seq_len
            pairs = zip(start_B.tolist(), ends.tolist(), strict=True)
            candidates_BTW = np.stack([self._look_up(self.lookup, at, end, end) for at, end in pairs])
        return inputs_BT, labels_BT, candidates_BTW

    def _candidates(self, lookup: NgramLookup, at_B: np.ndarray, T: int) -> Tensor:
        """Return the candidates of the windows that begin at ``at_B``: (B, T, W); zeros in padding."""
        first, end = int(at_B[0]), int(at_B[-1]) + T
        if first < self._first or end > self._first + len(self._known_NW):
            self._first = first
            self._known_NW = self._look_up(lookup, first, max(first + self.AHEAD, end), end)
        return torch.from_numpy(self._known_NW[at_B[:, None] - self._first + np.arange(T)])

    def _look_up(self, lookup: NgramLookup, first: int, last: int, end: int) -> np.ndarray:
        """Return the candidates from ``first`` to ``last``, with zeros up to ``end`` behind the stream."""
        last = min(last, len(self.tokens_N) - 1)
        known_NW = lookup.after(self.tokens_N, first, last, self.carry_over)
        padding_NW = np.zeros((max(0, end - last), lookup.layout.width), np.uint8)
        return np.concatenate([known_NW, padding_NW])
