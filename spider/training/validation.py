"""What is measured while a stage trains: bits per byte of held-out text (`Validation`), tasks and samples
(`Probes`).

Validation scores ``val_bytes`` of the text that the evaluation scores, in windows spread evenly over all of
it. It always scores the same windows, so steps compare. Up to this selection the figure is that of the
evaluation. It uses the same window length, overlap and loops, the averaged weights if there are any, and the
full n-gram index (the scored text is not in it). Two things differ: the data is the stage's own, and
products are computed in the training's precision, including fp8.

Validation never changes the weights. It runs between two steps in evaluation mode, and each step seeds its
own random numbers. So the weights are bit-equal to those of a training without validation, and a resumed run
finds the same figures after the same steps.

A mixture has a figure for each of its datasets with held-out text, ``val/bpb_NAME``. ``val/bpb`` is their
mean by the weights of the mixture.

The interval follows from FLOPs, because a clock would give another curve each time. Forward passes cost a
third of training on the same ids, and all validations but the one after the last step may cost `SHARE` of the
training. Several processes share the windows. Each runs equally many forward passes, because under FSDP each
pass gathers the weights from all processes. A compiled model runs uncompiled here: compiling a second graph
would take longer than all validations.

Accuracies of tasks go to the curves, under the names that the evaluation gives them. Samples go to the log
and to the folder ``samples`` of the stage. Of several processes, the first one runs both and the others wait.
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

from spider.checkpoints.records import best
from spider.common import files
from spider.common.errors import DamagedShard, TrainingError
from spider.config import StageSettings, StageSpec
from spider.evaluation.bpb import ModelInput, spans
from spider.evaluation.generate import as_text, written
from spider.evaluation.questions import Task
from spider.evaluation.tasks import read_tasks, run_tasks
from spider.evaluation.text import validation_stream
from spider.model.interface import Model
from spider.model.reading import Scoring
from spider.processes.parallel import is_sharded
from spider.processes.world import World
from spider.tokens import IGNORED
from spider.training.precision import Precision
from spider.training.state import Ema, Progress

if TYPE_CHECKING:
    from spider.data.ngram.lookup import NgramLookup

log = logging.getLogger(__name__)

#: Fraction of the training's FLOPs that validations may cost by default.
SHARE = 1 / 400
#: Questions of each task that are answered during training, from the first on.
MOST_QUESTIONS = 500


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
        self.texts: dict[str, HeldOut] = {}
        self.n_loops = spec.evaluation.n_loops or spec.loops
        if spec.settings.val_every == 0:
            return
        for name, folder in spec.folders(self.data).items():
            try:
                text = HeldOut(self, name, folder)
            except DamagedShard:
                raise
            except ValueError as error:
                if spec.settings.val_every is not None:
                    raise TrainingError(
                        f"val_every: {error}; or leave val_every out, or name other data"
                    ) from None
                log.info("no validation on the way: %s", error)
            else:
                self.texts[name] = text
        if not self.texts:
            return
        window, settings = spec.window, spec.settings
        windows = sum(text.windows for text in self.texts.values())
        validation = windows * window * model.flops_per_token(window, self.n_loops) / 3
        step = spec.tokens_per_step * model.flops_per_token(settings.seq_len, settings.n_loops)
        self.cost = validation / step
        self.every = settings.val_every or _interval(self.cost, settings)

    def is_due(self, progress: Progress, *, saved: bool) -> bool:
        """Return whether to validate after this step: every `every` steps, after the last one, and with each
        checkpoint that ``ckpt_minutes`` saves. By default a stage shorter than `every` is not validated."""
        settings = self.spec.settings
        if self.every is None or (settings.val_every is None and progress.step < self.every):
            return False
        by_clock = saved and settings.ckpt_minutes is not None
        return progress.step % self.every == 0 or progress.step == progress.end or by_clock

    def after(self, progress: Progress) -> dict[str, float]:
        """Validate after this step and return the metrics; every process has to call this.

        The result also goes into ``progress``, and so into the step's checkpoint.
        """
        began = time.perf_counter()
        scores = self._score()
        shares = {name: self.spec.weights[name] for name in scores}
        bpb = sum(share * scores[name] for name, share in shares.items()) / sum(shares.values())
        took = time.perf_counter() - began
        progress.validation_seconds += took
        if not math.isfinite(bpb):
            log.warning("step %d: not validated, the loss of the held-out text is not finite", progress.step)
            return {}
        progress.validated = {"bpb": bpb, "of": self._digest()}
        scored = f"{sum(text.bytes for text in self.texts.values()):,}"
        log.info("step %d: %.4f bits per byte of %s held-out bytes", progress.step, bpb, scored)
        by_source = {f"val/bpb_{name}": one for name, one in scores.items()} if self.spec.mixed else {}
        return {"val/bpb": bpb, **by_source, "system/validation_seconds": took}

    def _digest(self) -> str:
        """Return the digest of what the figure is of: windows, and the shares of a mixture."""
        digests = {name: text.digest for name, text in self.texts.items()}
        return files.digest([digests, self.spec.weights]) if self.spec.mixed else digests[self.spec.data]

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

    def _score(self) -> dict[str, float]:
        """Return the bits per byte of each dataset's text."""
        for text in self.texts.values():
            text.load()
        with self.measuring():
            nats = {name: self._nats(text.batches) for name, text in self.texts.items()}
            if is_sharded(self.model):
                self.model.reshard()  # otherwise the backward pass does it
        summed = self.world.sum_tensors(nats)
        return {name: float(summed[name]) / (math.log(2) * text.bytes) for name, text in self.texts.items()}

    def _nats(self, batches: list[_Batch]) -> Tensor:
        nats = torch.zeros((), dtype=torch.float64, device=batches[0].inputs_BT.device)
        for batch in batches:
            output = self.model(
                batch.inputs_BT,
                batch.labels_BT,
                n_loops=self.n_loops,
                reduction="none",
                candidates_BTW=batch.candidates_BTW,
            )
            assert output.loss is not None, "a forward pass with labels returns a loss"
            nats += (output.loss.double() * batch.text_BT).sum()
        return nats


