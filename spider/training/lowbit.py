"""AdamW whose moments take 8 or 4 bits: torchao's optimizers behind the interface of `Optimizer`.

A moment is kept in blocks (256 values at 8 bits, 128 at 4) as codes into a fixed table of values and one fp32
scale a block (Dettmers et al., arXiv:2110.02861; Li et al., arXiv:2309.01507). An update reads it into fp32,
computes there, and quantizes it again. Against fp32 moments that saves 6 or 7 bytes a parameter. Moments of
fewer than 4,096 values stay fp32. So would those that are no whole number of blocks, which hash tables, with
their prime numbers of rows, hardly ever are: these have smaller blocks, of 32 values at least.

Master weights in bf16 save 2 more in the weights and 2 in the gradients. bf16 has 8 bits of precision, so
rounding to nearest would drop every update below 1/256 of the weight; torchao rounds at random instead, up
with the probability of the part that is cut off, which is right on average. Only matrices become bf16: what
is not multiplied under autocast (tables, norms, the recurrence's vectors) makes up the fp32 residual stream.
The random numbers come from torch's generator, which the training loop seeds at every step.

torchao compiles its update, one kernel for each shape of parameter. On a CPU that took 15 to 25 seconds a
shape, so it runs uncompiled wherever the model does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from spider.training.precision import quiet_torchao

BITS = {"adamw8bit": 8, "adamw4bit": 4}
_SMALLEST_BLOCK = 32


class LowBitAdamW:
    """`Optimizer`'s interface around ``torchao.optim.AdamW8bit`` or ``AdamW4bit``.

    Args:
        groups: with ``params``, ``peak_lr``, ``betas``, ``eps`` and ``weight_decay``.
        bits: 8 or 4.
        compiled: let torchao compile its update.
    """

    def __init__(self, groups: list[dict[str, Any]], bits: int, *, compiled: bool = False) -> None:
        with quiet_torchao():
            from torchao.optim import AdamW4bit, AdamW8bit
        kind = {8: AdamW8bit, 4: AdamW4bit}[bits]
        for group in groups:
            group["lr"] = group["peak_lr"]
        self.bits, self.compiled = bits, compiled
        # Where weights are fp32 there is nothing to round and this says nothing.
        self._inner = kind(groups, bf16_stochastic_round=True)
        self._block_size = self._inner.block_size
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for group in self.param_groups:
            for p in group["params"]:
                # As torchao does in its first step; a checkpoint is loaded before that.
                self.state[p] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": self._moment(p, signed=True),
                    "exp_avg_sq": self._moment(p, signed=False),
                }

    def _moment(self, p: Tensor, *, signed: bool) -> Tensor:
        block = math.gcd(p.numel(), self._block_size)
        self._inner.block_size = block if block >= _SMALLEST_BLOCK else self._block_size
        moment: Tensor = self._inner._new_buffer(p, signed)
        return moment if _is_quantized(moment) else moment.float()

    def set_lr(self, factor: float) -> None:
        for group in self.param_groups:
            group["lr"].fill_(group["peak_lr"] * factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The live state as plain tensors, ``{parameter name}.{state name}``, of a quantized moment
        ``{parameter name}.{state name}.{bits}bit.{codes, scale or qmap}``."""
        named: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            for key, value in self.state.get(p, {}).items():
                named |= {f"{name}.{key}{suffix}": part for suffix, part in self._parts(value)}
        return named

    def _parts(self, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        if not _is_quantized(value):
            yield "", value
            return
        parts, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        for part in parts:
            yield f".{self.bits}bit.{part}", getattr(value, part)

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        eager = contextlib.nullcontext() if self.compiled else torch.compiler.set_stance("force_eager")
        with eager:
            self._inner.step()


def _is_quantized(tensor: Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")
