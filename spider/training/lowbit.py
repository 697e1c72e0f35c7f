"""AdamW whose moments take 8 or 4 bits: torchao's optimizers behind the interface of `Optimizer`.

A moment is kept in blocks (256 values at 8 bits, 128 at 4) as codes into a fixed table of values and one fp32
scale a block (Dettmers et al., arXiv:2110.02861; Li et al., arXiv:2309.01507). An update reads it into fp32,
computes there, and quantizes it again. Against fp32 moments that saves 6 or 7 bytes a parameter. A block
never reaches from one row of a parameter into the next (of a stack, from one matrix into the next), so rows
can be dealt to any number of processes: blocks are smaller where a row is no whole number of them. Moments of
fewer than 4,096 values stay fp32, and those whose blocks would have fewer than 32.

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

from spider.processes.parallel import cut_like, local
from spider.training.precision import quiet_torchao

BITS = {"adamw8bit": 8, "adamw4bit": 4}
_SMALLEST_MOMENT, _SMALLEST_BLOCK = 4096, 32


class LowBitAdamW:
    """`Optimizer`'s interface around ``torchao.optim.AdamW8bit`` or ``AdamW4bit``; groups have ``params``,
    ``peak_lr``, ``betas``, ``eps`` and ``weight_decay``. ``compiled`` lets torchao compile its update."""

    def __init__(self, groups: list[dict[str, Any]], bits: int, *, compiled: bool = False) -> None:
        with quiet_torchao():
            from torchao.optim import AdamW4bit, AdamW8bit
        kind = {8: AdamW8bit, 4: AdamW4bit}[bits]
        # torchao's optimizer sees this process's slices, which for a parameter that is not cut is all of it.
        self._slices = {p: nn.Parameter(local(p.detach())) for group in groups for p in group["params"]}
        self.bits, self.compiled = bits, compiled
        seen = [[self._slices[p] for p in group["params"]] for group in groups]
        inner = [{**g, "lr": g["peak_lr"], "params": ps} for g, ps in zip(groups, seen, strict=True)]
        # Where weights are fp32 there is nothing to round and this says nothing.
        self._inner = kind(inner, bf16_stochastic_round=True)
        dealt = zip(self._inner.param_groups, groups, strict=True)
        self.param_groups = [{**theirs, "params": group["params"]} for theirs, group in dealt]
        for p, slice_ in self._slices.items():
            # As torchao does in its first step; a checkpoint is loaded before that.
            self._inner.state[slice_] = {
                "step": torch.tensor(0.0),
                "exp_avg": self._moment(p, signed=True),
                "exp_avg_sq": self._moment(p, signed=False),
            }

    def _moment(self, p: Tensor, *, signed: bool) -> Tensor:
        block = math.gcd(p.numel() // p.shape[0], self._inner.block_size)
        if p.numel() < _SMALLEST_MOMENT or block < _SMALLEST_BLOCK:
            return torch.zeros_like(local(p), dtype=torch.float32)
        moment: Tensor = self._inner._subclass_zeros(local(p), signed, block)
        return moment

    def set_lr(self, factor: float) -> None:
        for group in self.param_groups:
            group["lr"].fill_(group["peak_lr"] * factor)  # one tensor with torchao's own group

    def zero_grad(self) -> None:
        for p, slice_ in self._slices.items():
            p.grad = slice_.grad = None

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The live state as plain tensors, ``{parameter name}.{state name}``, of a quantized moment
        ``{parameter name}.{state name}.{bits}bit.{codes, scale or qmap}``."""
        named: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            state = self._inner.state[self._slices[p]] if p in self._slices else {}
            for key, value in state.items():
                named |= {f"{name}.{key}{suffix}": part for suffix, part in self._parts(p, value)}
        return named

    def _parts(self, p: Tensor, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        if not hasattr(value, "__tensor_flatten__"):  # it is not quantized
            yield "", cut_like(value, p) if value.ndim else value
            return
        parts, _ = value.__tensor_flatten__()
        for part in parts:
            held: Tensor = getattr(value, part)
            if part != "qmap":  # codes and scales, by the parameter's rows
                rows = len(local(p))
                held = cut_like(held.view(rows, held.numel() // max(1, rows)), p)
            yield f".{self.bits}bit.{part}", held

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for p, slice_ in self._slices.items():
            slice_.data = local(p.detach())
            slice_.grad = None if p.grad is None or not slice_.numel() else local(p.grad)
        with contextlib.nullcontext() if self.compiled else torch.compiler.set_stance("force_eager"):
            self._inner.step()
