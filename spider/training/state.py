"""All that training moves, and how checkpoints bring it back: weights, optimizer state, average, progress.

A stage that goes on takes everything from its own newest checkpoint. One that begins takes weights from its
parent, the stage before or what ``--resume`` names, and the optimizer's state where that is of this
optimizer.
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

from spider.checkpoints.claim import differences
from spider.checkpoints.load import AVERAGE, Checkpoint
from spider.checkpoints.records import Manifest
from spider.config import EmaConfig, StageSpec
from spider.errors import TrainingError
from spider.model.interface import Model, model_tensors
from spider.processes.parallel import local
from spider.tokens import Tokens
from spider.training.optim import LowBitAdamW, Optimizer

log = logging.getLogger(__name__)


@dataclass
class Means:
    """Means over every step since the last log line, as running sums of device scalars: no host
    synchronisation until they are read. Checkpoints hold the sums, hence they are exact across a resume."""

    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor]) -> None:
        self.count += 1
        for name, value in values.items():
            value = value.detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def read(self) -> dict[str, float]:
        values = (torch.stack([*self.sums.values()]) / self.count).tolist() if self.count else []
        return dict(zip(self.sums, values, strict=True))

    def plain(self) -> dict[str, Any]:
        return {"count": self.count, "sums": {name: s.item() for name, s in self.sums.items()}}

    @classmethod
    def restore(cls, plain: dict[str, Any], device: torch.device) -> Self:
        sums = plain["sums"].items()
        tensors = {name: torch.tensor(s, dtype=torch.float64, device=device) for name, s in sums}
        return cls(plain["count"], tensors)


@dataclass
class Progress:
    """How far a stage has come: every field is plain JSON, under its name in the manifest."""

    step: int = 0
    """Steps of this stage that are done, skipped ones included."""
    end: int | None = None
    """Steps of this stage; None while only ``max_hours`` limits it and has not yet begun its end."""
    global_step: int = 0
    """Steps of the run that are done."""
    tokens: int = 0
    """Tokens of this stage that are trained on, special ids included."""
    global_tokens: int = 0
    """Tokens of the run that are trained on."""
    bytes: int = 0
    """Bytes of text that the targets of this stage stand for."""
    seconds: float = 0.0
    """Training time of this stage over all its restarts, without work that was lost."""
    checkpoint_seconds: float = 0.0
    """How long training stood still for checkpoints."""
    validation_seconds: float = 0.0
    """And for validations."""
    skipped: int = 0
    """Steps whose gradient was not finite."""
    streak: int = 0
    """How many of them came in a row just now."""
    loss: float | None = None
    """Mean cross entropy (nats a target) over the last log interval, and the least such mean."""
    best_loss: float | None = None
    position: dict[str, Any] | None = None
    """The loader's: which sample of which order of which data comes next."""
    means: dict[str, Any] = field(default_factory=lambda: Means().plain())
    validated: dict[str, Any] | None = None
    """What a validation found after this very step, if there was one."""

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

    It smooths the noise of the last thousands of steps, which is what lowering the learning rate does too, so
    it tells early what an anneal would bring (Polyak and Juditsky, 1992). It is empty until `begin`, and
    begins as a copy of the weights, hence without a bias towards zero. It is fp32, without buffers. Training
    goes on from the weights; evaluation, generation and export read the average (`Checkpoint.model`).
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self._parameters, self._config = dict(model.named_parameters()), config
        self._averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        weights = self._parameters.items()
        self._averages = {name: p.detach().to(torch.float32, copy=True) for name, p in weights}

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take in the weights after so many steps of the stage."""
        if steps < self._config.start_step:
            return
        if self._averages:
            weights = [local(p.detach()).float() for p in self._parameters.values()]
            averages = [local(average) for average in self._averages.values()]
            torch._foreach_lerp_(averages, weights, 1 - self._config.decay)
        else:
            self.begin()

    @contextlib.contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """In here the model has its average, if that has begun; then its weights again, to the bit."""
        own = {name: local(self._parameters[name].detach()) for name in self._averages}
        kept = {name: weight.clone() for name, weight in own.items()}
        try:
            for name, weight in own.items():
                weight.copy_(local(self._averages[name]))
            yield
        finally:
            for name, weight in own.items():
                weight.copy_(kept[name])

    def tensors(self) -> dict[str, Tensor]:
        """The live averages as ``ema.{parameter}``: save them, or copy saved ones into them."""
        return {f"{AVERAGE}{name}": average for name, average in self._averages.items()}


@dataclass(eq=False)
class State:
    """The tensors of one training, and where they come from, as far as ``origin`` tells (`Trainer`)."""

    spec: StageSpec
    origin: dict[str, str | None]
    model: Model
    optimizer: Optimizer | LowBitAdamW
    ema: Ema | None

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds."""
        return {**self._inherited(), **(self.ema.tensors() if self.ema else {})}

    def _inherited(self) -> dict[str, Tensor]:
        """What the next stage goes on from."""
        state = self.optimizer.tensors(self.model)
        return {**model_tensors(self.model), **{f"optimizer.{name}": t for name, t in state.items()}}

    def resume(self, good: Checkpoint, processes: int) -> Progress:
        """Load this stage's own checkpoint, and return how far it had come."""
        self._load(good)
        threads = ("CPU threads", good.training.threads, torch.get_num_threads())
        for what, before, now in (threads, ("processes", good.training.processes, processes)):
            if before != now:
                log.warning(
                    "this stage began with %d %s and goes on with %d: sums round differently, the result "
                    "will not be bit-equal to an uninterrupted run",
                    *(before, what, now),
                )
        return Progress.saved(good.training)

    def start(self, parent: Checkpoint | None, end: int | None) -> Progress:
        """Load what a stage of ``end`` steps begins from, if anything, and return where it begins, or raise
        `TrainingError` where that is not before ``end``."""
        if parent is None:
            return Progress(end=end)
        resumed = self.origin.get("resumed")
        whole = resumed != "weights" and parent.holds_optimizer(self._inherited())
        if resumed != "weights" and not whole:
            log.warning(
                "%s: holds %s, this stage's begins afresh%s",
                parent.path,
                "no optimizer's state" if parent.exported else "the state of another optimizer",
                " at step 0" if resumed else "",
            )
        if not (resumed and whole):
            parent.load_into(self._inherited() if whole else model_tensors(self.model))
            if resumed:
                return Progress(end=end)
            at = self._next_position(parent.training)
            before = Progress.saved(parent.training)
            step, tokens = before.global_step, before.global_tokens
            return Progress(global_step=step, global_tokens=tokens, position=at, end=end)
        # Another folder's training goes on where it stood, towards an end of our own.
        before = Progress.saved(parent.training)
        if end is not None and before.step >= end:
            raise TrainingError(
                f"{parent.path}: is at step {before.step}, and this stage ends after {end}; give it more "
                "steps (max_steps, target_tokens), or take its weights only (reset_steps)"
            )
        self._load(parent)
        log.info("%s: going on from its step %d", parent.path, before.step)
        return dataclasses.replace(before, position=self._next_position(parent.training), end=end, streak=0)

    def _load(self, checkpoint: Checkpoint) -> None:
        if self.ema is not None and checkpoint.training.averaged_weights is not None:
            self.ema.begin()
        checkpoint.load_into(self.tensors())

    def _next_position(self, before: Manifest) -> dict[str, Any] | None:
        """Where what we start from stopped; other data, windows or packing begin a new order."""
        position, settings = before.position, self.spec.settings
        here = self.origin["data_digest"], settings.seq_len, settings.packing == "best_fit"
        if position and here == (before.data_digest, position["seq_len"], "packing" in position):
            log.info("data: going on where that training stopped")
            return position
        log.info("data: other data, seq_len or packing than that training's, beginning a new order")
        return None


def read_parent(spec: StageSpec, start: Path, tokens: Tokens) -> Checkpoint:
    """The checkpoint that a path names, or `CheckpointError`; `TrainingError` if it is of another model than
    ``spec``'s but for activation checkpointing, which no weight knows of, or of other ``tokens``."""
    parent = Checkpoint.at(start)
    before, now = parent.config.shape_of_weights(), spec.model.shape_of_weights()
    if changed := differences(before, now, "model"):
        raise TrainingError(f"{start}: trained another model:\n  " + "\n  ".join(changed))
    if parent.tokens.digest != tokens.digest:
        raise TrainingError(
            f"{start}: its ids are of another tokenizer ({parent.tokens.digest or 'bytes'}) than the data's "
            f"({tokens.digest or 'bytes'}); train it on data that is written in its own"
        )
    return parent
