"""A running average of the weights: ``average <- decay average + (1 - decay) weights`` after every step.

It smooths the noise of the last thousands of steps, which is what lowering the learning rate does too, so it
tells early what an anneal would bring (Polyak and Juditsky, 1992). It begins when told, as a copy of the
weights of that moment, hence without a bias towards zero. It is fp32 whatever the weights are. Buffers are
not averaged.

A checkpoint holds both: ``model.{parameter}``, which training goes on from, in this stage and the next, and
``ema.{parameter}``, which evaluation, generation and export read (`Checkpoint.model`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spider.config import EmaConfig
from spider.processes.parallel import local


class Ema:
    """The average of a model's parameters; empty until `begin`."""

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self._parameters = dict(model.named_parameters())
        self._config = config
        self._averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Start from the weights as they are."""
        self._averages = {
            name: p.detach().to(torch.float32, copy=True) for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take in the weights after so many steps of the stage."""
        if steps < self._config.start_step:
            return
        if not self._averages:
            self.begin()
            return
        weights = [local(p.detach()).float() for p in self._parameters.values()]
        averages = [local(average) for average in self._averages.values()]
        torch._foreach_lerp_(averages, weights, 1 - self._config.decay)

    def tensors(self) -> dict[str, Tensor]:
        """The live averages as ``ema.{parameter}``: save them, or copy saved ones into them."""
        return {f"ema.{name}": average for name, average in self._averages.items()}
