"""Bits per byte of a model on a token stream: the one definition every report of Spider uses.

    bpb        = nats of targets that stand for text    / (ln 2 * bytes they stand for)
    bpb_strict = the same, and those of EOS and BOS     / (ln 2 * bytes they stand for)

How many bytes an id stands for is the vocabulary's to say, so that models of different vocabularies compare.

Documents stand back to back in the stream, as in training, and a window of ``seq_len`` targets slides over
it. Each window but the first spends its first ``overlap`` share on context alone, so that no byte is
predicted from an empty past merely because a window began there. Every target is scored exactly once:

    targets    0 ........................................ M-1
    window 0   [SSSSSSSSSSSS]                               S scored, c context only, p padding
    window 1         [ccccccSSSSSS]
    window 2               [ccccccSSSSSS]
    window 3                     [ccccccSSSpp]

The stream begins with BOS, which is given and not scored. More overlap costs more compute (a share of 0.5
reads the text twice) and lowers bpb slightly: quote it beside the figure. Nats leave the device as fp32 and
are summed on the host in float64.

Shape suffixes: N tokens of the stream, B windows of a batch, T targets of a window.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spider.model.interface import Model
from spider.tokens import BYTES, IGNORED, Tokens

if TYPE_CHECKING:
    from spider.ngram.lookup import NgramLookup

#: Kinds of targets: text, the ends and beginnings of documents, other special ids.
KINDS = ("byte", "eos", "bos", "other")

#: Why a loss is not finite.
DIVERGED = "its weights have diverged"


@dataclass(frozen=True)
class Score:
    """Nats and counts of the scored targets, by `KINDS`, and what they come to."""

    nats: dict[str, float]
    counts: dict[str, int]
    """Targets; for ``byte`` the bytes that they stand for."""
    seconds: float
    by_target_S: np.ndarray
    """Nats of each target, in order: (N - 1,) float32."""
    metrics: dict[str, float]
    """The model's own figures (patches, loops, ...), averaged over windows."""

    @property
    def bpb(self) -> float:
        return self.nats["byte"] / (math.log(2) * self.counts["byte"])

    @property
    def bpb_strict(self) -> float:
        nats = self.nats["byte"] + self.nats["eos"] + self.nats["bos"]
        return nats / (math.log(2) * self.counts["byte"])


def clip_stream(tokens_N: np.ndarray, max_bytes: int, vocabulary: Tokens = BYTES) -> np.ndarray:
    """The shortest prefix with ``max_bytes`` bytes of text (all where there are fewer), beginning with BOS.

    A stream that starts inside a document gets a BOS in front, so that its first byte is a target as well and
    the scored bytes are all the bytes there are.
    """
    bytes_N = np.cumsum(vocabulary.bytes_of[tokens_N], dtype=np.int64)
    end = int(np.searchsorted(bytes_N, max_bytes)) + 1
    prefix_N = tokens_N[:end]
    if len(prefix_N) and prefix_N[0] != vocabulary.bos:
        prefix_N = np.concatenate([np.array([vocabulary.bos], prefix_N.dtype), prefix_N])
    return prefix_N


