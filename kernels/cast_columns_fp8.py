"""Cast a stack of matrices to fp8 with a scale a column, transposed: the right operand of a grouped product.

    scale[e, n] = the largest power of two with scale[e, n] max|w[e, :, n]| <= 448
    q[e, n, k] = w[e, k, n] scale[e, n] in e4m3           inverse[e, n] = 1 / scale[e, n]

fp8 products want the index that is summed over contiguous in both operands; these weights have it as their
middle one. The scales are those of ``cast_rows_fp8``, and so is what becomes of zeros, NaN and inf.

Bytes: w once or twice, q once, 5 E K N from float32 where the second reading hits the cache. Layout: a
program takes 64 columns of one matrix and walks down them twice, once for the maxima and once to cast. Its
columns are 0.5 MB at K = 2048, so the second walk is served by the L2 cache.
"""

import torch
from torch import Tensor

from kernels.cast_rows_fp8 import LARGEST, power_of_two, power_of_two_torch
from kernels.switch import jit, tl, use_triton

COLUMNS, STEP = 64, 64
"""Columns of one program, and the rows of them that it holds at a time."""


@torch.library.custom_op("spider::cast_columns_fp8", mutates_args=())
def cast_columns_fp8(w_EKN: Tensor) -> tuple[Tensor, Tensor]:
    """``w_EKN`` in float8_e4m3fn as (E, N, K), and the inverse scales (E, N), float32. No derivative.

    Raises ``ValueError`` where the shape is not (E, K, N).
    """
    if w_EKN.dim() != 3:
        raise ValueError(f"cast_columns_fp8: w {tuple(w_EKN.shape)} must be (E, K, N)")
    return (_launch if use_triton(w_EKN) else cast_columns_fp8_torch)(w_EKN)


@cast_columns_fp8.register_fake
def _(w_EKN):
    return _empty(w_EKN)


def _empty(w_EKN: Tensor) -> tuple[Tensor, Tensor]:
    E, K, N = w_EKN.shape
    q_ENK = w_EKN.new_empty(E, N, K, dtype=torch.float8_e4m3fn)
    return q_ENK, w_EKN.new_empty(E, N, dtype=torch.float32)


def cast_columns_fp8_torch(w_EKN: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    w_ENK = w_EKN.float().transpose(1, 2).contiguous()
    most_EN = w_ENK.abs().amax(2) if w_ENK.numel() else w_ENK.new_zeros(w_ENK.shape[:2])
    scale_EN, inverse_EN = power_of_two_torch(most_EN)
    return (w_ENK * scale_EN[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), inverse_EN


@jit
def _cast(w, q, inverse, K, N, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    e = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    most = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        inside = (k < K)[:, None] & (n < N)[None, :]
        part = tl.load(w + (e * K + k)[:, None] * N + n[None, :], mask=inside, other=0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.abs(part), axis=0))
    scale, undone = power_of_two(most)
    tl.store(inverse + e * N + n, undone, mask=n < N)
    for first in range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        inside = (k < K)[:, None] & (n < N)[None, :]
        part = tl.load(w + (e * K + k)[:, None] * N + n[None, :], mask=inside, other=0).to(tl.float32)
        narrow = tl.trans((part * scale[None, :]).to(tl.float8e4nv))
        tl.store(q + (e * N + n)[:, None] * K + k[None, :], narrow, mask=tl.trans(inside))


def _launch(w_EKN: Tensor) -> tuple[Tensor, Tensor]:
    (E, K, N), (q_ENK, inverse_EN) = w_EKN.shape, _empty(w_EKN)
    if E * N:
        grid = (E, -(-N // COLUMNS))
        _cast[grid](w_EKN.contiguous(), q_ENK, inverse_EN, K, N, COLUMNS=COLUMNS, STEP=STEP)
    return q_ENK, inverse_EN
