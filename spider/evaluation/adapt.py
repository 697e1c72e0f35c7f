"""Adapting to a text while scoring it (test-time training): bits per byte of a model that learns as it reads.

The stream is scored as `spider.evaluation.bpb` scores it, chunk by chunk, and each chunk is learned from once
all of its targets are scored::

    chunk 0: score | SGD on it | chunk 1: score | SGD on it | chunk 2: score ...

So what is summed is the code length of a text under one probability model of it. Four things make it that
(parameter-golf, issue 1017): a target is predicted from the trained weights and what stands before it alone;
by a whole distribution over the vocabulary; before anything is learned from it; in one pass from left to
right. Nothing depends on how long the stream is, or on where a batch of windows ends: rates are constant,
chunks and windows begin at fixed places, and a batch that reaches over the end of a chunk is read again with
the new weights, of which only the targets behind that end are taken. With a rate of 0 the nats are those of
`score`, to the bit.

SGD takes one step a window of ``seq_len`` ids, on the sum of its nats over ``seq_len``, so that the shorter
window at a chunk's end counts less. The model stays in evaluation mode: no noise, all of its loops, and its
``after_step``, which would balance experts, is never called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spider.config import TTTConfig
from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import DIVERGED, Reading, Score, score
from spider.evaluation.result import BITS, Result, Row
from spider.evaluation.subject import Subject
from spider.model.interface import Model
from spider.processes.device import make_deterministic


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the score of a model that learns from the text; None if the configuration has no ``ttt``."""
    if settings.ttt is None:
        return None
    found = adapt(
        subject.model,
        subject.tokens_N,
        settings.ttt,
        seq_len=subject.spec.window,
        overlap=settings.overlap,
        batch=settings.batch,
        n_loops=subject.n_loops,
        autocast=subject.autocast,
    )
    row = Row(
        name="ttt/bpb",
        label="with test-time training",
        value=found.bpb,
        unit=BITS,
        better="lower",
        note=f"the text scored again while learning from it, in {found.seconds:.0f} s",
    )
    return Result(
        title="Test-time training",
        rows=[row],
        details={
            "bpb_strict": found.bpb_strict,
            "seconds": found.seconds,
            "settings": settings.ttt.model_dump(),
        },
    )


def adapt(
    model: Model,
    tokens_N: np.ndarray,
    settings: TTTConfig,
    *,
    seq_len: int,
    overlap: float = 0.5,
    batch: int = 16,
    n_loops: int | None = None,
    autocast: bool = False,
) -> Score:
    """Score every target of a stream as `score` does, learning from what was scored; the model is left as it
    came, to the bit, whatever happens.

    Raises:
        ValueError: as `score`; a chunk shorter than a window; a model without what should learn.
    """
    if settings.chunk < seq_len:
        got = f"(got {settings.chunk})"
        raise ValueError(f"evaluation.ttt.chunk: must be at least the window, {seq_len} {got}")
    learning: list[Tensor] = list(model.parameters()) if settings.parameters == "all" else model.ffn_down()
    if not learning:
        remedy = f"a model of family {model.config.family} has no feed-forward; set it to all"
        raise ValueError(f"evaluation.ttt.parameters: {settings.parameters}: {remedy}")
    how: dict[str, Any] = {"seq_len": seq_len, "n_loops": n_loops, "autocast": autocast}
    with torch.inference_mode(False), torch.enable_grad(), _left_as_it_came(model, learning):
        learner = _Chunks(model, tokens_N, settings, learning, **how)
        return score(model, tokens_N, overlap=overlap, batch=batch, learner=learner, **how)


class _Chunks:
    """Learns the chunks of a stream one after the other: a `Learner`."""

    def __init__(
        self,
        model: Model,
        tokens_N: np.ndarray,
        settings: TTTConfig,
        learning: list[Tensor],
        *,
        seq_len: int,
        n_loops: int | None,
        autocast: bool,
    ) -> None:
        self.model, self.settings, self.learning = model, settings, learning
        self.reading, self.seq_len, self.n_loops = Reading(model, tokens_N), seq_len, n_loops
        self.device = next(model.parameters()).device
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=autocast)
        by_document = settings.reset == "document"
        # Target n is id n + 1. A document's chunks begin behind its BOS, which is known by then.
        self.fresh_D = np.flatnonzero(tokens_N == model.tokens.bos) if by_document else np.zeros(0, int)
        self.trained = [p.detach().clone() for p in learning] if by_document else []
        self.learned = False
        self._start()
        self._go_on(0)

    def learn(self) -> bool:
        learned, anew = self.learned, self.end in self.fresh_D
        if anew and learned:
            with torch.no_grad():
                torch._foreach_copy_(self.learning, self.trained)
            self._start()
        elif not anew:
            self.learned, self.remedy = True, "lower evaluation.ttt.lr"
            for _ in range(self.settings.epochs):
                self._read_once()
        self._go_on(self.end)
        return learned or self.learned

    def _start(self) -> None:
        """With the trained weights."""
        self.learned, self.remedy = False, DIVERGED
        self.optimizer = torch.optim.SGD(self.learning, self.settings.lr, self.settings.momentum)

    def _go_on(self, begin: int) -> None:
        """To the next chunk."""
        behind = self.fresh_D[np.searchsorted(self.fresh_D, begin, side="right") :][:1].tolist()
        self.begin, self.end = begin, min([begin + self.settings.chunk, *behind])

    def _read_once(self) -> None:
        for _, ids, given in self.reading.batches(self.seq_len, 0.0, 1, self.begin, self.end + 1):
            with self.autocast:
                nats_BT = self.model(*ids, n_loops=self.n_loops, reduction="none", **given).loss
            self.optimizer.zero_grad()
            (nats_BT.sum() / self.seq_len).backward()
            nn.utils.clip_grad_norm_(self.learning, self.settings.clip)
            self.optimizer.step()


@contextmanager
def _left_as_it_came(model: Model, learning: list[Tensor]) -> Iterator[None]:
    """Only ``learning`` has gradients inside; afterwards weights, buffers and generators are as before."""
    device, deterministic = learning[0].device, torch.are_deterministic_algorithms_enabled()
    had_gradients = [(p, p.requires_grad) for p in model.parameters()]
    kept: list[tuple[Tensor, Tensor]] = [(t, t.detach().clone()) for t in (*learning, *model.buffers())]
    make_deterministic(device)  # or a GPU would come to another figure each time
    try:
        model.requires_grad_(False)
        for p in learning:
            p.requires_grad_(True)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
        for p, had in had_gradients:
            p.requires_grad_(had)
            p.grad = None
        torch.use_deterministic_algorithms(deterministic)
