"""Compare normalisation with plain Python and its kernels with their twins; test its gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.normalize_weight import (
    ROWS,
    TINY,
    normalize_weight,
    normalize_weight_torch,
)
from tests.kernels.twins import Pair

SHAPES = st.tuples(st.sampled_from([0, 1, 7, ROWS + 1]), st.integers(1, 8))


def weights(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random weights; if N allows, with a row of zeros, one of NaN and one with an infinity."""
    w_NK = torch.rand(shape, generator=torch.Generator().manual_seed(shape[1]), dtype=dtype)
    w_NK[3:4], w_NK[4:5, 0], w_NK[5:6, 0] = 0, torch.nan, torch.inf
    return w_NK


@given(SHAPES)
def test_rows_are_divided_by_their_sums(shape):
    w_NK = weights(shape, torch.float64)
    sum_N, normal_NK = normalize_weight(w_NK)
    for row, total, normal in zip(w_NK.tolist(), sum_N.tolist(), normal_NK.tolist(), strict=True):
        assert total == pytest.approx(TINY + sum(row), nan_ok=True)
        assert normal == pytest.approx([w / (TINY + sum(row)) for w in row], nan_ok=True)


FORWARD = Pair(
    normalize_weight,
    normalize_weight_torch,
    SHAPES.map(lambda shape: [weights(shape)]),
    [[weights((2 * ROWS + 1, 2))]],
    rtol=1e-5,
    atol=1e-5,
)


def test_gradients_of_op_and_twin():
    w_NK = torch.rand(5, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(normalize_weight, w_NK)
    assert torch.autograd.gradcheck(normalize_weight_torch, w_NK)
