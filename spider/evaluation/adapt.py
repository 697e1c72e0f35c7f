"""Measure test-time training: bits per byte of a model that learns from the text while it is scored.

The stream is scored as `spider.evaluation.bpb` scores it, chunk by chunk. Once all targets of a chunk are
scored, the model learns from it::

    chunk 0: score | SGD on it | chunk 1: score | SGD on it | chunk 2: score ...

So the sum is the code length of the text under one probability model. Four properties make it one
(parameter-golf, issue 1017). A target is predicted from the trained weights and earlier ids alone. The
prediction is a distribution over the whole vocabulary. It is made before anything is learned from the
target. The text is read in one pass from left to right.

The score does not depend on the length of the stream or on the batch size: rates are constant, and chunks
and windows begin at fixed positions. A batch that reaches over the end of a chunk is read again with the new
weights, and only its targets after that end are used. With a rate of 0 the nats equal those of `score`.

A chunk may be shorter than a window, which it divides. Windows then slide by a chunk, so each window scores
its last chunk, and the model learns from a chunk with the window before its end as context.

``next_token``: SGD with momentum takes one step for each window of ``seq_len`` ids, on the sum of its nats
divided by ``seq_len`` (or by the chunk, if that is shorter). So the shorter window at the end of a chunk
counts less.

``projection``: no label is used. With the states h of the S tokens of a chunk before the head, a layer's
feed-forward computes z W^T of them, where W is its output matrix. One step lowers the mean of
|z W^T - h|^2 / 2::

    W <- W - lr (z W^T - h)^T z / S

``reset: window`` restores the weights before each window, and learns again from the chunks that it has
before its last one. Nothing then remains of earlier windows.

The model stays in evaluation mode: it adds no noise and runs all of its loops. Its ``after_step``, which
would balance experts, is never called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from spider.config import TTTConfig
from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import DIVERGED, Batch, ModelInput, Score, score
from spider.evaluation.measures import Subject
from spider.evaluation.result import BITS, Number, Result, Row
from spider.model.interface import Model
from spider.model.layers import wide
from spider.model.reading import Scoring
from spider.processes.device import make_deterministic
from spider.tokens import IGNORED

#: Momentum of SGD, which continues from chunk to chunk, and the largest norm of its gradient.
MOMENTUM = 0.9
CLIP = 1.0


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the score of a model that learns from the text; None without ``ttt`` in the configuration."""
    if settings.ttt is None:
        return None
    adapted = adapt(subject.model, subject.tokens_N, settings.ttt, subject.carrying)
    row = Row(
        name="ttt/bpb",
        label="with test-time training",
        value=None,
        carried=Number(value=adapted.bpb, unit=BITS),
        unit=BITS,
        better="lower",
        note="Bits per byte if the model learns from the text while it reads it",
    )
    return Result(
        title="Test-time training",
        rows=[row],
        details={
            "bpb_strict": adapted.bpb_strict,
            "seconds": adapted.seconds,
            "settings": settings.ttt.model_dump(),
        },
    )


def adapt(model: Model, tokens_N: np.ndarray, settings: TTTConfig, reading: Scoring) -> Score:
    """Score every target of a stream as `score` does, and learn from each chunk after it is scored.

    The model's weights, buffers and mode are restored exactly, also after an error.

    Raises:
        ValueError: As `score`; a model without the parameters to learn.
    """
    if settings.chunk < reading.seq_len:
        assert reading.seq_len % settings.chunk == 0, "the configuration refuses other chunks"
        # The half keeps the stride exact if the share is rounded.
        share = (reading.seq_len - settings.chunk + 0.5) / reading.seq_len
        reading = replace(reading, overlap=share, batch=1)
    trainable: list[Tensor] = list(model.parameters())
    layers: list[int] = []
    if settings.layers is not None:
        matrices = model.ffn_down()
        layers = list(range(len(matrices))) if settings.layers == "all" else sorted({*settings.layers})
        trainable = [matrix for layer in layers for matrix in matrices[layer]]
    if not trainable:
        reason = f"a model of family {model.config.family} has no feed-forward"
        raise ValueError(f"evaluation.ttt.layers: {reason}; leave it out")
    with torch.inference_mode(False), torch.enable_grad(), _restored(model, trainable) as before:
        learner = _ChunkLearner(model, tokens_N, settings, trainable, layers, reading, before)
        return score(model, tokens_N, reading, learner=learner)


