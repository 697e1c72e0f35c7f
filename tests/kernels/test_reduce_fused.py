"""Compare reduce with a loop in plain Python and its kernels with their twins; test its gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.expand_reduce import (
    _reduce,
    _reduce_backward,
    reduce_fused,
    reduce_fused_backward,
    reduce_fused_backward_torch,
    reduce_fused_torch,
)
from tests.kernels.maps import DTYPES, SOME, WIDTHS, Maps, maps
from tests.kernels.twins import Pair


def rows(made: Maps, D: int, dtype: torch.dtype) -> Tensor:
    """Return random rows; rows of no token are NaN, as grouped products may leave them."""
    y_PD = torch.randn(len(made.pos_to_expert), D, generator=torch.Generator().manual_seed(D)).to(dtype)
    return y_PD.masked_fill(made.pos_to_expert[:, None] < 0, torch.nan)


def by_hand(y_PD: Tensor, w_NK: Tensor | None, made: Maps) -> Tensor:
    out = [[0.0] * y_PD.shape[1] for _ in made.token_to_pos]
    for n, places in enumerate(made.token_to_pos.tolist()):
        for k, p in enumerate(places):
            for d in range(y_PD.shape[1]) if p >= 0 else ():
                out[n][d] += float(y_PD[p, d]) * (1.0 if w_NK is None else float(w_NK[n, k]))
    return torch.tensor(out, dtype=y_PD.dtype).view(len(out), y_PD.shape[1])


def spoiled(made: Maps) -> Tensor:
    """Return weights that are NaN exactly where they are masked."""
    return made.weights.masked_fill(made.token_to_pos < 0, torch.nan)


@settings(max_examples=50)
@given(maps(), st.integers(1, 5), st.booleans())
def test_rows_are_summed(made, D, weighted):
    y_PD, w_NK = rows(made, D, torch.float64), spoiled(made).double() if weighted else None
    torch.testing.assert_close(reduce_fused(y_PD, w_NK, *made[:2]), by_hand(y_PD, w_NK, made))


def forward_arguments(made: Maps, D: int, dtype: torch.dtype, weighted: bool = True) -> tuple:
    return rows(made, D, dtype), spoiled(made) if weighted else None, made.token_to_pos, made.pos_to_expert


def backward_arguments(made: Maps, D: int, dtype: torch.dtype) -> tuple:
    grad_ND = torch.randn(len(made.token_to_pos), D, generator=torch.Generator().manual_seed(0)).to(dtype)
    return grad_ND, rows(made, D, dtype), spoiled(made), made.token_to_pos, made.pos_to_expert


CLOSE = dict(rtol=1e-5, atol=1e-4)
FORWARD = Pair(
    reduce_fused,
    reduce_fused_torch,
    st.builds(forward_arguments, maps(), WIDTHS, DTYPES, st.booleans()),
    [forward_arguments(*some) for some in SOME],
    **CLOSE,
)
BACKWARD = Pair(
    reduce_fused_backward,
    reduce_fused_backward_torch,
    st.builds(backward_arguments, maps(), WIDTHS, DTYPES),
    [backward_arguments(*some) for some in SOME],
    **CLOSE,
)


@settings(max_examples=25)
@given(maps())
def test_weighted_adjoint(made):
    generator = torch.Generator().manual_seed(1)
    y_PD = rows(made, 4, torch.float64).nan_to_num().requires_grad_()
    x_ND = torch.randn(len(made.token_to_pos), 4, generator=generator, dtype=torch.float64)
    w_NK = made.weights.double()
    out_ND = reduce_fused(y_PD, w_NK, *made[:2])
    (adjoint_PD,) = torch.autograd.grad(out_ND, y_PD, x_ND)
    torch.testing.assert_close((out_ND * x_ND).sum(), (y_PD * adjoint_PD).sum())
    assert (adjoint_PD[made.pos_to_expert < 0] == 0).all()


@settings(max_examples=15)
@given(maps(max_tokens=4), st.booleans())
def test_gradients_of_op_and_twin(made, weighted):
    y_PD = rows(made, 2, torch.float64).nan_to_num().requires_grad_()
    w_NK = made.weights.double().requires_grad_() if weighted else None
    for op in (reduce_fused, reduce_fused_torch):
        assert torch.autograd.gradcheck(op, (y_PD, w_NK, made.token_to_pos, made.pos_to_expert))


@pytest.mark.parametrize("weighted", [True, False])
def test_torch_library_finds_nothing_wrong(weighted):
    y_PD = torch.randn(3, 2, requires_grad=True)
    w_NK = torch.rand(2, 1, requires_grad=True) if weighted else None
    torch.library.opcheck(reduce_fused, (y_PD, w_NK, torch.tensor([[2], [0]]), torch.tensor([0, -1, 1])))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="K is 2 in w_NK and 1 in token_to_pos_NK"):
        reduce_fused(torch.zeros(3, 2), torch.zeros(2, 2), torch.zeros(2, 1), torch.zeros(3))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("K, weighted", [(2, True), (2, False), (8, True)])
def test_forward_compiles(compiles, dtype, K, weighted):
    sizes = dict(D="i32", K=K, WEIGHTED=weighted, TILE=2048)
    compiles(_reduce, y=f"*{dtype}", w="*fp32", token_to_pos="*i32", out=f"*{dtype}", **sizes)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_backward_compiles(compiles, dtype, K):
    rows = {name: f"*{dtype}" for name in ("grad", "y")} | {"w": "*fp32"}
    places = {"token_to_pos": "*i32", "pos_to_expert": "*i32", "dy": f"*{dtype}", "dw": "*fp32"}
    sizes = dict(N="i32", P="i32", D="i32", K=K, WIDE_K=K, TILE=4096 // K, PLACES=32)
    compiles(_reduce_backward, num_warps=8, **rows, **places, **sizes)
