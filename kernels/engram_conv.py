"""Engram convolution: convolve the normalised values over earlier rows, and add the result to the values.

    x = r v        r = 1 / sqrt(mean(v^2) + eps)        out = v + c g        g = 1 / (1 + exp(-c))

    c[n] = sum over k < K of taps[k] weight x[n - k], where n - k is in n's window

It is a depthwise causal convolution over rows. Row n has the number number[n] in its window, so it sees at
most that many earlier rows. The gradients are

    dc = dout (g + c g (1 - g))        dx[n] = sum over k of taps[k] weight dc[n + k], where n + k sees n

    dv = dout + r (dx - x mean(dx x))        s[k] = sum over n of dc[n] x[n - k]

    dtaps[k] = s[k] weight                   dweight = sum over k of s[k] taps[k]

Sums are in float32. NaN or inf in a row affects the rows that see it, and the sums over all rows.

Layout: a program takes a block of rows, one after the other. It holds whole rows in registers, 8 features a
thread, so loads in bfloat16 are 16 bytes wide. The K rows that a row sees stay in registers, so a row is read
and normalised once, except near the ends of a block. The backward pass also keeps K unfinished rows of dx,
and its part of s, which torch sums later: the order of every sum is fixed. Rows are loaded a step or two
before they are needed. The loops are unrolled by four, the usual K, so that the rows move on without copies
between registers. The backward pass spills for rows wider than 2048.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.switch import check_shapes, jit, op, tile, tl

FORWARD, BACKWARD = 32, 64
"""Rows of one program of the forward and of the backward pass."""
EACH = 8
"""Features of one thread."""


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
def _row(rows, n, first, N, D, d):
    """Return row n, or zeros if it is not in first..N-1."""
    place = tl.cast(n, tl.int64) * D + d
    return tl.load(rows + place, mask=(n >= first) & (n < N) & (d < D), other=0)


@jit
def _pushed(x, xs):
    """Return ``x`` and all but the last of ``xs``."""
    return [x] + xs[:-1]  # noqa: RUF005 (Triton unpacks no list within a list)


@jit
def _scaled(taps, weight, D, d, K: tl.constexpr):
    """Return ``taps[k] weight`` for each k."""
    w = tl.load(weight + d, mask=d < D, other=0).to(tl.float32)
    scaled = []
    for k in tl.static_range(K):
        scaled += [w * tl.load(taps + k * D + d, mask=d < D, other=0).to(tl.float32)]
    return scaled


@jit
def _convolve(xs, taps, seen, K: tl.constexpr):
    """Return c and g of the row whose x is ``xs[0]`` and that sees ``seen`` of the rows before it."""
    c = taps[0] * xs[0]
    for k in tl.static_range(1, K):
        c += taps[k] * tl.where(seen >= k, xs[k], 0.0)
    # The square of an inverse root takes two instructions, a quotient six.
    root = tl.rsqrt(1 + tl.exp(-c))
    return c, root * root


@jit
def _conv_forward(
    v, number, taps, weight, out, N, D, eps, K: tl.constexpr, WIDE_D: tl.constexpr, ROWS: tl.constexpr
):
    d = tl.arange(0, WIDE_D)
    first = tl.program_id(0) * ROWS
    last = min(first + ROWS, N)
    scaled = _scaled(taps, weight, D, d, K)
    xs = [tl.zeros((WIDE_D,), tl.float32)] * K
    ahead, later = _row(v, first - K + 1, 0, last, D, d), _row(v, first - K + 2, 0, last, D, d)
    for n in tl.range(first - K + 1, last, loop_unroll_factor=4):
        row, ahead, later = ahead.to(tl.float32), later, _row(v, n + 2, 0, last, D, d)
        seen = tl.load(number + n, mask=n >= first, other=0)
        xs = _pushed(row * tl.rsqrt(tl.sum(row * row) / D + eps), xs)
        c, g = _convolve(xs, scaled, seen, K)
        place = tl.cast(n, tl.int64) * D + d
        tl.store(out + place, (row + c * g).to(out.dtype.element_ty), mask=(n >= first) & (d < D))


@jit
def _conv_backward(
    grad, v, number, taps, weight, dv, sums, N, D, eps,
    K: tl.constexpr, WIDE_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute dc of row m at each step, finish row m - K + 1, which no later row sees, and normalise row
    m + 1."""
    d = tl.arange(0, WIDE_D)
    first = tl.program_id(0) * ROWS
    last = min(first + ROWS, N)
    scaled = _scaled(taps, weight, D, d, K)
    zero = tl.zeros((WIDE_D,), tl.float32)
    # Entry k is of row m - k; that of s is its sum for tap k.
    xs, rs, dxs, s = [zero] * K, [zero] * K, [zero] * K, [zero] * K
    ahead, step = _row(v, first - K + 1, 0, N, D, d), _row(grad, first - 1, first, N, D, d)
    seen = tl.load(number + first)
    for m in tl.range(first - K, last + K - 1, loop_unroll_factor=4):
        n = m - K + 1
        row, dout, sees = ahead.to(tl.float32), step.to(tl.float32), seen
        ahead, step = _row(v, m + 2, 0, N, D, d), _row(grad, m + 1, first, N, D, d)
        seen = tl.load(number + m + 1, mask=(m + 1 >= first) & (m + 1 < N), other=-1)
        own = _row(grad, n, first, N, D, d)
        c, g = _convolve(xs, scaled, sees, K)
        dc = dout * (g + c * g * (1 - g))
        unfinished = [scaled[0] * dc]
        for k in tl.static_range(1, K):
            unfinished += [dxs[k - 1] + scaled[k] * tl.where(sees >= k, dc, 0.0)]
        dxs = unfinished
        if (m >= first) & (m < last):
            more = [s[0] + dc * xs[0]]
            for k in tl.static_range(1, K):
                more += [s[k] + dc * tl.where(sees >= k, xs[k], 0.0)]
            s = more
        x, dx = xs[K - 1], dxs[K - 1]
        # One reduction of two columns waits for all warps once, two reductions twice.
        both = tl.sum(tl.join(row * row, dx * x), 0) / D
        square, along = tl.split(tl.broadcast_to(both[None, :], (WIDE_D, 2)))
        dv_n = own.to(tl.float32) + rs[K - 1] * (dx - x * along)
        place = tl.cast(n, tl.int64) * D + d
        tl.store(dv + place, dv_n.to(dv.dtype.element_ty), mask=(n >= first) & (d < D))
        rs = _pushed(tl.rsqrt(square + eps), rs)
        xs = _pushed(row * rs[0], xs)
    for k in tl.static_range(K):
        tl.store(sums + (tl.program_id(0).to(tl.int64) * K + k) * D + d, s[k], mask=d < D)


