"""Compare the kernels of expand and reduce with their twins; test their gradients."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.expand_reduce import (
    expand_to_fused,
    expand_to_fused_torch,
    reduce_fused,
    reduce_fused_backward,
    reduce_fused_backward_torch,
    reduce_fused_torch,
)
from tests.kernels.maps import DTYPES, SOME, WIDTHS, Maps, maps
from tests.kernels.twins import Pair


def poison(made: Maps, D: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that contain NaN and both infinities."""
    x_ND = torch.randn(len(made.token_to_pos), D, generator=torch.Generator().manual_seed(D)).to(dtype)
    x_ND.view(-1)[::7], x_ND.view(-1)[::11], x_ND.view(-1)[::13] = torch.nan, torch.inf, -torch.inf
    return x_ND


def expand_arguments(made: Maps, D: int, dtype: torch.dtype) -> tuple:
    return poison(made, D, dtype), *made[:2]


EXPAND = Pair(
    expand_to_fused,
    expand_to_fused_torch,
    st.builds(expand_arguments, maps(), WIDTHS, DTYPES),
    [expand_arguments(*some) for some in SOME],
)


@settings(max_examples=10)
@given(maps(max_tokens=4))
def test_gradients_of_expand_and_its_twin(made):
    x_ND = torch.randn(len(made.token_to_pos), 3, dtype=torch.float64, requires_grad=True)
    for op in (expand_to_fused, expand_to_fused_torch):
        assert torch.autograd.gradcheck(lambda x, op=op: op(x, *made[:2]), x_ND)


def rows(made: Maps, D: int, dtype: torch.dtype) -> Tensor:
    """Return random rows; rows of no token are NaN, as grouped products may leave them."""
    y_PD = torch.randn(len(made.pos_to_expert), D, generator=torch.Generator().manual_seed(D)).to(dtype)
    return y_PD.masked_fill(made.pos_to_expert[:, None] < 0, torch.nan)


def addends(made: Maps, D: int, *dtypes: torch.dtype | None) -> list[Tensor | None]:
    """Return random addends, None without a dtype."""
    generator = torch.Generator().manual_seed(D)
    tokens = len(made.token_to_pos)
    return [
        None if dtype is None else torch.randn(tokens, D, generator=generator).to(dtype) for dtype in dtypes
    ]


def spoiled(made: Maps) -> Tensor:
    """Return weights that are NaN exactly where they are masked."""
    return made.weights.masked_fill(made.token_to_pos < 0, torch.nan)


@settings(max_examples=25)
@given(maps(), st.booleans(), st.booleans())
def test_addends_are_added_once_and_in_float32(made, shared, residual):
    narrow = rows(made, 3, torch.bfloat16)
    more = addends(made, 3, torch.bfloat16 if shared else None, torch.float32 if residual else None)
    want = reduce_fused(narrow.float(), None, *made[:2])
    for addend in more:
        want = want if addend is None else want + addend
    assert torch.equal(reduce_fused(narrow, None, *made[:2], *more), want if residual else want.bfloat16())


def forward_arguments(
    made: Maps,
    D: int,
    dtype: torch.dtype,
    weighted: bool = True,
    shared: torch.dtype | None = torch.bfloat16,
    residual: torch.dtype | None = torch.float32,
) -> tuple:
    more = addends(made, D, shared, residual)
    return rows(made, D, dtype), spoiled(made) if weighted else None, *made[:2], *more


def backward_arguments(made: Maps, D: int, dtype: torch.dtype) -> tuple:
    grad_ND = torch.randn(len(made.token_to_pos), D, generator=torch.Generator().manual_seed(0)).to(dtype)
    return grad_ND, rows(made, D, dtype), spoiled(made), made.token_to_pos, made.pos_to_expert


CLOSE = dict(rtol=1e-5, atol=1e-4)
REDUCE = Pair(
    reduce_fused,
    reduce_fused_torch,
    st.builds(
        forward_arguments, maps(), WIDTHS, DTYPES, st.booleans(), st.none() | DTYPES, st.none() | DTYPES
    ),
    [forward_arguments(*some) for some in SOME],
    **CLOSE,
)
REDUCE_BACKWARD = Pair(
    reduce_fused_backward,
    reduce_fused_backward_torch,
    st.builds(backward_arguments, maps(), WIDTHS, DTYPES),
    [backward_arguments(*some) for some in SOME],
    **CLOSE,
)


@settings(max_examples=15)
@given(maps(max_tokens=4), st.booleans(), st.booleans())
def test_gradients_of_reduce_and_its_twin(made, weighted, added):
    y_PD = rows(made, 2, torch.float64).nan_to_num().requires_grad_()
    w_NK = made.weights.double().requires_grad_() if weighted else None
    more = addends(made, 2, *(torch.float64 if added else None,) * 2)
    more = [addend if addend is None else addend.requires_grad_() for addend in more]
    for op in (reduce_fused, reduce_fused_torch):
        assert torch.autograd.gradcheck(op, (y_PD, w_NK, *made[:2], *more))


def test_each_gradient_has_the_dtype_of_its_term():
    y_PD, w_N1 = torch.randn(3, 2).bfloat16().requires_grad_(), torch.rand(2, 1, requires_grad=True)
    maps = torch.tensor([[2], [0]]), torch.tensor([0, -1, 1])
    narrow, wide = torch.randn(2, 2).bfloat16().requires_grad_(), torch.randn(2, 2, requires_grad=True)
    grad_ND = torch.randn(2, 2)
    reduce_fused(y_PD, w_N1, *maps, narrow, wide).backward(grad_ND)
    dy_PD, dw_N1 = reduce_fused_backward(grad_ND.bfloat16(), y_PD.detach(), w_N1.detach(), *maps)
    assert torch.equal(narrow.grad, grad_ND.bfloat16()) and torch.equal(wide.grad, grad_ND)
    assert torch.equal(y_PD.grad, dy_PD) and torch.equal(w_N1.grad, dw_N1)
