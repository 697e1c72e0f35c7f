"""Casts to fp8 by rows and by columns: against the nearest of all fp8 numbers, their kernels against their
twins.

Triton's interpreter loses a carry when it rounds to fp8, so what it is given needs no rounding: small
integers. That the hardware rounds as torch does is for ``tests/gpu/test_fp8.py`` to tell.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cast_fp8 import (
    COLUMNS,
    LARGEST,
    STEP,
    TILE,
    cast_columns_fp8,
    cast_columns_fp8_torch,
    cast_rows_fp8,
    cast_rows_fp8_torch,
)
from tests.kernels.twins import Pair

EVERY = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FINITE = EVERY[EVERY.isfinite()].double()


def readable(cast: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a cast whose fp8 result can be compared."""

    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        q, inverse = cast(x)
        return q.view(torch.uint8), inverse

    return read


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers up to 15, each row scaled by another power of two, and a row of zeros."""
    generator = torch.Generator().manual_seed(shape[-1])
    x = torch.randint(-15, 16, shape, generator=generator).to(dtype)
    x = x * 2.0 ** torch.randint(-20, 20, (*shape[:-1], 1), generator=generator)
    x[..., 1:2, :] = 0
    return x.to(dtype)


SIZES = st.sampled_from([0, 1, 2, 17, 65])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROWS = Pair(
    readable(cast_rows_fp8),
    readable(cast_rows_fp8_torch),
    st.builds(lambda R, C, dtype: [integers(R, C, dtype=dtype)], SIZES, SIZES, DTYPES),
    [[integers(3, TILE)], [integers(2 * TILE // 512 + 1, 400)]],
)
COLUMNS_PAIR = Pair(
    readable(cast_columns_fp8),
    readable(cast_columns_fp8_torch),
    st.builds(
        lambda E, K, N, dtype: [integers(E, N, K, dtype=dtype).mT], st.integers(0, 2), SIZES, SIZES, DTYPES
    ),
    [[integers(2, COLUMNS + 1, 2 * STEP + 1).mT]],
)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_each_number_goes_to_the_nearest_under_the_largest_power_of_two_that_fits(row):
    q_1C, inverse_1 = cast_rows_fp8(torch.tensor([row]))
    most, inverse = max(map(abs, row)), inverse_1.item()
    assert most / inverse <= LARGEST and (2 * most / inverse > LARGEST or inverse < 2**-117)
    for x, q in zip(torch.tensor(row).tolist(), q_1C[0].float().tolist(), strict=True):
        assert abs(q - x / inverse) == (FINITE - x / inverse).abs().min()


def test_columns_are_the_rows_of_the_transposed():
    w_EKN = torch.randn(3, 20, 7, generator=torch.Generator().manual_seed(0))
    q_ENK, inverse_EN = cast_columns_fp8(w_EKN)
    for e in range(3):
        q_NK, inverse_N = cast_rows_fp8(w_EKN[e].T.contiguous())
        assert torch.equal(q_ENK[e].float(), q_NK.float()) and torch.equal(inverse_EN[e], inverse_N)


def test_an_outlier_a_nan_and_an_infinity_stay_in_their_rows():
    x_RC = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    hurt_RC = x_RC.clone()
    hurt_RC[1, 3], hurt_RC[2, 4], hurt_RC[3, 5] = 1e30, torch.nan, torch.inf
    for a, b in zip(readable(cast_rows_fp8)(x_RC), readable(cast_rows_fp8)(hurt_RC), strict=True):
        assert torch.equal(a[[0, 4]], b[[0, 4]])
