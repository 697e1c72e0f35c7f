"""Cast to fp8 with a scale a row: the left operand of a product whose rows are summed along.

    scale[r] = the largest power of two with scale[r] max|x[r]| <= 448
    q[r] = x[r] scale[r] in e4m3           inverse[r] = 1 / scale[r]

448 is the largest number of e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022). With a power of
two the scaling itself rounds nothing, and undoing it gives numbers that bfloat16 holds exactly; the price is
half a bit of range on average. A row of zeros stays one. A row with NaN or inf in it has no meaning; other
rows do not feel it.

Bytes: x once, q once, 3 R C from bfloat16. In torch it is a reduction and a pass, 5 R C.

Layout: a program holds whole rows, as many as make a tile of 4096; a wider row has more warps. The scale is
made from the bits of the maximum, with no division whose rounding two devices could differ in.
"""

import torch
from torch import Tensor

from kernels.switch import jit, tile, tl, use_triton

LARGEST = 448.0
TILE = 4096
"""Elements of one program."""


@torch.library.custom_op("spider::cast_rows_fp8", mutates_args=())
def cast_rows_fp8(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """``x_RC`` in float8_e4m3fn, (R, C), and the inverse scales (R,), float32. No derivative.

    Raises ``ValueError`` where the shape is not (R, C).
    """
    if x_RC.dim() != 2:
        raise ValueError(f"cast_rows_fp8: x {tuple(x_RC.shape)} must be (R, C)")
    return (_launch if use_triton(x_RC) else cast_rows_fp8_torch)(x_RC)


@cast_rows_fp8.register_fake
def _(x_RC):
    return _empty(x_RC)


def _empty(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    q_RC = x_RC.new_empty(x_RC.shape, dtype=torch.float8_e4m3fn)
    return q_RC, x_RC.new_empty(x_RC.shape[0], dtype=torch.float32)


def cast_rows_fp8_torch(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    if not x_RC.numel():
        return _empty(x_RC)[0], x_RC.new_ones(len(x_RC), dtype=torch.float32)
    scale_R, inverse_R = power_of_two_torch(x_RC.float().abs().amax(1))
    return (x_RC.float() * scale_R[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), inverse_R


def power_of_two_torch(most: Tensor) -> tuple[Tensor, Tensor]:
    """The scale for a maximum, float32, and its inverse."""
    bits = most.view(torch.int32)
    # Below 2^-118 a scale would be infinite.
    exponent = torch.maximum((bits >> 23) + ((bits & 0x7FFFFF) > 0x600000), bits.new_tensor(9))
    return ((262 - exponent) << 23).view(torch.float32), ((exponent - 8) << 23).view(torch.float32)


@jit
def power_of_two(most):
    """The scale for a maximum, float32, and its inverse: 448 is 1.75 * 2^8."""
    bits = most.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 9)
    scale = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 8) << 23).to(tl.float32, bitcast=True)


@jit
def _cast(x, q, inverse, R, C, WIDE_C: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDE_C)[None, :]
    place, inside = r[:, None].to(tl.int64) * C + c, (r < R)[:, None] & (c < C)
    row = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    scale, undone = power_of_two(tl.max(tl.abs(row), axis=1))
    tl.store(inverse + r, undone, mask=r < R)
    tl.store(q + place, (row * scale[:, None]).to(tl.float8e4nv), mask=inside)


def _launch(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    (R, C), (q_RC, inverse_R) = x_RC.shape, _empty(x_RC)
    if x_RC.numel():
        sizes = layout(C)
        _cast[-(-R // sizes["ROWS"]),](x_RC.contiguous(), q_RC, inverse_R, R, C, **sizes)
    elif R:
        inverse_R.fill_(1)
    return q_RC, inverse_R


def layout(C: int) -> dict[str, int]:
    """Rows and warps of a program for rows of ``C``."""
    wide = tile(C, 2 * C)
    return dict(WIDE_C=wide, ROWS=max(TILE // wide, 1), num_warps=min(max(wide // 1024, 4), 16))
