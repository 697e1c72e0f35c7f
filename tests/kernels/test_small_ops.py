"""Compare the small ops with plain Python, and their kernels with their twins."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.aux_fi import aux_fi, aux_fi_torch
from kernels.get_fused_mapping import BLOCK
from kernels.normalize_weight import (
    ROWS,
    normalize_weight,
    normalize_weight_torch,
)
from kernels.sum_tensors import TILE, sum_tensors, sum_tensors_torch
from kernels.topk_gate import topk_gate, topk_gate_torch
from tests.kernels.maps import DTYPES, choices, scores
from tests.kernels.twins import Pair

LOAD = Pair(
    aux_fi,
    aux_fi_torch,
    choices().map(lambda case: (case[0], case[1], case[0].shape[1])),
    [
        (torch.arange(2 * BLOCK + 2).view(-1, 2) % 7, 7, 2),
        (torch.arange(2 * BLOCK).view(-1, 2) % 3 % 2, 2, 2),
        (torch.zeros(0, 2, dtype=torch.int64), 3, 2),
    ],
    rtol=1e-6,
)


SHAPES = st.tuples(st.sampled_from([0, 1, 7, ROWS + 1]), st.integers(1, 8))


def weights(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random weights; if N allows, with a row of zeros, one of NaN and one with an infinity."""
    w_NK = torch.rand(shape, generator=torch.Generator().manual_seed(shape[1]), dtype=dtype)
    w_NK[3:4], w_NK[4:5, 0], w_NK[5:6, 0] = 0, torch.nan, torch.inf
    return w_NK


NORMALIZE = Pair(
    normalize_weight,
    normalize_weight_torch,
    SHAPES.map(lambda shape: [weights(shape)]),
    [[weights((2 * ROWS + 1, 2))]],
    rtol=1e-5,
    atol=1e-5,
)


def test_gradients_of_normalize_and_its_twin():
    w_NK = torch.rand(5, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(normalize_weight, w_NK)
    assert torch.autograd.gradcheck(normalize_weight_torch, w_NK)


def test_rows_are_divided_by_their_sums_and_an_even_load_is_one():
    sum_N, normal_NK = normalize_weight(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    assert sum_N.tolist() == pytest.approx([4, 0]) and normal_NK.tolist() == [[0.25, 0.75], [0, 0]]
    assert aux_fi(torch.arange(12).view(6, 2) % 4, 4, 2).tolist() == [1.0] * 4
    assert aux_fi(torch.tensor([[0, 2], [2, -1]]), 3, 2).tolist() == pytest.approx([0.75, 0, 1.5])


def parts(count: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


SUM = Pair(
    lambda x_RN, dtype: sum_tensors(list(x_RN), dtype),
    lambda x_RN, dtype: sum_tensors_torch(list(x_RN), dtype),
    st.tuples(
        st.builds(parts, st.integers(1, 7), st.integers(0, 3 * TILE), DTYPES),
        st.just(torch.float32),
    ),
    [
        (parts(6, 2 * TILE + 1, torch.bfloat16), torch.float32),
        (parts(2, TILE, torch.bfloat16), torch.bfloat16),
    ],
    rtol=1e-6,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sum_of_narrow_numbers_is_exact_to_float32(dtype):
    x_RN = parts(6, 500, torch.bfloat16)
    got = sum_tensors(list(x_RN), dtype)
    want = x_RN.double().sum(0)
    assert got.dtype == dtype
    assert ((got.double() - want).norm() / want.norm()) < (1e-6 if dtype == torch.float32 else 2**-8)


SPECIAL = torch.tensor(
    [[0.0, -0.0, math.nan], [math.inf, math.nan, -math.inf], [-math.inf] * 3, [math.nan] * 3]
)


def by_hand(scores_NE: Tensor, k: int) -> Tensor:
    def best(row: list[float]) -> list[int]:
        return sorted(
            range(len(row)), key=lambda e: (not math.isnan(row[e]), -row[e] if row[e] == row[e] else 0, e)
        )

    return torch.tensor([best(row)[:k] for row in scores_NE.tolist()], dtype=torch.int64).view(-1, k)


@settings(max_examples=50)
@given(scores(), st.integers(1, 8))
@example(SPECIAL, 3)
def test_largest_first_and_ties_to_the_lower_index(scores_NE, k):
    k = min(k, scores_NE.shape[1])
    assert torch.equal(topk_gate(scores_NE, k), by_hand(scores_NE, k))


TOPK = Pair(
    topk_gate,
    topk_gate_torch,
    st.builds(lambda scores_NE, k: (scores_NE, min(k, scores_NE.shape[1])), scores(), st.integers(1, 8)),
    [(SPECIAL, 3), (torch.randn(65, 32), 2), (torch.randn(3, 3000), 8), (torch.zeros(0, 5), 2)],
)
