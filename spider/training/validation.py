"""Validation on the way: what the evaluation after a stage will measure, in small, some times before.

Of the text that the evaluation scores, ``val_bytes`` in windows spread evenly over all of it: so it is the
evaluation's figure up to which windows were drawn, the same ones each time, and steps compare. It is read as
the evaluation reads it: in windows of that length with that overlap, with as many loops, by the averaged
weights where there are any, with the index in which the training text is full (none of it is the scored
text). Only two things are the training's: the data is the stage's own, and products are computed in the
training's arithmetic, fp8 too.

It decides nothing about the weights. It runs between two steps, in evaluation mode, and each step seeds anew
what it draws; so the weights are to the bit those of a training without, and what is killed and resumed finds
the same figures after the same steps.

How often is counted in FLOPs and not by a clock, which would make another curve each time: forward passes
are a third of what training on the same ids takes, and all validations together at most `SHARE` of the
training, but for the last one, after the last step. Several processes share the windows; each makes as many
forward passes as the others, for under FSDP they gather the weights for each together. What is compiled runs
uncompiled here: a second graph would take longer to compile than all validations take.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spider import files
from spider.checkpoints.records import best
from spider.config import StageSettings, StageSpec
from spider.errors import TrainingError
from spider.evaluation.bpb import Reading, count_windows
from spider.evaluation.text import validation_stream
from spider.model.interface import Model
from spider.processes.parallel import is_sharded
from spider.processes.world import World
from spider.tokens import IGNORED
from spider.training.precision import Precision
from spider.training.state import Ema, Progress

if TYPE_CHECKING:
    from spider.ngram.store import NgramIndex

log = logging.getLogger(__name__)

#: Of the training's FLOPs, what validations may take by default.
SHARE = 1 / 400


class Validation:
    """When a stage is validated, and how that comes out.

    Args:
        data: shards folder of the stage's data.
        full: the n-gram index that the model will be read with, if it reads one.
        compiled: whether the model's forward pass is.

    Raises:
        TrainingError: it is asked for (``val_every``), and there is no text for it, or less than a window.
            By default there is then none, and the log says so.
    """

    def __init__(
        self,
        spec: StageSpec,
        data: Path,
        model: Model,
        world: World,
        precision: Precision,
        ema: Ema | None,
        full: NgramIndex | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self.spec, self.model, self.world, self.precision, self.ema = spec, model, world, precision, ema
        self.full, self.compiled = full, compiled
        self.every: int | None = None
        self._batches: list[_Batch] = []
        if spec.settings.val_every == 0:
            return
        try:
            self.tokens_N = self._text(data)
        except ValueError as error:
            if spec.settings.val_every is not None:
                remedy = "leave val_every out, or name other data"
                raise TrainingError(f"val_every: {error}; or {remedy}") from None
            log.info("no validation on the way: %s", error)
            return
        window, overlap, asked = spec.window, spec.evaluation.overlap, spec.settings
        bytes_ = int(model.tokens.bytes_of[self.tokens_N[1:]].sum(dtype=np.int64))
        known = count_windows(len(self.tokens_N), window, overlap)
        self.windows = min(known, max(1, math.ceil(known * asked.val_bytes / max(1, bytes_))))
        self.n_loops = spec.evaluation.n_loops or spec.loops
        forward = self.windows * window * model.flops_per_token(window, self.n_loops) / 3
        self.cost = forward / (spec.tokens_per_step * model.flops_per_token(asked.seq_len, asked.n_loops))
        self.every = asked.val_every or _often(self.cost, asked)

    def _text(self, data: Path) -> np.ndarray:
        """What the evaluation would score of the stage's data; `ValueError` where that is under a window."""
        spec, limit = self.spec, self.spec.evaluation.max_bytes
        if spec.stream is not None:
            raise ValueError(f"{spec.data} is a stream and has no validation split")
        tokens_N, _ = validation_stream(data, limit, self.model.tokens)
        if (ids := len(tokens_N) - 1) < spec.window:
            raise ValueError(
                f"{data}: the validation text (of which evaluation.max_bytes takes {limit:,} bytes) is "
                f"{ids:,} ids, less than one window of {spec.window:,}; hold more out, or shorten the window"
            )
        return tokens_N

    def is_due(self, progress: Progress, *, saved: bool) -> bool:
        """After this step, which is ``saved`` or not: of every so many, of the last, of what a clock saves.
        By default there is none in a stage that is too short to pay for one."""
        asked = self.spec.settings
        if self.every is None or (asked.val_every is None and progress.step < self.every):
            return False
        by_clock = saved and asked.ckpt_minutes is not None
        return progress.step % self.every == 0 or progress.step == progress.end or by_clock

    def after(self, progress: Progress, *, saved: bool) -> dict[str, float]:
        """The figures of the step just done, for its row; none where it is not validated. A checkpoint of it
        says them as well. Every process has to call this."""
        if not self.is_due(progress, saved=saved):
            return {}
        began = time.perf_counter()
        bpb = self._score()
        took = time.perf_counter() - began
        progress.validation_seconds += took
        if not math.isfinite(bpb):
            log.warning("step %d: not validated, the loss of the held-out text is not finite", progress.step)
            return {}
        progress.validated = {"bpb": bpb, "of": self.digest}
        log.info("step %d: %.4f bits per byte of %s held-out bytes", progress.step, bpb, f"{self.bytes:,}")
        return {"val/bpb": bpb, "system/validation_seconds": took}

    def tell(self, progress: Progress, checkpoints: Path) -> None:
        """At the end of the stage: what it cost, and which checkpoint is the best."""
        if not progress.validation_seconds:
            return
        share, chosen = progress.validation_seconds / progress.spent, best(checkpoints)
        log.info("validation took %.2f%% of the time (%.1f s)", 100 * share, progress.validation_seconds)
        if chosen is not None and (found := chosen[1].validated):
            log.info("best checkpoint: %s, %.4f bits per byte", chosen[0].name, found.bpb)

    def _score(self) -> float:
        if not self._batches:
            self._read()
        device = self._batches[0].inputs_BT.device
        nats = torch.zeros((), dtype=torch.float64, device=device)
        with contextlib.ExitStack() as held:
            if self.ema is not None:
                held.callback(self.precision.after_update, self.model)
                held.enter_context(self.ema.in_place())
                self.precision.after_update(self.model)
            if self.compiled:
                held.enter_context(torch.compiler.set_stance("force_eager"))
            # Not inference mode: what FSDP gathers in that could not be trained with afterwards.
            held.enter_context(torch.no_grad())
            held.enter_context(self.precision.autocast(device))
            held.callback(self.model.train, self.model.training)
            self.model.eval()
            for one in self._batches:
                how: dict[str, Any] = {"n_loops": self.n_loops, "reduction": "none", **one.given}
                loss_BT = self.model(one.inputs_BT, one.labels_BT, **how).loss
                assert loss_BT is not None, "asked for with labels"
                nats += (loss_BT.double() * one.text_BT).sum()
            if is_sharded(self.model):
                self.model.reshard()  # which otherwise the backward pass does
        return float(self.world.sum({"nats": nats})["nats"]) / (math.log(2) * self.bytes)

    def _read(self) -> None:
        """Put this process's share of the windows on its device, where they stay."""
        model, spec, size = self.model, self.spec, self.world.size
        lookup = None
        if self.full is not None and spec.model.ngram is not None:
            from spider.ngram.lookup import NgramLookup  # numba: half a second of each start

            lookup = NgramLookup(self.full, spec.model.ngram, model.tokens)
        reading = Reading(model, self.tokens_N, lookup)
        inputs_BT, labels_BT, candidates_BTW = reading.spread(
            spec.window, spec.evaluation.overlap, self.windows
        )
        scored_BT = labels_BT != IGNORED
        bytes_BT = model.tokens.bytes_of[np.where(scored_BT, labels_BT, model.tokens.pad)] * scored_BT
        self.bytes = int(bytes_BT.sum(dtype=np.int64))
        how = [spec.window, spec.evaluation.overlap, self.n_loops]
        self.digest = files.digest([how, inputs_BT.tolist(), labels_BT.tolist()])
        arrays = {"inputs_BT": inputs_BT, "labels_BT": labels_BT, "text_BT": bytes_BT > 0}
        arrays |= {} if candidates_BTW is None else {"candidates_BTW": candidates_BTW}
        # Each process has as many windows; what is one too many counts for nothing.
        short = -self.windows % size
        empty = {"inputs_BT": model.tokens.pad, "labels_BT": IGNORED}
        for name, array in arrays.items():
            filling = np.full((short, *array.shape[1:]), empty.get(name, 0), array.dtype)
            arrays[name] = np.concatenate([array, filling])[self.world.rank :: size]
        at_once = spec.micro_batch(size) * spec.settings.seq_len // spec.window
        rows = max(1, min(spec.evaluation.batch, at_once))
        device = reading.device
        for first in range(0, len(arrays["inputs_BT"]), rows):
            part = {n: torch.from_numpy(a[first : first + rows]).to(device) for n, a in arrays.items()}
            inputs, labels, text = (part.pop(name) for name in ("inputs_BT", "labels_BT", "text_BT"))
            self._batches.append(_Batch(inputs, labels, text, part))


class _Batch(NamedTuple):
    """Windows of one forward pass: ids, labels, which of these stand for text, and what else is given."""

    inputs_BT: Tensor
    labels_BT: Tensor
    text_BT: Tensor
    given: dict[str, Tensor]


def _often(cost: float, settings: StageSettings) -> int:
    """Steps between validations of which each costs so many steps: no more than `SHARE` allows, and what is
    saved after so many steps is validated, or what is validated saved."""
    fewest, saved = math.ceil(cost / SHARE), settings.ckpt_every
    if settings.ckpt_minutes is not None:
        return fewest
    if fewest >= saved:
        return -(-fewest // saved) * saved
    return next(every for every in range(fewest, saved + 1) if saved % every == 0)
