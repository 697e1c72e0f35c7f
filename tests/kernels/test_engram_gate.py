"""Compare the gate with sums in plain Python and its kernels with their twins; test gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.engram_gate import (
    ROWS,
    engram_gate,
    engram_gate_backward,
    engram_gate_torch,
)
from tests.kernels.maps import DTYPES
from tests.kernels.twins import Pair

EPS = 1e-5
SHAPES = st.tuples(st.sampled_from([0, 1, 5, ROWS, ROWS + 1]), st.sampled_from([1, 3, 64, 100, 2050]))


class Case(NamedTuple):
    h: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    eps: float = EPS


def case(
    shape: tuple[int, int], dtype: torch.dtype = torch.float32, narrow: torch.dtype | None = None
) -> Case:
    """Return random rows; the third state and the fourth key are zero; ``narrow`` is the dtype of key and
    value."""
    generator = torch.Generator().manual_seed(shape[1])
    h, key, value = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    h[2:3] = 0
    key[3:4] = 0
    weight = torch.rand(shape[1], generator=generator, dtype=torch.float64) + 0.5
    return Case(h.to(dtype), key.to(narrow or dtype), value.to(narrow or dtype), weight.to(dtype))


def with_special_values() -> Case:
    made = case((6, 20))
    made.h[0, 1], made.key[1, 2], made.key[4, 3], made.value[5, 4] = math.nan, math.inf, -math.inf, math.nan
    return made


def gate_in_float32(*made) -> Tensor:
    """Run the twin in float32, because in bfloat16 its own rounding errors dominate."""
    out = engram_gate_torch(*(x.float() for x in made[:4]), made[4])
    return out.to(torch.promote_types(made[0].dtype, made[1].dtype))


def backward_in_float32(grad, *made) -> tuple[Tensor, ...]:
    return torch.func.vjp(lambda *x: gate_in_float32(*x, made[4]), *made[:4])[1](grad)


def backward_arguments(made: Case) -> tuple:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(made.h.shape, generator=generator)
    return grad.to(torch.promote_types(made.h.dtype, made.key.dtype)), *made


CASES = st.builds(case, SHAPES, DTYPES, DTYPES)
EDGES = [case((ROWS + 1, 2050), torch.float32, torch.bfloat16), with_special_values(), case((0, 16))]
CLOSE = dict(rtol=1e-4, atol=1e-4)
GATE = Pair(engram_gate, gate_in_float32, CASES, EDGES, **CLOSE)
GATE_BACKWARD = Pair(
    engram_gate_backward,
    backward_in_float32,
    CASES.map(backward_arguments),
    [backward_arguments(made) for made in EDGES],
    **CLOSE,
)


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 4)])
def test_gradients_of_op_and_twin(shape):
    made = case(shape, torch.float64)
    # Below the floor the gate is constant, except for a step at zero, which has no derivative.
    made.h[2:3], made.key[3:4] = 0.5, 0.25
    arguments = [x.requires_grad_() for x in made[:4]]
    for op in (engram_gate, engram_gate_torch):
        assert torch.autograd.gradcheck(lambda *x, op=op: op(*x, EPS), arguments)
