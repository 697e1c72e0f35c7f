"""Reduce: sum each token's K rows of the fused buffer, weighted or not, back into one row.

    out[n] = sum over k, ascending, of w[n, k] * y[token_to_pos[n, k]]      where token_to_pos[n, k] >= 0

The sum is in float32 whatever the rows are, and in a fixed order, so it is the same on every run.

Bytes: each row of y that has a token is read once and every row of the result written once, (P + N) D.

Layout: a program takes a token, or a tile of its row, and adds its K rows one after the other; the K loads
do not wait for one another.
"""

import torch
from torch import Tensor

from kernels.switch import jit, tile, tl, use_triton


@torch.library.custom_op("spider::reduce_fused", mutates_args=())
def reduce_fused(
    y_PD: Tensor, w_NK: Tensor | None, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor | None = None
) -> Tensor:
    """The rows (N, D) that tokens get from ``y_PD``, in its dtype; zeros for a token masked everywhere.

    ``w_NK``: float32 weights, or None for ones. ``token_to_pos_NK``: int32 or int64, -1 where masked; such a
    term is left out, whatever its weight. Rows of no token are not read, NaN in them does not matter.
    """
    if (
        token_to_pos_NK.dim() != 2
        or y_PD.dim() != 2
        or (w_NK is not None and w_NK.shape != token_to_pos_NK.shape)
    ):
        raise ValueError(
            f"reduce_fused: y {tuple(y_PD.shape)} must be (P, D); token_to_pos "
            f"{tuple(token_to_pos_NK.shape)} and w {None if w_NK is None else tuple(w_NK.shape)} both (N, K)"
        )
    if use_triton(y_PD):
        return _launch(y_PD, w_NK, token_to_pos_NK)
    return reduce_fused_torch(y_PD, w_NK, token_to_pos_NK)


@reduce_fused.register_fake
def _(y_PD, w_NK, token_to_pos_NK, pos_to_expert_P=None):
    return y_PD.new_empty(token_to_pos_NK.shape[0], y_PD.shape[1])


def reduce_fused_torch(
    y_PD: Tensor, w_NK: Tensor | None, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor | None = None
) -> Tensor:
    """The same in torch, one k after the other."""
    sum_ND = y_PD.new_zeros(
        len(token_to_pos_NK), y_PD.shape[1], dtype=torch.promote_types(y_PD.dtype, torch.float32)
    )
    if len(y_PD) == 0:
        return sum_ND.to(y_PD.dtype)
    for k in range(token_to_pos_NK.shape[1]):
        pos_N = token_to_pos_NK[:, k]
        term_ND = y_PD.index_select(0, pos_N.clamp(min=0)).to(sum_ND.dtype)
        if w_NK is not None:
            term_ND = term_ND * w_NK[:, k, None]
        sum_ND = sum_ND + term_ND.masked_fill(pos_N[:, None] < 0, 0)
    return sum_ND.to(y_PD.dtype)


@jit
def _reduce(y, w, token_to_pos, out, D, K: tl.constexpr, WEIGHTED: tl.constexpr, TILE: tl.constexpr):
    n = tl.program_id(0)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = d < D
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(K):
        p = tl.load(token_to_pos + n * K + k).to(tl.int64)
        term = tl.load(y + p * D + d, mask=inside & (p >= 0), other=0).to(tl.float32)
        if WEIGHTED:
            # A masked term is zero even where its weight is NaN or inf.
            term *= tl.load(w + n * K + k, mask=p >= 0, other=0)
        total += term
    tl.store(out + n.to(tl.int64) * D + d, total.to(out.dtype.element_ty), mask=inside)


def _launch(y_PD: Tensor, w_NK: Tensor | None, token_to_pos_NK: Tensor) -> Tensor:
    (N, K), D = token_to_pos_NK.shape, y_PD.shape[1]
    out_ND = y_PD.new_empty(N, D)
    if out_ND.numel() == 0:
        return out_ND
    size = tile(D, 4096)
    _reduce[N, -(-D // size)](
        y_PD.contiguous(),
        w_NK.contiguous() if w_NK is not None else y_PD,
        token_to_pos_NK.contiguous(),
        out_ND,
        D,
        K=K,
        WEIGHTED=w_NK is not None,
        TILE=size,
    )
    return out_ND
