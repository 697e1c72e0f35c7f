"""Engram convolution: convolve the normalised values over earlier rows, and add the result to the values.

    x = RMS(v) weight        out = v + SiLU(c)        SiLU(c) = c / (1 + exp(-c))

    c[n] = sum over k < K of taps[k] x[n - k], where n - k is in n's window

It is a depthwise causal convolution over rows. Row n has the number number[n] in its window, so it sees at
most that many earlier rows. With r = 1 / sqrt(mean(v^2) + eps) and g = sigmoid(c), the gradients are

    dc = dout (g + c g (1 - g))        dtaps[k] = sum over n of dc[n] x[n - k]

    dx[n] = sum over k of taps[k] dc[n + k], where n + k is in n's window

    dv = dout + r (dx weight) - r^3 v mean(dx weight v)        dweight = sum over n of dx r v

Sums are in float32. NaN or inf in a row affects the rows that see it, and the sums over all rows.

Layout: a program holds K rows in registers as one tile: its own row and the K - 1 before it (for dx: after
it). Programs of neighbouring rows read the same rows, so most reads hit the L2 cache. The backward pass has
two kernels, because dx needs dc of later rows. The first computes dc, the second the rest. Each of their
programs takes several rows, one after the other, and accumulates its part of dtaps or dweight. Then torch
sums the parts, so the order of every sum is fixed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.switch import check_shapes, jit, op, tile, tl

ROWS = 16
"""Rows of one program of the backward pass."""
EACH = 16
"""Tile elements of one thread."""


def engram_conv_torch(
    v_ND: Tensor, number_N: Tensor, taps_KD: Tensor, weight_D: Tensor, eps: float
) -> Tensor:
    """Compute ``engram_conv`` in torch."""
    wide_ND = v_ND.to(torch.promote_types(v_ND.dtype, taps_KD.dtype))
    x_ND = F.rms_norm(wide_ND, v_ND.shape[1:], eps=eps) * weight_D
    c_ND = x_ND * taps_KD[0]
    for k in range(1, len(taps_KD)):
        # The gradient of roll is a roll; that of a slice would be a buffer of zeros around the slice.
        before_ND = torch.where(number_N[:, None] >= k, x_ND.roll(k, 0), 0)
        c_ND = c_ND + before_ND * taps_KD[k]
    return (wide_ND + F.silu(c_ND)).to(v_ND.dtype)


@jit
def _tile(K: tl.constexpr, D, WIDE_K: tl.constexpr, WIDE_D: tl.constexpr):
    """Return the tap indices (a column) and feature indices (a row) of a tile, and which are inside."""
    k, d = tl.arange(0, WIDE_K)[:, None], tl.arange(0, WIDE_D)[None, :]
    return k, d, (k < K) & (d < D)


@jit
def _before(v, n, seen, w, D, eps, k, d, inside):
    """Return x of row n and of the earlier rows that it sees, k rows back in row k of the tile, else
    zeros."""
    v_KD = tl.load(v + (tl.cast(n, tl.int64) - k) * D + d, mask=inside & (k <= seen), other=0).to(tl.float32)
    r_K = 1 / tl.sqrt(tl.sum(v_KD * v_KD, 1) / D + eps)
    return v_KD * r_K[:, None] * w[None, :]


@jit
def _forward(
    v, number, taps, weight, out, D, eps, K: tl.constexpr, WIDE_K: tl.constexpr, WIDE_D: tl.constexpr
):
    k, d, inside = _tile(K, D, WIDE_K, WIDE_D)
    n, d_D = tl.program_id(0), tl.arange(0, WIDE_D)
    w = tl.load(weight + d_D, mask=d_D < D, other=0).to(tl.float32)
    t_KD = tl.load(taps + k * D + d, mask=inside, other=0).to(tl.float32)
    c = tl.sum(_before(v, n, tl.load(number + n), w, D, eps, k, d, inside) * t_KD, 0)
    place = tl.cast(n, tl.int64) * D + d_D
    y = tl.load(v + place, mask=d_D < D, other=0).to(tl.float32) + c / (1 + tl.exp(-c))
    tl.store(out + place, y.to(out.dtype.element_ty), mask=d_D < D)


@jit
def _backward_c(
    grad, v, number, taps, weight, dc, dtaps, N, D, eps,
    K: tl.constexpr, WIDE_K: tl.constexpr, WIDE_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    k, d, inside = _tile(K, D, WIDE_K, WIDE_D)
    d_D = tl.arange(0, WIDE_D)
    first = tl.program_id(0) * ROWS
    w = tl.load(weight + d_D, mask=d_D < D, other=0).to(tl.float32)
    t_KD = tl.load(taps + k * D + d, mask=inside, other=0).to(tl.float32)
    dt_KD = tl.zeros((WIDE_K, WIDE_D), tl.float32)
    for n in range(first, min(first + ROWS, N)):
        x_KD = _before(v, n, tl.load(number + n), w, D, eps, k, d, inside)
        c = tl.sum(x_KD * t_KD, 0)
        g = 1 / (1 + tl.exp(-c))
        place = tl.cast(n, tl.int64) * D + d_D
        step = tl.load(grad + place, mask=d_D < D, other=0).to(tl.float32) * (g + c * g * (1 - g))
        tl.store(dc + place, step.to(dc.dtype.element_ty), mask=d_D < D)
        dt_KD += step[None, :] * x_KD
    tl.store(dtaps + tl.program_id(0).to(tl.int64) * K * D + k * D + d, dt_KD, mask=inside)


@jit
def _backward_v(
    grad, v, number, taps, weight, dc, dv, dweight, N, D, eps,
    K: tl.constexpr, WIDE_K: tl.constexpr, WIDE_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    k, d, inside = _tile(K, D, WIDE_K, WIDE_D)
    d_D, k_K = tl.arange(0, WIDE_D), tl.arange(0, WIDE_K)
    first = tl.program_id(0) * ROWS
    w = tl.load(weight + d_D, mask=d_D < D, other=0).to(tl.float32)
    t_KD = tl.load(taps + k * D + d, mask=inside, other=0).to(tl.float32)
    dw = tl.zeros((WIDE_D,), tl.float32)
    for n in range(first, min(first + ROWS, N)):
        place = tl.cast(n, tl.int64) * D + d_D
        # Row n + k is in the same window if it has at least k rows before it there.
        sees = tl.load(number + n + k_K, mask=(n + k_K < N) & (k_K < K), other=-1) >= k_K
        later = tl.load(dc + (tl.cast(n, tl.int64) + k) * D + d, mask=inside & sees[:, None], other=0)
        dx = tl.sum(later.to(tl.float32) * t_KD, 0)
        row = tl.load(v + place, mask=d_D < D, other=0).to(tl.float32)
        r = 1 / tl.sqrt(tl.sum(row * row) / D + eps)
        along = tl.sum(dx * w * row) / D
        step = tl.load(grad + place, mask=d_D < D, other=0).to(tl.float32)
        step += r * dx * w - r * r * r * row * along
        tl.store(dv + place, step.to(dv.dtype.element_ty), mask=d_D < D)
        dw += dx * r * row
    tl.store(dweight + tl.program_id(0).to(tl.int64) * D + d_D, dw, mask=d_D < D)


def sizes(K: int, D: int) -> dict[str, int]:
    """Return the constants of a program that holds K whole rows."""
    wide_k, wide_d = tile(K), tile(D)
    return dict(K=K, WIDE_K=wide_k, WIDE_D=wide_d, num_warps=min(max(wide_k * wide_d // (32 * EACH), 1), 32))


def _launch(
    out_ND: Tensor, v_ND: Tensor, number_N: Tensor, taps_KD: Tensor, weight_D: Tensor, eps: float
) -> None:
    N, D = out_ND.shape
    if N:
        _forward[N,](v_ND, number_N, taps_KD, weight_D, out_ND, D, eps, **sizes(len(taps_KD), D))


def _launch_backward(gradients: tuple[Tensor, Tensor, Tensor], grad_ND: Tensor, *inputs: Any) -> None:
    dv_ND, dtaps_KD, dweight_D = gradients
    v_ND, number_N, taps_KD, weight_D, eps = inputs
    N, D = v_ND.shape
    K = len(taps_KD)
    programs = -(-N // ROWS)
    parts_PKD = v_ND.new_zeros(programs, K, D, dtype=torch.float32)
    parts_PD = v_ND.new_empty(programs, D, dtype=torch.float32)
    if N:
        dc_ND = torch.empty_like(v_ND)
        read = (grad_ND, v_ND, number_N, taps_KD, weight_D, dc_ND)
        constants = dict(ROWS=ROWS, **sizes(K, D))
        _backward_c[programs,](*read, parts_PKD, N, D, eps, **constants)
        _backward_v[programs,](*read, dv_ND, parts_PD, N, D, eps, **constants)
    dtaps_KD.copy_(parts_PKD.sum(0))
    dweight_D.copy_(parts_PD.sum(0))


def engram_conv_backward_torch(grad_ND: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``engram_conv_backward`` by torch's derivative of the twin."""
    v_ND, number_N, taps_KD, weight_D, eps = inputs

    def forward(v_ND: Tensor, taps_KD: Tensor, weight_D: Tensor) -> Tensor:
        return engram_conv_torch(v_ND, number_N, taps_KD, weight_D, eps)

    return torch.func.vjp(forward, v_ND, taps_KD, weight_D)[1](grad_ND)


