"""Normalise gates: divide each token's k weights by their sum.

    denominator[n] = 1e-20 + sum over k of w[n, k]        out[n, k] = w[n, k] / denominator[n]
    dw[n, k] = (dout[n, k] - <dout[n], out[n]>) / denominator[n] + ddenominator[n]

Weights that are all zero stay zero. NaN and inf affect only their own row. The op moves N (8 k + 4) bytes, so
the launch dominates its cost; ``route`` fuses it.
"""

from torch import Tensor

from kernels.switch import jit, op, tile, tl

TINY = 1e-20
ROWS = 256


def normalize_weight_torch(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``normalize_weight`` in torch."""
    sum_N = TINY + w_NK.sum(1)
    return sum_N, w_NK / sum_N[:, None]


def normalize_weight_backward_torch(
    grad_sum_N: Tensor, grad_NK: Tensor, sum_N: Tensor, normal_NK: Tensor
) -> Tensor:
    """Compute ``normalize_weight_backward`` in torch."""
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
    grad_total, grad, total, normal, out, N, K: tl.constexpr, WIDE_K: tl.constexpr, ROWS: tl.constexpr
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDE_K)[None, :]
    place, inside = n[:, None] * K + k, (n < N)[:, None] & (k < K)
    g = tl.load(grad + place, mask=inside, other=0)
    inner = tl.sum(g * tl.load(normal + place, mask=inside, other=0), axis=1)
    s = tl.load(total + n, mask=n < N, other=1)
    extra = tl.load(grad_total + n, mask=n < N, other=0)
    tl.store(out + place, (g - inner[:, None]) / s[:, None] + extra[:, None], mask=inside)


def _launch(out: tuple[Tensor, Tensor], w_NK: Tensor) -> None:
    N, K = w_NK.shape
    if N:
        _normalize[-(-N // ROWS),](w_NK, *out, N, TINY=TINY, K=K, WIDE_K=tile(K), ROWS=ROWS)


def _launch_backward(out_NK: Tensor, *inputs: Tensor) -> None:
    N, K = out_NK.shape
    if N:
        _normalize_backward[-(-N // ROWS),](*inputs, out_NK, N, K=K, WIDE_K=tile(K), ROWS=ROWS)


@op("normalize_weight", _launch, normalize_weight_torch)
def normalize_weight(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(denominator (N,), w / denominator (N, K))`` for float32 ``w_NK``; differentiable once.

    Raises:
        ValueError: the shape is not (N, K).
    """
    if w_NK.dim() != 2:
        raise ValueError(f"normalize_weight: w must be (N, K), is {tuple(w_NK.shape)}")
    return w_NK.new_empty(w_NK.shape[0]), w_NK.new_empty(w_NK.shape)


@op("normalize_weight_backward", _launch_backward, normalize_weight_backward_torch)
def normalize_weight_backward(
    grad_sum_N: Tensor, grad_NK: Tensor, sum_N: Tensor, normal_NK: Tensor
) -> Tensor:
    """Return the gradient of the weights, given both results and their gradients."""
    return normal_NK.new_empty(normal_NK.shape)


normalize_weight.register_autograd(
    lambda ctx, *gradients: normalize_weight_backward(*gradients, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output),
)
