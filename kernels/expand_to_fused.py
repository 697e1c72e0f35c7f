"""Expand: copy each token's row to the places its experts read, and write zeros in the padding.

    out[token_to_pos[n, k]] = x[n]      where token_to_pos[n, k] >= 0
    out[p] = 0                          where pos_to_expert[p] < 0

Layout: the first N programs take a token each, hold a tile of its row in registers and store it K times.
The programs behind them look at 32 places each and write zeros to those that are padding, so the padding
costs no launch of its own and no clearing of the whole result. Row offsets are int64: P D may pass 2^31.

The adjoint is ``reduce_fused`` without weights.
"""

import torch
from torch import Tensor

from kernels.switch import jit, op, tile, tl

PLACES = 32
"""Places of the result whose padding one program clears."""


def expand_to_fused_torch(x_ND: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor) -> Tensor:
    """``expand_to_fused`` in torch: masked copies go to a row past the end, which is cut off."""
    (P,), K = pos_to_expert_P.shape, token_to_pos_NK.shape[1]
    pos_NK = torch.where(token_to_pos_NK < 0, P, token_to_pos_NK).long()
    rows_PD = x_ND.new_zeros(P + 1, x_ND.shape[1])
    return rows_PD.index_copy(0, pos_NK.flatten(), x_ND.repeat_interleave(K, dim=0))[:P]


@jit
def clear_padding(out, pos_to_expert, first, P, D, d, TILE: tl.constexpr, PLACES: tl.constexpr):
    """Zero the features ``d`` of the padding rows of ``out`` (P, D) among PLACES rows from ``first``."""
    p_range = first + tl.arange(0, PLACES)
    if tl.min(tl.load(pos_to_expert + p_range, mask=p_range < P, other=0)) < 0:
        zero = tl.zeros((TILE,), out.dtype.element_ty)
        for p in range(first, min(first + PLACES, P)):
            padding = tl.load(pos_to_expert + p) < 0
            tl.store(out + tl.cast(p, tl.int64) * D + d, zero, mask=d < tl.where(padding, D, 0))


@jit
def _expand(
    x, token_to_pos, pos_to_expert, out, N, P, D, K: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr
):
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    n = tl.program_id(0)
    if n < N:
        row = tl.load(x + n.to(tl.int64) * D + d, mask=d < D)
        for k in tl.static_range(K):
            p = tl.load(token_to_pos + n * K + k).to(tl.int64)
            tl.store(out + p * D + d, row, mask=d < tl.where(p >= 0, D, 0))
    else:
        clear_padding(out, pos_to_expert, (n - N) * PLACES, P, D, d, TILE, PLACES)


def _launch(out_PD: Tensor, x_ND: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor) -> None:
    (N, K), (P, D) = token_to_pos_NK.shape, out_PD.shape
    if P * D:
        size = tile(D, 2048)
        inputs = x_ND, token_to_pos_NK, pos_to_expert_P
        grid = N + -(-P // PLACES), -(-D // size)
        _expand[grid](*inputs, out_PD, N, P, D, K=K, TILE=size, PLACES=PLACES)


@op("expand_to_fused", _launch, expand_to_fused_torch)
def expand_to_fused(x_ND: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor) -> Tensor:
    """The fused rows (P, D) of ``x_ND``, in its dtype; rows of no token are zero.

    ``token_to_pos_NK``: each token's K places, -1 where masked. ``pos_to_expert_P``: -1 at padding. Both are
    int32 or int64, and agree as ``get_fused_mapping`` makes them: a place that is not padding belongs to
    exactly one token. Differentiable in ``x_ND``. NaN and inf are copied. Raises ``ValueError`` for shapes
    that do not fit.
    """
    if x_ND.dim() != 2 or token_to_pos_NK.dim() != 2 or token_to_pos_NK.shape[0] != x_ND.shape[0]:
        raise ValueError(
            f"expand_to_fused: x {tuple(x_ND.shape)} must be (N, D) and token_to_pos "
            f"{tuple(token_to_pos_NK.shape)} (N, K) with the same N"
        )
    return x_ND.new_empty(pos_to_expert_P.shape[0], x_ND.shape[1])


def _adjoint(ctx, grad_PD: Tensor):
    from kernels.reduce_fused import reduce_fused  # each is the other's adjoint

    return reduce_fused(grad_PD, None, *ctx.saved_tensors), None, None


expand_to_fused.register_autograd(
    _adjoint, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:])
)
