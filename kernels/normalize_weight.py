"""Normalise gates: divide each token's k weights by their sum.

    denominator[n] = 1e-20 + sum over k of w[n, k]        out[n, k] = w[n, k] / denominator[n]
    dw[n, k] = (dout[n, k] - <dout[n], out[n]>) / denominator[n] + ddenominator[n]

Weights that are all zero stay zero. NaN and inf spread through their own row only.

Bytes: N (8 k + 4) forward; at that size the launch is what costs, and ``router`` does this without one.
"""

import torch
from torch import Tensor

from kernels.switch import jit, tile, tl, use_triton

TINY = 1e-20
ROWS = 256


@torch.library.custom_op("spider::normalize_weight", mutates_args=())
def normalize_weight(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """``(denominator (N,), w / denominator (N, K))`` in the dtype of ``w_NK``, float32. Differentiable once.

    Raises ``ValueError`` where w is not (N, K).
    """
    if w_NK.dim() != 2:
        raise ValueError(f"normalize_weight: w must be (N, K), here {tuple(w_NK.shape)}")
    return _launch(w_NK) if use_triton(w_NK) else normalize_weight_torch(w_NK)


@normalize_weight.register_fake
def _(w_NK):
    return w_NK.new_empty(w_NK.shape[0]), w_NK.new_empty(w_NK.shape)


@torch.library.custom_op("spider::normalize_weight_backward", mutates_args=())
def normalize_weight_backward(
    grad_sum_N: Tensor, grad_NK: Tensor, sum_N: Tensor, normal_NK: Tensor
) -> Tensor:
    """The gradient of the weights from those of both results, and both results."""
    arguments = grad_sum_N, grad_NK, sum_N, normal_NK
    return (_launch_backward if use_triton(grad_NK) else normalize_weight_backward_torch)(*arguments)


@normalize_weight_backward.register_fake
def _(grad_sum_N, grad_NK, sum_N, normal_NK):
    return normal_NK.new_empty(normal_NK.shape)


def _adjoint(ctx, grad_sum_N: Tensor, grad_NK: Tensor) -> Tensor:
    return normalize_weight_backward(grad_sum_N, grad_NK, *ctx.saved_tensors)


normalize_weight.register_autograd(
    _adjoint, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output)
)


def normalize_weight_torch(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    sum_N = TINY + w_NK.sum(1)
    return sum_N, w_NK / sum_N[:, None]


def normalize_weight_backward_torch(
    grad_sum_N: Tensor, grad_NK: Tensor, sum_N: Tensor, normal_NK: Tensor
) -> Tensor:
    """The same in torch."""
    inner_N = (grad_NK * normal_NK).sum(1)
    return (grad_NK - inner_N[:, None]) / sum_N[:, None] + grad_sum_N[:, None]


@jit
def _normalize(
    w, total, normal, N, TINY: tl.constexpr, K: tl.constexpr, WIDE_K: tl.constexpr, ROWS: tl.constexpr
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDE_K)[None, :]
    place, inside = n[:, None] * K + k, (n < N)[:, None] & (k < K)
    weight = tl.load(w + place, mask=inside, other=0)
    s = TINY + tl.sum(weight, axis=1)
    tl.store(total + n, s, mask=n < N)
    tl.store(normal + place, weight / s[:, None], mask=inside)


@jit
def _normalize_backward(
    grad_total,
    grad,
    total,
    normal,
    out,
    N,
    K: tl.constexpr,
    WIDE_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDE_K)[None, :]
    place, inside = n[:, None] * K + k, (n < N)[:, None] & (k < K)
    g = tl.load(grad + place, mask=inside, other=0)
    inner = tl.sum(g * tl.load(normal + place, mask=inside, other=0), axis=1)
    s = tl.load(total + n, mask=n < N, other=1)
    extra = tl.load(grad_total + n, mask=n < N, other=0)
    tl.store(out + place, (g - inner[:, None]) / s[:, None] + extra[:, None], mask=inside)


def _launch(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    N, K = w_NK.shape
    sum_N, normal_NK = w_NK.new_empty(N), w_NK.new_empty(N, K)
    if N:
        sizes = dict(TINY=TINY, K=K, WIDE_K=tile(K, 2 * K), ROWS=ROWS)
        _normalize[-(-N // ROWS),](w_NK.contiguous(), sum_N, normal_NK, N, **sizes)
    return sum_N, normal_NK


def _launch_backward(grad_sum_N: Tensor, grad_NK: Tensor, sum_N: Tensor, normal_NK: Tensor) -> Tensor:
    (N, K), out_NK = grad_NK.shape, normal_NK.new_empty(normal_NK.shape)
    if N:
        sizes = dict(K=K, WIDE_K=tile(K, 2 * K), ROWS=ROWS)
        gradients = grad_sum_N.contiguous(), grad_NK.contiguous()
        _normalize_backward[-(-N // ROWS),](*gradients, sum_N, normal_NK, out_NK, N, **sizes)
    return out_NK
