"""Sum of tensors of one shape, in one pass: ``out = x_0 + x_1 + ...`` in float32, in this order.

torch adds two at a time. For R tensors in bfloat16 that moves 3 (R - 1) of them, and rounds R - 1 times. This
op moves R + 1 and rounds once, or not at all into float32.

It has no gradient of its own, because it is the gradient of using one tensor several times. No compiled graph
contains it, so it is a function and not registered with torch.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from kernels.switch import jit, tl, use_triton

TILE = 1024
"""Elements of one program."""


def sum_tensors_torch(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Compute ``sum_tensors`` in torch."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return reduce(torch.add, parts[1:], parts[0].to(wide)).to(dtype)


@jit
def _sum(parts, out, N, COUNT: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(COUNT):
        total += tl.load(parts[i] + at, mask=at < N, other=0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < N)


def sum_tensors(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of at least one tensor, in ``dtype``. The tensors have one shape, dtype and device.

    Raises:
        ValueError: there is no tensor, or they differ.
    """
    kinds = {(tuple(part.shape), part.dtype, part.device) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"sum_tensors: the tensors must have one shape, dtype and device, not {kinds}")
    first = parts[0]
    if not use_triton(first):
        return sum_tensors_torch(parts, dtype)
    out = torch.empty(first.shape, dtype=dtype, device=first.device)
    N = out.numel()
    if N:
        _sum[-(-N // TILE),](tuple(part.contiguous() for part in parts), out, N, COUNT=len(parts), TILE=TILE)
    return out