@dataclass(eq=False)
class _ChunkLearner:
    """Learns from the chunks of a stream one after the other (a `spider.evaluation.bpb.Learner`)."""

    model: Model
    tokens_N: np.ndarray
    settings: TTTConfig
    trainable: list[Tensor]
    """Parameters that learn; for ``projection`` the output matrices of ``layers``."""
    layers: Sequence[int]
    reading: Scoring
    before: list[tuple[Tensor, Tensor]]
    """Tensors, each with its value at first."""
    remedy: str = DIVERGED

    def __post_init__(self) -> None:
        self.input = ModelInput(self.model, self.tokens_N, carry_over=self.reading.carry_over)
        self.reading = replace(self.reading, overlap=0.0, batch=1)
        self.optimizer = torch.optim.SGD(self.trainable, self.settings.lr, MOMENTUM)
        self.end = self.settings.chunk

    def learn(self) -> None:
        """Learn from the chunk before ``end``, and advance to the next chunk."""
        self.remedy = "lower evaluation.ttt.lr"
        chunk, window = self.settings.chunk, self.reading.seq_len
        context, begin = max(0, self.end - window), self.end - chunk
        if self.settings.reset == "window":
            _copy_back(self.before)
            self.optimizer = torch.optim.SGD(self.trainable, self.settings.lr, MOMENTUM)
            context = begin = max(0, self.end + chunk - window)  # the beginning of the next window
        take_step = self._project if self.settings.objective == "projection" else self._descend
        for start in range(begin, self.end, chunk):
            for read in self._windows(min(context, start), start, start + chunk):
                take_step(read)
        self.end += chunk

    def _windows(self, context: int, start: int, end: int) -> Iterator[Batch]:
        """Yield the windows from ``context`` to ``end``, whose labels are those from ``start`` on."""
        seen = context
        for read in self.input.batches(self.reading, context, end + 1):
            targets = int((read.labels_BT != IGNORED).sum())
            read.labels[:, : max(0, start - seen)] = IGNORED
            seen += targets
            if seen > start:
                yield read

    def _descend(self, read: Batch) -> None:
        """Take a step of SGD on the loss of the next token."""
        with self.reading.precision(self.input.device):
            nats_BT = self.model(
                read.inputs,
                read.labels,
                n_loops=self.reading.n_loops,
                reduction="none",
                candidates_BTW=read.candidates,
            ).loss
        self.optimizer.zero_grad()
        (nats_BT.sum() / min(self.reading.seq_len, self.settings.chunk)).backward()
        nn.utils.clip_grad_norm_(self.trainable, CLIP)
        self.optimizer.step()

    @torch.no_grad()
    def _project(self, read: Batch) -> None:
        """Take a step that brings ``z W^T`` nearer to h in each layer."""
        with self.reading.precision(self.input.device):
            h_BTD, inputs = self.model.ffn_inputs(read.inputs, self.layers, self.reading.n_loops)
        learned_BT = read.labels != IGNORED
        h_SD = wide(h_BTD[learned_BT])
        for w_DF, z_BTF in zip(self.trainable, inputs, strict=True):
            z_SF = wide(z_BTF[learned_BT])
            error_SD = z_SF @ wide(w_DF).T - h_SD
            w_DF -= self.settings.lr * (error_SD.T @ z_SF) / len(z_SF)


def _copy_back(saved: list[tuple[Tensor, Tensor]]) -> None:
    """Copy saved values into their tensors."""
    with torch.no_grad():
        for tensor, before in saved:
            tensor.copy_(before)


@contextmanager
def _restored(model: Model, trainable: list[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Enable gradients for ``trainable`` only; restore weights, buffers and random generators at the end.

    Yields these weights and buffers, each with its value.
    """
    device = trainable[0].device
    deterministic = torch.are_deterministic_algorithms_enabled()
    required_gradients = [(p, p.requires_grad) for p in model.parameters()]
    saved: list[tuple[Tensor, Tensor]] = [(t, t.detach().clone()) for t in (*trainable, *model.buffers())]
    make_deterministic(device)  # else a GPU gives another score each time
    try:
        model.requires_grad_(False)
        for p in trainable:
            p.requires_grad_(True)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield saved
    finally:
        _copy_back(saved)
        for p, required in required_gradients:
            p.requires_grad_(required)
            p.grad = None
        torch.use_deterministic_algorithms(deterministic)