def sizes(K: int, D: int) -> dict[str, int]:
    """Return the constants of a program that holds whole rows, at most 1024 threads."""
    wide = tile(D)
    return dict(K=K, WIDE_D=wide, num_warps=min(max(wide // (32 * EACH), 1), 32))


def _launch(
    out_ND: Tensor, v_ND: Tensor, number_N: Tensor, taps_KD: Tensor, weight_D: Tensor, eps: float
) -> None:
    N, D = out_ND.shape
    if N:
        grid, constants = (-(-N // FORWARD),), dict(ROWS=FORWARD, **sizes(len(taps_KD), D))
        _conv_forward[grid](v_ND, number_N, taps_KD, weight_D, out_ND, N, D, eps, **constants)


def _launch_backward(gradients: tuple[Tensor, Tensor, Tensor], grad_ND: Tensor, *inputs: Any) -> None:
    dv_ND, dtaps_KD, dweight_D = gradients
    v_ND, number_N, taps_KD, weight_D, eps = inputs
    N, D = v_ND.shape
    K, programs = len(taps_KD), -(-N // BACKWARD)
    parts_PKD = v_ND.new_empty(programs, K, D, dtype=torch.float32)
    if N:
        read = (grad_ND, v_ND, number_N, taps_KD, weight_D)
        _conv_backward[programs,](*read, dv_ND, parts_PKD, N, D, eps, ROWS=BACKWARD, **sizes(K, D))
    sums_KD = parts_PKD.sum(0)
    dtaps_KD.copy_(sums_KD * weight_D)
    dweight_D.copy_((sums_KD * taps_KD).sum(0))


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


torch.library.register_autograd(engram_conv, _adjoint, setup_context=_remember)
