"""Compare the convolution with sums in plain Python and its kernels with their twins; test gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.engram_conv import (
    BACKWARD,
    FORWARD,
    engram_conv,
    engram_conv_backward,
    engram_conv_torch,
)
from tests.kernels.maps import DTYPES
from tests.kernels.twins import Pair

EPS = 1e-5
WINDOWS = st.lists(st.integers(1, FORWARD), max_size=4).map(tuple)
WIDTHS = st.sampled_from([1, 3, 64, 100, 513])


class Case(NamedTuple):
    v: Tensor
    number: Tensor
    taps: Tensor
    weight: Tensor
    eps: float = EPS


def case(windows: tuple[int, ...], K: int, D: int, dtype: torch.dtype = torch.float32) -> Case:
    """Return windows of these numbers of rows; the third row is zero."""
    generator, N = torch.Generator().manual_seed(D), sum(windows)
    v, taps = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, K))
    v[2:3] = 0
    weight = torch.rand(D, generator=generator, dtype=torch.float64) + 0.5
    number = torch.cat([torch.arange(n) for n in windows] or [torch.arange(0)])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(v.to(dtype), number, taps.to(wide), weight.to(wide))


def conv_in_float32(*made) -> Tensor:
    return engram_conv_torch(made[0].float(), *made[1:]).to(made[0].dtype)


def backward_in_float32(grad, v, number, taps, weight, eps) -> tuple[Tensor, ...]:
    def of(v, taps, weight):
        return engram_conv_torch(v, number, taps, weight, eps)

    dv, *others = torch.func.vjp(of, v.float(), taps, weight)[1](grad.float())
    return dv.to(v.dtype), *others


def backward_arguments(made: Case) -> tuple:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(made.v.shape, generator=generator).to(made.v.dtype), *made


def with_special_values() -> Case:
    """Return windows, one with a NaN and one with an inf, where two programs of each pass meet."""
    made = case((2, FORWARD - 3, 5, BACKWARD - FORWARD - 6, 4, 6), 4, 20)
    made.v[FORWARD, 1], made.v[BACKWARD - 1, 2] = math.nan, math.inf
    return made


CASES = st.builds(case, WINDOWS, st.integers(1, 5), WIDTHS, DTYPES)
EDGES = [
    case((FORWARD + 1, 1, 2 * BACKWARD - FORWARD), 4, 20),
    case((5, 2), 4, 2050),
    case((9,), 4, 64, torch.bfloat16),
    case((), 4, 16),
    with_special_values(),
]
CLOSE = dict(rtol=1e-4, atol=1e-4)
CONV = Pair(engram_conv, conv_in_float32, CASES, EDGES, **CLOSE)
CONV_BACKWARD = Pair(
    engram_conv_backward,
    backward_in_float32,
    CASES.map(backward_arguments),
    [backward_arguments(made) for made in EDGES],
    **CLOSE,
)


@pytest.mark.parametrize("windows", [(), (1,), (5, 2)])
def test_gradients_of_op_and_twin(windows):
    v, number, taps, weight, eps = case(windows, 3, 4, torch.float64)
    arguments = [x.requires_grad_() for x in (v + 0.1, taps, weight)]
    for op in (engram_conv, engram_conv_torch):
        assert torch.autograd.gradcheck(lambda v, t, w, op=op: op(v, number, t, w, eps), arguments)
