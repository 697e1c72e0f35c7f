"""Periodic validation: the bits per byte of a fixed part of the held-out text while a stage trains.

Validation scores ``val_bytes`` of the text that the evaluation scores, in windows spread evenly over all of
it. It always scores the same windows, so steps compare. Up to this selection the figure is that of the
evaluation. It uses the same window length, overlap and loops, the averaged weights if there are any, and the
full n-gram index (the scored text is not in it). Two things differ: the data is the stage's own, and
products are computed in the training's precision, including fp8.

Validation never changes the weights. It runs between two steps in evaluation mode, and each step seeds its
own random numbers. So the weights are bit-equal to those of a training without validation, and a resumed run
finds the same figures after the same steps.

The interval follows from FLOPs, because a clock would give another curve each time. Forward passes cost a
third of training on the same ids, and all validations but the one after the last step may cost `SHARE` of the
training. Several processes share the windows. Each runs equally many forward passes, because under FSDP each
pass gathers the weights from all processes. A compiled model runs uncompiled here: compiling a second graph
would take longer than all validations.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spider import files
from spider.checkpoints.records import best
from spider.config import StageSettings, StageSpec
from spider.errors import TrainingError
from spider.evaluation.bpb import ModelInput, spans
from spider.evaluation.text import validation_stream
from spider.model.interface import Model
from spider.model.reading import Reading
from spider.processes.parallel import is_sharded
from spider.processes.world import World
from spider.tokens import IGNORED
from spider.training.precision import Precision
from spider.training.state import Ema, Progress

if TYPE_CHECKING:
    from spider.ngram.lookup import NgramLookup

log = logging.getLogger(__name__)

#: Fraction of the training's FLOPs that validations may cost by default.
SHARE = 1 / 400


@dataclass(eq=False)
class Validation:
    """Schedule and run a stage's validations.

    Raises:
        TrainingError: ``val_every`` is set, but there is less than one window of held-out text. By default
            the stage is then not validated, and the log says so.
    """

    spec: StageSpec
    data: Path
    """Shards folder of the stage's data."""
    model: Model
    world: World
    precision: Precision
    ema: Ema | None
    full_lookup: NgramLookup | None
    """Candidates from the full n-gram index, if the model reads one."""
    compiled: bool
    """Whether the model's forward pass is compiled."""

    def __post_init__(self) -> None:
        spec, model = self.spec, self.model
        self.every: int | None = None
        self._batches: list[_Batch] = []
        self.n_loops = spec.evaluation.n_loops or spec.loops
        if spec.settings.val_every == 0:
            return
        try:
            self.tokens_N = self.text()
        except ValueError as error:
            if spec.settings.val_every is not None:
                raise TrainingError(
                    f"val_every: {error}; or leave val_every out, or name other data"
                ) from None
            log.info("no validation on the way: %s", error)
            return
        window, settings = spec.window, spec.settings
        bytes_ = int(model.tokens.bytes_of[self.tokens_N[1:]].sum(dtype=np.int64))
        reading = Reading(window, spec.evaluation.overlap)
        available = len(spans(self.tokens_N, reading, model.tokens.bos)[0])
        wanted = max(1, math.ceil(available * settings.val_bytes / max(1, bytes_)))
        self.windows = min(available, wanted)
        validation = self.windows * window * model.flops_per_token(window, self.n_loops) / 3
        step = spec.tokens_per_step * model.flops_per_token(settings.seq_len, settings.n_loops)
        self.cost = validation / step
        self.every = settings.val_every or _interval(self.cost, settings)

    def text(self) -> np.ndarray:
        """Return the ids that the evaluation scores; raise `ValueError` if they are less than one window."""
        spec, limit = self.spec, self.spec.evaluation.max_bytes
        is_scored = spec.evaluation.data in (None, spec.data)
        largest = spec.evaluation.largest_group if is_scored else None
        if spec.stream is not None:
            raise ValueError(f"{spec.data} is a stream and has no validation split")
        tokens_N, _ = validation_stream(self.data, limit, self.model.tokens, largest)
        ids = len(tokens_N) - 1
        if ids < spec.window:
            raise ValueError(
                f"{self.data}: the validation text (of which evaluation.max_bytes takes {limit:,} bytes) is "
                f"{ids:,} ids, less than one window of {spec.window:,}; hold more out, or shorten the window"
            )
        return tokens_N

    def is_due(self, progress: Progress, *, saved: bool) -> bool:
        """Return whether to validate after this step: every `every` steps, after the last one, and with each
        checkpoint that ``ckpt_minutes`` saves. By default a stage shorter than `every` is not validated."""
        settings = self.spec.settings
        if self.every is None or (settings.val_every is None and progress.step < self.every):
            return False
        by_clock = saved and settings.ckpt_minutes is not None
        return progress.step % self.every == 0 or progress.step == progress.end or by_clock

    def after(self, progress: Progress, *, saved: bool) -> dict[str, float]:
        """Validate if it is due after this step and return the metrics; every process has to call this.

        The result also goes into ``progress``, and so into the step's checkpoint.
        """
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

    def log_summary(self, progress: Progress, checkpoints: Path) -> None:
        """Log at the end of the stage what validation cost and which checkpoint is the best."""
        if not progress.validation_seconds:
            return
        share = progress.validation_seconds / progress.spent
        log.info("validation took %.2f%% of the time (%.1f s)", 100 * share, progress.validation_seconds)
        chosen = best(checkpoints)
        if chosen is not None and (found := chosen[1].validated):
            log.info("best checkpoint: %s, %.4f bits per byte", chosen[0].name, found.bpb)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the averaged weights inside, if there are any, with the full n-gram index."""
        with contextlib.ExitStack() as stack:
            if self.ema is not None:
                stack.callback(self.precision.after_update, self.model)
                stack.enter_context(self.ema.in_place())
                self.precision.after_update(self.model)
            if self.compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            # Not inference mode: training could not use the weights that FSDP gathers in that mode.
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.precision.autocast(self.world.device))
            stack.callback(self.model.train, self.model.training)
            stack.callback(setattr, self.model, "lookup", self.model.lookup)
            self.model.lookup = self.full_lookup
            self.model.eval()
            yield

    def _score(self) -> float:
        if not self._batches:
            self._load_batches()
        device = self._batches[0].inputs_BT.device
        nats = torch.zeros((), dtype=torch.float64, device=device)
        with self.measuring():
            for batch in self._batches:
                output = self.model(
                    batch.inputs_BT,
                    batch.labels_BT,
                    n_loops=self.n_loops,
                    reduction="none",
                    candidates_BTW=batch.candidates_BTW,
                )
                assert output.loss is not None, "a forward pass with labels returns a loss"
                nats += (output.loss.double() * batch.text_BT).sum()
            if is_sharded(self.model):
                self.model.reshard()  # otherwise the backward pass does it
        return float(self.world.sum({"nats": nats})["nats"]) / (math.log(2) * self.bytes)

    def _load_batches(self) -> None:
        """Put this process's share of the windows on its device for the whole stage."""
        model, spec, size = self.model, self.spec, self.world.size
        model_input = ModelInput(model, self.tokens_N, self.full_lookup)
        reading = Reading(spec.window, spec.evaluation.overlap, batch=self.windows)
        inputs_BT, labels_BT, candidates_BTW = model_input.spread(reading)
        scored_BT = labels_BT != IGNORED
        bytes_BT = model.tokens.bytes_of[np.where(scored_BT, labels_BT, model.tokens.pad)] * scored_BT
        self.bytes = int(bytes_BT.sum(dtype=np.int64))
        reading_settings = [spec.window, spec.evaluation.overlap, self.n_loops]
        self.digest = files.digest([reading_settings, inputs_BT.tolist(), labels_BT.tolist()])
        # Each process has equally many windows; those that another process has too count as no text.
        number_B = self.world.rank + size * np.arange(-(-self.windows // size))
        own_B = number_B % self.windows
        text_BT = (bytes_BT[own_B] > 0) & (number_B < self.windows)[:, None]
        arrays = {"inputs_BT": inputs_BT[own_B], "labels_BT": labels_BT[own_B], "text_BT": text_BT}
        if candidates_BTW is not None:
            arrays["candidates_BTW"] = candidates_BTW[own_B]
        as_in_training = spec.micro_batch(size) * spec.settings.seq_len // spec.window
        rows = max(1, min(spec.evaluation.batch, as_in_training))
        device = model_input.device
        for first in range(0, len(own_B), rows):
            part = {n: torch.from_numpy(a[first : first + rows]).to(device) for n, a in arrays.items()}
            self._batches.append(_Batch(**part))


class _Batch(NamedTuple):
    """Windows of one forward pass: ids, labels, which labels are text, and candidates if there are any."""

    inputs_BT: Tensor
    labels_BT: Tensor
    text_BT: Tensor
    candidates_BTW: Tensor | None = None


def _interval(cost: float, settings: StageSettings) -> int:
    """Return the steps between validations if one costs as much as ``cost`` steps.

    It respects `SHARE`. It is a multiple or a divisor of ``ckpt_every``, so that validated steps and saved
    steps coincide.
    """
    least, saved = math.ceil(cost / SHARE), settings.ckpt_every
    if settings.ckpt_minutes is not None:
        return least
    if least >= saved:
        return -(-least // saved) * saved
    return next(every for every in range(least, saved + 1) if saved % every == 0)
