"""Normalise gates: divide each token's k weights by their sum.

    denominator[n] = 1e-20 + sum over k of w[n, k]        out[n, k] = w[n, k] / denominator[n]
    dw[n, k] = (dout[n, k] - <dout[n], out[n]>) / denominator[n] + ddenominator[n]

The divisor is the sum, because the outputs of experts are then averaged for any k. The L2 norm would make the
weights sum to more than one. Weights that are all zero stay zero. NaN and inf affect only their own row. The
op moves N (8 k + 4) bytes, so the launch dominates its cost. The model uses ``route`` instead, which does the
same in its own kernel. The gradient here is therefore computed in torch.
"""

import torch
from torch import Tensor

from kernels.switch import check_shapes, jit, op, tile, tl

TINY = 1e-20
ROWS = 256


def normalize_weight_torch(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``normalize_weight`` in torch."""
    sum_N = TINY + w_NK.sum(1)
    return sum_N, w_NK / sum_N[:, None]


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


def _launch(out: tuple[Tensor, Tensor], w_NK: Tensor) -> None:
    N, K = w_NK.shape
    if N:
        _normalize[-(-N // ROWS),](w_NK, *out, N, TINY=TINY, K=K, WIDE_K=tile(K), ROWS=ROWS)


@op("normalize_weight", _launch, normalize_weight_torch)
def normalize_weight(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(denominator (N,), w / denominator (N, K))`` for float32 ``w_NK``; differentiable once.

    Raises:
        ValueError: the shape is not (N, K).
    """
    check_shapes("normalize_weight", w_NK=w_NK)
    return w_NK.new_empty(w_NK.shape[0]), w_NK.new_empty(w_NK.shape)


def _remember(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output)


def _adjoint(ctx, grad_sum_N: Tensor, grad_NK: Tensor) -> Tensor:
    sum_N, normal_NK = ctx.saved_tensors
    inner_N = (grad_NK * normal_NK).sum(1)
    return (grad_NK - inner_N[:, None]) / sum_N[:, None] + grad_sum_N[:, None]


torch.library.register_autograd(normalize_weight, _adjoint, setup_context=_remember)
