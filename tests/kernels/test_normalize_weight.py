"""Normalising against plain Python, its kernels against their twins, and its gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.normalize_weight import (
    ROWS,
    TINY,
    _normalize,
    _normalize_backward,
    normalize_weight,
    normalize_weight_backward,
    normalize_weight_backward_torch,
    normalize_weight_torch,
)

SHAPES = st.tuples(st.sampled_from([0, 1, 7, ROWS + 1]), st.integers(1, 8))


def weights(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Random weights; a row of zeros, one of NaN, one with an infinity, where there are rows enough."""
    w_NK = torch.rand(shape, generator=torch.Generator().manual_seed(shape[1]), dtype=dtype)
    w_NK[3:4], w_NK[4:5, 0], w_NK[5:6, 0] = 0, torch.nan, torch.inf
    return w_NK


@given(SHAPES)
@settings(deadline=None)
def test_rows_are_divided_by_their_sums(shape):
    w_NK = weights(shape, torch.float64)
    sum_N, normal_NK = normalize_weight(w_NK)
    for row, total, normal in zip(w_NK.tolist(), sum_N.tolist(), normal_NK.tolist(), strict=True):
        assert total == pytest.approx(TINY + sum(row), nan_ok=True)
        assert normal == pytest.approx([w / (TINY + sum(row)) for w in row], nan_ok=True)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.interpreter
@settings(max_examples=20, deadline=None)
@given(SHAPES)
def test_kernels_give_what_the_twins_give(shape):
    w_NK = weights(shape)
    for got, want in zip(normalize_weight(w_NK), normalize_weight_torch(w_NK), strict=True):
        close(got, want)
    normal = normalize_weight_torch(w_NK + 0.1)
    gradients = torch.randn(shape[0]), torch.randn(shape)
    close(
        normalize_weight_backward(*gradients, *normal), normalize_weight_backward_torch(*gradients, *normal)
    )


def test_gradients_of_op_and_twin():
    w_NK = torch.rand(5, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(normalize_weight, w_NK)
    assert torch.autograd.gradcheck(normalize_weight_torch, w_NK)


def test_torch_library_finds_nothing_wrong():
    torch.library.opcheck(normalize_weight, (torch.rand(3, 2, requires_grad=True),))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"must be \(N, K\)"):
        normalize_weight(torch.zeros(3))


@pytest.mark.parametrize("K", [2, 8])
def test_compiles(compiles, K):
    sizes = dict(N="i32", K=K, WIDE_K=K, ROWS=ROWS)
    compiles(
        _normalize,
        w="*fp32",
        total="*fp32",
        normal="*fp32",
        N="i32",
        TINY=TINY,
        K=K,
        WIDE_K=K,
        ROWS=ROWS,
    )
    pointers = {name: "*fp32" for name in ("grad_total", "grad", "total", "normal", "out")}
    compiles(_normalize_backward, **pointers, **sizes)
