"""The state of a training and how checkpoints restore it: weights, optimizer state, average, progress.

A stage that resumes takes everything from its own newest checkpoint. A stage that starts takes the weights of
its parent (the stage before, or the checkpoint that ``--resume`` names), and the optimizer's state if both
use the same optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from spider.checkpoints.load import AVERAGE, Checkpoint
from spider.checkpoints.records import Manifest
from spider.checkpoints.save import differences
from spider.common.errors import TrainingError
from spider.config import EmaConfig, StageSpec
from spider.config.spec import largest_divisor
from spider.model.interface import Model, model_tensors
from spider.processes.parallel import local
from spider.tokens import Tokens
from spider.training.optim import Optimizer

log = logging.getLogger(__name__)

#: Name of the number of steps among the sums of `Means`.
_STEPS = "steps"


class Later:
    """A bool on the device that the host reads later. It then waits for the bool only, and not for what was
    queued since."""

    def __init__(self, value: Tensor) -> None:
        self._copy = value
        self._copied: torch.cuda.Event | None = None
        if value.is_cuda:
            self._copy = torch.empty_like(value, device="cpu", pin_memory=True)
            self._copy.copy_(value, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._copy.item())


@dataclass
class Means:
    """Means over the steps since the last log line, as running sums of device scalars.

    The host synchronises only when it reads them. Checkpoints hold the sums, so means are exact across a
    resume. A step whose loss is not finite does not count.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sum of each value. That of the steps themselves is `_STEPS`."""

    def add(self, values: Mapping[str, Tensor], finite: Tensor) -> None:
        """Add the values of a step, if its loss and gradient are ``finite``, a scalar bool."""
        counted = {_STEPS: torch.ones_like(finite, dtype=torch.float64), **values}
        wide = torch.stack([value.detach().double() for value in counted.values()])
        for name, value in zip(counted, torch.where(finite, wide, 0.0).unbind(), strict=True):
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def read(self) -> dict[str, float]:
        """Return the mean of each value; empty if no step counts."""
        sums = self._numbers()
        steps = sums.pop(_STEPS, 0)
        return {name: value / steps for name, value in sums.items()} if steps else {}

    def plain(self) -> dict[str, Any]:
        sums = self._numbers()
        return {"count": int(sums.pop(_STEPS, 0)), "sums": sums}

    def _numbers(self) -> dict[str, float]:
        values = torch.stack([*self.sums.values()]).tolist() if self.sums else []
        return dict(zip(self.sums, values, strict=True))

    @classmethod
    def restore(cls, plain: dict[str, Any], device: torch.device) -> Self:
        sums = {_STEPS: plain["count"], **plain["sums"]} if plain["sums"] else {}
        return cls({name: torch.tensor(s, dtype=torch.float64, device=device) for name, s in sums.items()})


@dataclass
class Progress:
    """How far a stage has come. Every field is plain JSON and stands under its name in the manifest."""

    step: int = 0
    """Completed steps of this stage, skipped ones included."""
    end: int | None = None
    """Steps of the whole stage; None while only ``max_hours`` limits it and has not yet fixed the end."""
    global_step: int = 0
    """Completed steps of the run."""
    tokens: int = 0
    """Trained tokens of this stage, special ids included."""
    global_tokens: int = 0
    """Trained tokens of the run."""
    bytes: int = 0
    """Bytes of text that the targets of this stage stand for."""
    seconds: float = 0.0
    """Training time of this stage over all restarts, without work that was lost."""
    checkpoint_seconds: float = 0.0
    """Time that training stood still for checkpoints."""
    validation_seconds: float = 0.0
    """Time that training stood still for validations."""
    skipped: int = 0
    """Steps whose gradient was not finite."""
    streak: int = 0
    """Skipped steps in a row, up to the current step."""
    loss: float | None = None
    """Mean cross entropy (nats a target) over the last log interval."""
    best_loss: float | None = None
    """Least mean cross entropy of all log intervals."""
    position: dict[str, Any] | None = None
    """The loader's position: the next sample, its order and its data."""
    epoch: float | None = None
    """Passes over the data so far. Only a row of metrics needs it, so an older manifest lacks it."""
    means: dict[str, Any] = field(default_factory=lambda: Means().plain())
    batches: list[str] = field(default_factory=list)
    """Digests of the batches since the last row of metrics. An older manifest lacks them."""
    alike_since: int = 0
    """Step of the stage since which its threads, processes and micro-batches are the same."""
    validated: dict[str, Any] | None = None
    """Result of the validation after this step, if there was one."""

    @property
    def spent(self) -> float:
        """Seconds of this stage in all."""
        return self.seconds + self.checkpoint_seconds + self.validation_seconds

    @classmethod
    def saved(cls, manifest: Manifest) -> Self:
        """Return the progress that a manifest records."""
        return cls(**manifest.model_dump(include=set(cls.__dataclass_fields__)))