def count_windows(ids: int, seq_len: int, overlap: float) -> int:
    """Windows in which a stream of so many ids is read."""
    stride = seq_len - int(seq_len * overlap)
    return 1 + max(0, -(-(ids - 1 - seq_len) // stride)) if ids > 1 else 0


def windows(
    tokens_N: np.ndarray,
    seq_len: int,
    overlap: float,
    batch: int,
    pad: int = BYTES.pad,
    only: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of ``(inputs_BT, labels_BT)``, int64; over all of them the labels that are not `IGNORED` are
    exactly ``tokens_N[1:]``, in order; with ``only``, those of the windows of these numbers."""
    assert seq_len >= 1 and batch >= 1 and 0 <= overlap < 1, "checked where they are set"
    targets = len(tokens_N) - 1
    context = int(seq_len * overlap)
    stride = seq_len - context
    chosen = np.arange(count_windows(len(tokens_N), seq_len, overlap)) if only is None else only
    column_T = np.arange(seq_len)
    for first in range(0, len(chosen), batch):
        start_B1 = chosen[first : first + batch, None] * stride
        at_BT = start_B1 + column_T
        inside_BT = at_BT < targets
        scored_BT = inside_BT & ((column_T >= context) | (start_B1 == 0))
        at_BT = np.minimum(at_BT, targets - 1)
        inputs_BT = np.where(inside_BT, tokens_N[at_BT], pad).astype(np.int64)
        labels_BT = np.where(scored_BT, tokens_N[at_BT + 1].astype(np.int64), IGNORED)
        yield inputs_BT, labels_BT


class Learner(Protocol):
    """What changes a model while it is scored, by nothing but what was scored (`spider.evaluation.adapt`)."""

    end: int
    """The first target that is not to be scored with the weights as they are, counted from 0."""
    remedy: str
    """For a loss that is not finite now."""

    def learn(self) -> bool:
        """Called when all targets before ``end`` are scored, which then rises: whether it changed weights."""
        ...


def score(
    model: Model,
    tokens_N: np.ndarray,
    *,
    seq_len: int,
    overlap: float = 0.5,
    batch: int = 16,
    n_loops: int | None = None,
    autocast: bool = False,
    observe: Callable[[Any, np.ndarray], None] | None = None,
    learner: Learner | None = None,
) -> Score:
    """Score every target of a uint16 stream that begins with BOS (see `clip_stream`) exactly once.

    Args:
        model: scored in evaluation mode, on the device of its parameters, and left in the mode it came in.
        seq_len: window, in targets.
        overlap: share of a window that is context only.
        n_loops: recurrent depth (None: the model's own).
        autocast: run the forward in bf16 autocast; the loss should stay fp32 in the model.
        observe: called with the ``trace`` of every forward (the model is then asked for one) and the (B, T)
            mask of the positions whose targets were scored in it.
        learner: learns between targets. The windows stay as they are: a batch in which weights change is read
            once more, and what was scored before stands.

    Raises:
        ValueError: no byte to score, an id outside the vocabulary, or a loss that is not finite.
    """
    vocabulary, device = model.tokens, next(model.parameters()).device
    _check(tokens_N, vocabulary)
    how: dict[str, Any] = {"n_loops": n_loops, "reduction": "none"}
    how |= {"trace": True} if observe is not None else {}
    # What is read in inference mode could not be learned from.
    without_gradients = torch.inference_mode if learner is None else torch.no_grad
    nats, counts, sums = np.zeros(len(KINDS)), np.zeros(len(KINDS)), defaultdict[str, float](float)
    done = rows = 0
    by_target: list[np.ndarray] = []
    was_training = model.training
    model.eval()
    began = time.perf_counter()
    try:
        for labels_BT, read, given in Reading(model, tokens_N).batches(seq_len, overlap, batch):
            scored_BT = labels_BT != IGNORED
            label_S = labels_BT[scored_BT]
            nats_S, at, S, unread = np.zeros(len(label_S)), 0, len(label_S), True
            while at < S:
                if learner is not None and learner.end == done + at:
                    unread |= learner.learn()
                if unread:
                    with without_gradients(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                        output = model(*read, **how, **given)
                    nats_S[at:] = output.loss.float().cpu().numpy()[scored_BT][at:]
                at, unread = S if learner is None else min(S, learner.end - done), False
            if not np.isfinite(nats_S).all():
                at = 1 + done + int(np.argmin(np.isfinite(nats_S)))
                why = learner.remedy if learner is not None else DIVERGED
                raise ValueError(f"the model's loss at token {at} of the stream is not finite: {why}")
            bytes_S = vocabulary.bytes_of[label_S]
            kind_S = np.select(
                [bytes_S > 0, label_S == vocabulary.eos, label_S == vocabulary.bos], [0, 1, 2], 3
            )
            nats += np.bincount(kind_S, weights=nats_S, minlength=len(KINDS))
            counts += np.bincount(kind_S, weights=np.maximum(bytes_S, 1), minlength=len(KINDS))
            done += S
            by_target.append(nats_S.astype(np.float32))
            rows += len(labels_BT)
            for name, value in output.metrics.items():
                sums[name] += float(value) * len(labels_BT)
            if observe is not None:
                observe(output.trace, scored_BT)
    finally:
        model.train(was_training)
    return Score(
        nats=dict(zip(KINDS, nats.tolist(), strict=True)),
        counts=dict(zip(KINDS, counts.astype(int).tolist(), strict=True)),
        seconds=time.perf_counter() - began,
        by_target_S=np.concatenate(by_target),
        metrics={name: value / rows for name, value in sums.items()},
    )


def _check(tokens_N: np.ndarray, vocabulary: Tokens) -> None:
    if np.any(foreign_N := tokens_N >= vocabulary.size):
        at = int(np.argmax(foreign_N))
        raise ValueError(
            f"token {at} of the stream is {int(tokens_N[at])}, outside the vocabulary of {vocabulary.size}"
        )
    if not np.any(vocabulary.bytes_of[tokens_N[1:]]):
        raise ValueError("there is nothing to score: the stream holds no byte after its first token")


class Reading:
    """A stream as a model reads it: its windows, on the model's device, with what an index proposes."""

    def __init__(self, model: Model, tokens_N: np.ndarray, lookup: NgramLookup | None = None) -> None:
        """Of another memory than the model's own, where its ``lookup`` is given."""
        self.tokens_N, self.pad = tokens_N, model.tokens.pad
        self.device = next(model.parameters()).device
        lookup = lookup or model.lookup
        self.candidates = _Candidates(lookup, tokens_N) if lookup else None

    def batches(
        self, seq_len: int, overlap: float, batch: int, start: int = 0, end: int | None = None
    ) -> Iterator[tuple[np.ndarray, tuple[Tensor, Tensor], dict[str, Tensor]]]:
        """`windows` of the ids ``start`` to ``end``: labels (B, T), ids and labels as the model is given
        them, and what it is given beside."""
        stride, at, given = seq_len - int(seq_len * overlap), start, dict[str, Tensor]()
        for inputs_BT, labels_BT in windows(self.tokens_N[start:end], seq_len, overlap, batch, self.pad):
            if self.candidates:
                at_B = at + stride * np.arange(len(inputs_BT))
                given = {"candidates_BTW": self.candidates.windows(at_B, seq_len).to(self.device)}
            at += stride * len(inputs_BT)
            inputs, labels = (torch.from_numpy(ids_BT).to(self.device) for ids_BT in (inputs_BT, labels_BT))
            yield labels_BT, (inputs, labels), given

    def spread(
        self, seq_len: int, overlap: float, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """So many of its `windows`, evenly over the stream: ids (B, T), labels, and what is proposed."""
        stride, known = seq_len - int(seq_len * overlap), count_windows(len(self.tokens_N), seq_len, overlap)
        chosen_B = ((np.arange(count) + 0.5) * known / count).astype(np.int64)
        (found,) = windows(self.tokens_N, seq_len, overlap, count, self.pad, chosen_B)
        if self.candidates is None:
            return *found, None
        alone = [self.candidates.window(at, seq_len) for at in (stride * chosen_B).tolist()]
        return *found, np.stack(alone)


class _Candidates:
    """What an index proposes in windows of a stream, by the whole of each document before; quick where they
    rise."""

    #: Ids looked up in one go: each document is read once and not for every batch.
    AHEAD = 1 << 16

    def __init__(self, lookup: NgramLookup, tokens_N: np.ndarray) -> None:
        self.lookup, self.tokens_N = lookup, tokens_N
        self.first, self.known_NW = 0, np.zeros((0, lookup.layout.width), np.uint8)

    def window(self, at: int, T: int) -> np.ndarray:
        """Of one window alone, whatever comes before and after: (T, W)."""
        end = min(at + T, len(self.tokens_N) - 1)
        known_TW = np.zeros((T, self.lookup.layout.width), np.uint8)
        known_TW[: end - at] = self.lookup.after(self.tokens_N, at, end)
        return known_TW

    def windows(self, at_B: np.ndarray, T: int) -> torch.Tensor:
        """Of windows that begin there: (B, T, W); zeros in padding."""
        first, end = int(at_B[0]), int(at_B[-1]) + T
        if first < self.first or end > self.first + len(self.known_NW):
            last = min(max(first + self.AHEAD, end), len(self.tokens_N) - 1)
            padding_NW = np.zeros((max(0, end - last), self.lookup.layout.width), np.uint8)
            self.first = first
            self.known_NW = np.concatenate([self.lookup.after(self.tokens_N, first, last), padding_NW])
        return torch.from_numpy(self.known_NW[at_B[:, None] - self.first + np.arange(T)])


def bits_by_byte(score: Score, tokens_N: np.ndarray, vocabulary: Tokens) -> np.ndarray:
    """Bits that each byte of a scored stream cost, a token's shared among its bytes: (bytes,) float64."""
    bytes_S = vocabulary.bytes_of[tokens_N[1:]].astype(np.int64)
    bits_S = score.by_target_S / math.log(2) / np.maximum(1, bytes_S)
    return np.repeat(bits_S.astype(np.float64), bytes_S)
