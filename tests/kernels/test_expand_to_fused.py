"""Compare expand with a loop in plain Python and its kernel with its twin; test its adjoint."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.expand_reduce import expand_to_fused, expand_to_fused_torch
from tests.kernels.maps import DTYPES, SOME, WIDTHS, Maps, maps
from tests.kernels.twins import Pair


def by_hand(x_ND: torch.Tensor, made: Maps) -> torch.Tensor:
    rows = [[0.0] * x_ND.shape[1] for _ in made.pos_to_expert.tolist()]
    for n, places in enumerate(made.token_to_pos.tolist()):
        for p in places:
            if p >= 0:
                rows[p] = x_ND[n].tolist()
    return torch.tensor(rows, dtype=x_ND.dtype).view(len(rows), x_ND.shape[1])


def poison(made: Maps, D: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that contain NaN and both infinities."""
    x_ND = torch.randn(len(made.token_to_pos), D, generator=torch.Generator().manual_seed(D)).to(dtype)
    x_ND.view(-1)[::7], x_ND.view(-1)[::11], x_ND.view(-1)[::13] = torch.nan, torch.inf, -torch.inf
    return x_ND


@settings(max_examples=50)
@given(maps(), st.integers(1, 9))
def test_every_row_is_copied_and_padding_is_zero(made, D):
    x_ND = poison(made, D, torch.float64)
    torch.testing.assert_close(
        expand_to_fused(x_ND, *made[:2]), by_hand(x_ND, made), rtol=0, atol=0, equal_nan=True
    )


def arguments(made: Maps, D: int, dtype: torch.dtype) -> tuple:
    return poison(made, D, dtype), *made[:2]


EXPAND = Pair(
    expand_to_fused,
    expand_to_fused_torch,
    st.builds(arguments, maps(), WIDTHS, DTYPES),
    [arguments(*some) for some in SOME],
)


@settings(max_examples=10)
@given(maps(max_tokens=4))
def test_gradients_of_op_and_twin(made):
    x_ND = torch.randn(len(made.token_to_pos), 3, dtype=torch.float64, requires_grad=True)
    for op in (expand_to_fused, expand_to_fused_torch):
        assert torch.autograd.gradcheck(lambda x, op=op: op(x, *made[:2]), x_ND)