class HeldOut:
    """The windows of one dataset that validations score: its share of ``val_bytes``, at least one window.

    Raises:
        ValueError: the held-out text is less than one window, or the dataset is a stream.
    """

    def __init__(self, of: Validation, name: str, folder: Path) -> None:
        spec, tokens = of.spec, of.model.tokens
        if spec.stream is not None:
            raise ValueError(f"{spec.data} is a stream and has no validation split")
        limit, is_scored = spec.evaluation.max_bytes, spec.evaluation.data in (None, name)
        largest = spec.evaluation.largest_group if is_scored else None
        self.tokens_N, _ = validation_stream(folder, limit, tokens, largest)
        ids = len(self.tokens_N) - 1
        if ids < spec.window:
            raise ValueError(
                f"{folder}: the validation text (of which evaluation.max_bytes takes {limit:,} bytes) is "
                f"{ids:,} ids, less than one window of {spec.window:,}; hold more out, or shorten the window"
            )
        self._of = of
        self.batches: list[_Batch] = []
        bytes_ = int(tokens.bytes_of[self.tokens_N[1:]].sum(dtype=np.int64))
        reading = Scoring(spec.window, spec.evaluation.overlap)
        available = len(spans(self.tokens_N, reading, tokens.bos)[0])
        share = spec.settings.val_bytes * spec.weights[name]
        self.windows = min(available, max(1, math.ceil(available * share / max(1, bytes_))))

    def load(self) -> None:
        """Put this process's share of the windows on its device for the whole stage, once."""
        if self.batches:
            return
        model, spec, size = self._of.model, self._of.spec, self._of.world.size
        model_input = ModelInput(model, self.tokens_N, self._of.full_lookup)
        reading = Scoring(spec.window, spec.evaluation.overlap, batch=self.windows)
        inputs_BT, labels_BT, candidates_BTW = model_input.evenly(reading)
        scored_BT = labels_BT != IGNORED
        bytes_BT = model.tokens.bytes_of[np.where(scored_BT, labels_BT, model.tokens.pad)] * scored_BT
        self.bytes = int(bytes_BT.sum(dtype=np.int64))
        reading_settings = [spec.window, spec.evaluation.overlap, self._of.n_loops]
        self.digest = files.digest([reading_settings, inputs_BT.tolist(), labels_BT.tolist()])
        # Each process has equally many windows; those that another process has too count as no text.
        number_B = self._of.world.rank + size * np.arange(-(-self.windows // size))
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
            self.batches.append(_Batch(**part))


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


@dataclass(eq=False)
class Probes:
    """Run the tasks and write the samples of a stage.

    Raises:
        ValueError: A task cannot be read.
    """

    validation: Validation
    samples: Path
    """Folder of the samples."""
    converses: bool
    """Whether the model learns from conversations, in this stage or an earlier one."""

    def __post_init__(self) -> None:
        self.spec = self.validation.spec
        settings = self.spec.settings
        self.tasks: list[Task] = []
        if settings.tasks_every:
            found, notes = read_tasks(self.spec.evaluation, self.converses)
            self.tasks = [one._replace(questions=one.questions[:MOST_QUESTIONS]) for one in found]
            for note in notes:
                log.info("%s", note)

    def due(self, progress: Progress) -> list[bool]:
        """Return whether tasks, and whether samples, are due after this step."""
        settings, last = self.spec.settings, progress.step == progress.end
        every = settings.tasks_every, settings.samples_every
        return [steps > 0 and (last or progress.step % steps == 0) for steps in every]

    def after(self, progress: Progress, tasks: bool, samples: bool) -> dict[str, float]:
        """Run tasks, write samples, and return the metrics; every process has to call this."""
        began = time.perf_counter()
        found = self.validation.world.from_first(lambda: self._measure(progress.global_step, tasks, samples))
        progress.validation_seconds += time.perf_counter() - began
        return found

    def _measure(self, step: int, tasks: bool, samples: bool) -> dict[str, float]:
        spec, model = self.spec, self.validation.model
        reading = Scoring(spec.window, batch=spec.evaluation.batch, n_loops=self.validation.n_loops)
        with self.validation.measuring():
            rows = run_tasks(model, self.tasks, reading) if tasks else []
            texts = list(written(model, spec, converses=self.converses)) if samples else []
        for row in rows:
            log.info("step %d: %s %s", step, row.label, row)
        for one in texts:
            log.info("step %d: %r is continued by %r", step, one.prompt, one.text)
        if texts:
            self.samples.mkdir(exist_ok=True)
            files.write_text(self.samples / f"sample-{step:08d}.txt", as_text(texts))
        return {f"val/{row.name}": row.value for row in rows if row.value is not None}
