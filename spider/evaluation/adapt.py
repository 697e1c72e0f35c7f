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

SGD with momentum takes one step for each window of ``seq_len`` ids, on the sum of its nats divided by
``seq_len``. So the shorter window at the end of a chunk counts less. The model stays in evaluation mode: it
adds no noise and runs all of its loops. Its ``after_step``, which would balance experts, is never called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from spider.config import TTTConfig
from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import DIVERGED, ModelInput, Score, score
from spider.evaluation.result import BITS, Number, Result, Row
from spider.evaluation.subject import Subject
from spider.model.interface import Model
from spider.model.reading import Reading
from spider.processes.device import make_deterministic

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


def adapt(model: Model, tokens_N: np.ndarray, settings: TTTConfig, reading: Reading) -> Score:
    """Score every target of a stream as `score` does, and learn from each chunk after it is scored.

    The model's weights, buffers and mode are restored exactly, also after an error.

    Raises:
        ValueError: As `score`; a chunk shorter than a window; a model without the parameters to learn.
    """
    if settings.chunk < reading.seq_len:
        raise ValueError(
            f"evaluation.ttt.chunk: must be at least the window, {reading.seq_len} (got {settings.chunk})"
        )
    trainable: list[Tensor] = list(model.parameters()) if settings.parameters == "all" else model.ffn_down()
    if not trainable:
        remedy = f"a model of family {model.config.family} has no feed-forward; set it to all"
        raise ValueError(f"evaluation.ttt.parameters: {settings.parameters}: {remedy}")
    with torch.inference_mode(False), torch.enable_grad(), _restored(model, trainable):
        learner = _ChunkLearner(model, tokens_N, settings, trainable, reading)
        return score(model, tokens_N, reading, learner=learner)


class _ChunkLearner:
    """Learns from the chunks of a stream one after the other (a `spider.evaluation.bpb.Learner`)."""

    def __init__(
        self,
        model: Model,
        tokens_N: np.ndarray,
        settings: TTTConfig,
        trainable: list[Tensor],
        reading: Reading,
    ) -> None:
        self.model = model
        self.chunk = settings.chunk
        self.trainable = trainable
        self.input = ModelInput(model, tokens_N, carry_over=reading.carry_over)
        self.reading = replace(reading, overlap=0.0, batch=1)
        self.optimizer = torch.optim.SGD(trainable, settings.lr, MOMENTUM)
        self.remedy = DIVERGED
        self.begin = 0
        self.end = settings.chunk

    def learn(self) -> None:
        """Take one step of SGD for each window of the chunk, and advance to the next chunk."""
        self.remedy = "lower evaluation.ttt.lr"
        for read in self.input.batches(self.reading, self.begin, self.end + 1):
            with self.reading.precision(self.input.device):
                nats_BT = self.model(
                    read.inputs,
                    read.labels,
                    n_loops=self.reading.n_loops,
                    reduction="none",
                    candidates_BTW=read.candidates,
                ).loss
            self.optimizer.zero_grad()
            (nats_BT.sum() / self.reading.seq_len).backward()
            nn.utils.clip_grad_norm_(self.trainable, CLIP)
            self.optimizer.step()
        self.begin = self.end
        self.end += self.chunk


@contextmanager
def _restored(model: Model, trainable: list[Tensor]) -> Iterator[None]:
    """Enable gradients for ``trainable`` only; restore weights, buffers and random generators at the end."""
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
            yield
    finally:
        with torch.no_grad():
            for tensor, before in saved:
                tensor.copy_(before)
        for p, required in required_gradients:
            p.requires_grad_(required)
            p.grad = None
        torch.use_deterministic_algorithms(deterministic)