class Ema:
    """A running average of the weights: ``average <- decay average + (1 - decay) weights`` after every step.

    It smooths the noise of the last thousands of steps, as lowering the learning rate does, and so estimates
    early what an anneal would reach (Polyak and Juditsky, 1992). It is empty until `begin`, and starts as a
    copy of the weights, which avoids a bias towards zero. It is fp32 and leaves out buffers. Training
    continues from the weights; evaluation, generation and export read the average (`Checkpoint.model`).
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self._parameters = dict(model.named_parameters())
        self._config = config
        self._averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        weights = self._parameters.items()
        self._averages = {name: p.detach().to(torch.float32, copy=True) for name, p in weights}

    @torch.no_grad()
    def update(self, steps: int, finite: Tensor) -> None:
        """Average in the weights after ``steps`` steps of the stage, if the last one was ``finite``, a scalar
        bool."""
        if steps < self._config.start_step:
            return
        if self._averages:
            share = (1 - self._config.decay) * finite.float()
            for name, p in self._parameters.items():
                local(self._averages[name]).lerp_(local(p.detach()).float(), share)
        else:
            self.begin()

    @contextlib.contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Give the model its averaged weights inside, if there are any; restore its own ones bit-equal."""
        own = {name: local(self._parameters[name].detach()) for name in self._averages}
        saved = {name: weight.clone() for name, weight in own.items()}
        try:
            for name, weight in own.items():
                weight.copy_(local(self._averages[name]))
            yield
        finally:
            for name, weight in own.items():
                weight.copy_(saved[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the live averages as ``ema.{parameter}``, to save them or to load saved ones into them."""
        return {f"{AVERAGE}{name}": average for name, average in self._averages.items()}


@dataclass(eq=False)
class State:
    """The tensors of one training; ``origin`` records where they come from (`Trainer`)."""

    spec: StageSpec
    origin: dict[str, str | None]
    model: Model
    optimizer: Optimizer
    ema: Ema | None

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint."""
        return {**self._inherited(), **(self.ema.tensors() if self.ema else {})}

    def _inherited(self) -> dict[str, Tensor]:
        """Return the tensors that the next stage inherits."""
        state = self.optimizer.tensors(self.model)
        return {**model_tensors(self.model), **{f"optimizer.{name}": t for name, t in state.items()}}

    def resume(self, good: Checkpoint, processes: int) -> Progress:
        """Load this stage's own checkpoint and return its progress."""
        self._load(good)
        saved, progress = good.training, Progress.saved(good.training)
        micro_batch = saved.spec["settings"]["micro_batch"]
        windows = largest_divisor(self.spec.windows_per_step // saved.processes, micro_batch)
        before = f"{saved.threads} CPU threads (processes: {saved.processes}, micro-batches of {windows})"
        windows = self.spec.micro_batch(processes)
        now = f"{torch.get_num_threads()} CPU threads (processes: {processes}, micro-batches of {windows})"
        if before != now:
            progress.alike_since = progress.step
            why = "sums round differently, and another micro-batch draws other noise, so the result will not "
            why += "be bit-equal to an uninterrupted run"
            log.warning("this stage began with %s and goes on with %s: %s", before, now, why)
        return progress

    def start(self, parent: Checkpoint | None, end: int | None) -> Progress:
        """Load the parent of a stage of ``end`` steps and return the progress that the stage starts from.

        Raises:
            TrainingError: the resumed training has already passed ``end``.
        """
        if parent is None:
            return Progress(end=end)
        resumed = self.origin.get("resumed")
        with_optimizer = resumed != "weights" and parent.holds_optimizer(self._inherited())
        if resumed != "weights" and not with_optimizer:
            log.warning(
                "%s: holds %s, this stage's begins afresh%s",
                parent.path,
                "no optimizer's state" if parent.exported else "the state of another optimizer",
                " at step 0" if resumed else "",
            )
        if not (resumed and with_optimizer):
            parent.load_into(self._inherited() if with_optimizer else model_tensors(self.model))
            if resumed:
                return Progress(end=end)
            before = Progress.saved(parent.training)
            return Progress(
                global_step=before.global_step,
                global_tokens=before.global_tokens,
                position=self._next_position(parent.training),
                end=end,
            )
        # The training of another folder continues from its step to this stage's own end.
        before = Progress.saved(parent.training)
        if end is not None and before.step >= end:
            raise TrainingError(
                f"{parent.path}: is at step {before.step}, and this stage ends after {end}; give it more "
                "steps (max_steps, tokens), or take its weights only (--reset-steps)"
            )
        self._load(parent)
        log.info("%s: going on from its step %d", parent.path, before.step)
        return dataclasses.replace(before, position=self._next_position(parent.training), end=end, streak=0)

    def _load(self, checkpoint: Checkpoint) -> None:
        if self.ema is not None and checkpoint.training.averaged_weights is not None:
            self.ema.begin()
        checkpoint.load_into(self.tensors())

    def _next_position(self, before: Manifest) -> dict[str, Any] | None:
        """Return the parent's position in the data, or None if data, window, packing or order differ."""
        position, settings = before.position, self.spec.settings
        if (
            position
            and before.data_digest == self.origin["data_digest"]
            and position["seq_len"] == settings.seq_len
            and ("packing" in position) == (settings.packing == "best_fit")
            and ("objective" in position) == (settings.rollouts is not None)
            and position.get("order", "shuffled") == settings.order
            and self.spec.windows_per_step % position.get("lanes", 1) == 0  # of a stream
        ):
            log.info("data: continuing where the previous training stopped")
            return position
        log.info("data: data, seq_len or packing differ from the previous training's, beginning a new order")
        return None


def read_parent(spec: StageSpec, start: Path, tokens: Tokens) -> Checkpoint:
    """Read and verify the checkpoint at a path.

    Raises:
        CheckpointError: the path does not lead to a good checkpoint.
        TrainingError: its weights have other shapes than ``spec``'s model, or its tokenizer differs.
    """
    parent = Checkpoint.at(start, whole=True)
    changed = differences(parent.config.shape_of_weights(), spec.model.shape_of_weights(), "model")
    if changed:
        raise TrainingError(f"{start}: trained another model:\n  " + "\n  ".join(changed))
    if parent.tokens.digest != tokens.digest:
        raise TrainingError(
            f"{start}: was trained with another tokenizer ({parent.tokens.digest or 'bytes'}) than the "
            f"data's ({tokens.digest or 'bytes'}); train it on data that is encoded with its own tokenizer"
        )
    return parent
