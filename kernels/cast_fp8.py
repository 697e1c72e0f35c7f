"""Casts to fp8 for the operands of a product: one scale per row of the left, one per column of the right.

    scale[r] = the largest power of two with scale[r] max|x[r]| <= 448
    q[r] = x[r] scale[r] in e4m3           inverse[r] = 1 / scale[r]

448 is the largest e4m3 number (Micikevicius et al., FP8 Formats for Deep Learning, 2022). Scaling by a power
of two rounds nothing, and undoing it gives numbers that bfloat16 holds exactly. It costs half a bit of range
on average. A row of zeros stays zero. A row with NaN or inf gives arbitrary values and does not affect other
rows. The scales of columns follow the same rule. Columns are returned as rows, because fp8 products need the
summed index contiguous in both operands. In the experts' weights it is the middle index.

Layout of rows: a program holds whole rows, as many as fit in a tile of 4096. A wider row has more warps.

Layout of columns: a program takes 64 columns of one matrix and reads them twice, for the maxima and for the
cast. In bfloat16 these are 256 KiB at K = 2048. Hundreds of programs run at a time, so the L2 cache holds
only part of them for the second pass (not measured).

The scale is computed from the bits of the maximum. A division could be rounded differently on two devices.
"""

import torch
from torch import Tensor

from kernels.switch import check_shapes, jit, op, tile, tl

LARGEST = 448.0
TILE = 4096
"""Elements of one program."""
COLUMNS = 64
"""Columns of one program."""
STEP = 64
"""Rows of these columns that it holds at a time."""


def cast_rows_fp8_torch(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``cast_rows_fp8`` in torch, also for a stack of matrices."""
    x_RC = x_RC.float()
    largest_R = x_RC.abs().amax(-1) if x_RC.numel() else x_RC.new_zeros(x_RC.shape[:-1])
    scale_R, inverse_R = _power_of_two_torch(largest_R)
    return (x_RC * scale_R[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), inverse_R


def cast_columns_fp8_torch(w_EKN: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``cast_columns_fp8`` in torch."""
    return cast_rows_fp8_torch(w_EKN.transpose(1, 2).contiguous())


def _power_of_two_torch(most: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale for a maximum, float32, and its inverse."""
    bits = most.view(torch.int32)
    # For a maximum below 2^-118 the scale would be infinite.
    exponent = torch.maximum((bits >> 23) + ((bits & 0x7FFFFF) > 0x600000), bits.new_tensor(9))
    return ((262 - exponent) << 23).view(torch.float32), ((exponent - 8) << 23).view(torch.float32)


@jit
def _power_of_two(most):
    """Return the scale for a maximum, float32, and its inverse; 448 is 1.75 * 2^8."""
    bits = most.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 9)
    scale = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 8) << 23).to(tl.float32, bitcast=True)


@jit
def _cast_rows(x, q, inverse, R, C, WIDE_C: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDE_C)[None, :]
    place, inside = r[:, None].to(tl.int64) * C + c, (r < R)[:, None] & (c < C)
    row = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    scale, undone = _power_of_two(tl.max(tl.abs(row), axis=1))
    tl.store(inverse + r, undone, mask=r < R)
    tl.store(q + place, (row * scale[:, None]).to(tl.float8e4nv), mask=inside)


@jit
def _cast_columns(w, q, inverse, K, N, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    e = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    most = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        inside = (k < K)[:, None] & (n < N)[None, :]
        part = tl.load(w + (e * K + k)[:, None] * N + n[None, :], mask=inside, other=0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.abs(part), axis=0))
    scale, undone = _power_of_two(most)
    tl.store(inverse + e * N + n, undone, mask=n < N)
    for first in range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        inside = (k < K)[:, None] & (n < N)[None, :]
        part = tl.load(w + (e * K + k)[:, None] * N + n[None, :], mask=inside, other=0).to(tl.float32)
        narrow = tl.trans((part * scale[None, :]).to(tl.float8e4nv))
        tl.store(q + (e * N + n)[:, None] * K + k[None, :], narrow, mask=tl.trans(inside))


def layout(C: int) -> dict[str, int]:
    """Return the constants of a program for rows of ``C`` elements."""
    wide = tile(C)
    return dict(WIDE_C=wide, ROWS=max(TILE // wide, 1), num_warps=min(max(wide // 1024, 4), 16))


def _launch_rows(out: tuple[Tensor, Tensor], x_RC: Tensor) -> None:
    (R, C), sizes = x_RC.shape, layout(x_RC.shape[1])
    if R:
        _cast_rows[-(-R // sizes["ROWS"]),](x_RC, *out, R, C, **sizes)


def _launch_columns(out: tuple[Tensor, Tensor], w_EKN: Tensor) -> None:
    E, K, N = w_EKN.shape
    if E * N:
        _cast_columns[E, -(-N // COLUMNS)](w_EKN, *out, K, N, COLUMNS=COLUMNS, STEP=STEP)


@op("cast_rows_fp8", _launch_rows, cast_rows_fp8_torch)
def cast_rows_fp8(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x_RC`` in float8_e4m3fn, (R, C), and the inverse scales (R,), float32, without a derivative.

    Raises:
        ValueError: the shape is not (R, C).
    """
    check_shapes("cast_rows_fp8", x_RC=x_RC)
    return _results(x_RC, *x_RC.shape)


@op("cast_columns_fp8", _launch_columns, cast_columns_fp8_torch)
def cast_columns_fp8(w_EKN: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``w_EKN`` in float8_e4m3fn as (E, N, K), and the inverse scales (E, N), float32, without a
    derivative.

    Raises:
        ValueError: the shape is not (E, K, N).
    """
    check_shapes("cast_columns_fp8", w_EKN=w_EKN)
    E, K, N = w_EKN.shape
    return _results(w_EKN, E, N, K)


def _results(x: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(shape, dtype=torch.float8_e4m3fn), x.new_empty(shape[:-1], dtype=torch.float32)
