"""Compare the sum of tensors with its twin, and with float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.sum_tensors import TILE, sum_tensors, sum_tensors_torch
from tests.kernels.maps import DTYPES
from tests.kernels.twins import Pair


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


def test_float64_stays_float64():
    x_RN = parts(3, 10, torch.float64)
    assert torch.equal(sum_tensors(list(x_RN), torch.float64), x_RN[0] + x_RN[1] + x_RN[2])