@op("engram_conv", _launch, engram_conv_torch)
def engram_conv(v_ND: Tensor, number_N: Tensor, taps_KD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return ``out`` (N, D) in the dtype of ``v_ND``; differentiable once in v, taps and weight.

    Args:
        number_N: int64, number of each row within its window. The rows of a window are contiguous.
        taps_KD: K > 0 taps. The tap of the row itself comes first.
        weight_D: weight of the norm.
        eps: epsilon of the norm.

    Raises:
        ValueError: the shapes do not fit.
    """
    check_shapes("engram_conv", v_ND=v_ND, number_N=number_N, taps_KD=taps_KD, weight_D=weight_D)
    return torch.empty_like(v_ND)


@op("engram_conv_backward", _launch_backward, engram_conv_backward_torch)
def engram_conv_backward(
    grad_ND: Tensor, v_ND: Tensor, number_N: Tensor, taps_KD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``v_ND``, ``taps_KD`` and ``weight_D``, in their dtypes."""
    return torch.empty_like(v_ND), torch.empty_like(taps_KD), torch.empty_like(weight_D)


def _remember(ctx, inputs, output) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _adjoint(ctx, grad_ND: Tensor):
    dv_ND, dtaps_KD, dweight_D = engram_conv_backward(grad_ND, *ctx.saved_tensors, ctx.eps)
    return dv_ND, None, dtaps_KD, dweight_D, None


engram_conv.register_autograd(_adjoint, setup_context=_remember)
