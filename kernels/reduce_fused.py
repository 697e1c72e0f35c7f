"""Reduce: sum each token's K rows of the fused buffer, weighted or not, back into one row.

    out[n]  = sum over k, ascending, of w[n, k] y[token_to_pos[n, k]]       where token_to_pos[n, k] >= 0

    dy[token_to_pos[n, k]] = w[n, k] dout[n],  zero in rows of no token
    dw[n, k] = <dout[n], y[token_to_pos[n, k]]>,  zero where masked

All sums are in float32 whatever the rows are, and in a fixed order: every run gives the same bits.

Layout, forward: a program takes a token, or a tile of its row, and adds its K rows one after the other; the K
loads do not wait for one another. Backward, one kernel but ``expand_to_fused`` where there are no weights: a
program holds a tile of dout[n] and of its K rows of y at once, so that each is read once. The tile is
narrower for large K, and 8 warps share it: with 4, some tiles do not fit the registers. Rows of no token must
be zero and not merely unread, because the experts' weight gradient sums over whole segments, padding
included. Programs behind the N tokens clear them, for which they look at ``pos_to_expert``, an argument that
only the backward uses.
"""

import torch
from torch import Tensor

from kernels.expand_to_fused import PLACES, clear_padding, expand_to_fused
from kernels.switch import jit, op, tile, tl


def reduce_fused_torch(
    y_PD: Tensor, w_NK: Tensor | None, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor | None = None
) -> Tensor:
    """``reduce_fused`` in torch, one k after the other."""
    masked_NK, wide = token_to_pos_NK < 0, torch.promote_types(y_PD.dtype, torch.float32)
    # What is masked takes any row, of which there may be none.
    rows_PD = y_PD if len(y_PD) else y_PD.new_zeros(1, y_PD.shape[1])
    sum_ND = y_PD.new_zeros(len(token_to_pos_NK), y_PD.shape[1], dtype=wide)
    for k in range(token_to_pos_NK.shape[1]):
        pos_N, masked_N1 = token_to_pos_NK[:, k], masked_NK[:, k, None]
        term_ND = rows_PD.index_select(0, pos_N.clamp(min=0)).to(wide).masked_fill(masked_N1, 0)
        if w_NK is not None:
            term_ND = term_ND * w_NK[:, k, None].masked_fill(masked_N1, 0)
        sum_ND = sum_ND + term_ND
    return sum_ND.to(y_PD.dtype)


def reduce_fused_backward_torch(
    grad_ND: Tensor, y_PD: Tensor, w_NK: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor
) -> tuple[Tensor, Tensor]:
    """The same by torch's derivative of the twin."""
    return torch.func.vjp(lambda y, w: reduce_fused_torch(y, w, token_to_pos_NK), y_PD, w_NK)[1](grad_ND)


@jit
def _reduce(y, w, token_to_pos, out, D, K: tl.constexpr, WEIGHTED: tl.constexpr, TILE: tl.constexpr):
    n = tl.program_id(0)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(K):
        p = tl.load(token_to_pos + n * K + k).to(tl.int64)
        term = tl.load(y + p * D + d, mask=d < tl.where(p >= 0, D, 0), other=0).to(tl.float32)
        if WEIGHTED:
            # A masked term is zero even where its weight is NaN or inf.
            term *= tl.load(w + n * K + k, mask=p >= 0, other=0)
        total += term
    tl.store(out + n.to(tl.int64) * D + d, total.to(out.dtype.element_ty), mask=d < D)


def _launch(
    out_ND: Tensor, y_PD: Tensor, w_NK: Tensor | None, token_to_pos_NK: Tensor, *_: Tensor | None
) -> None:
    (N, D), K, weighted = out_ND.shape, token_to_pos_NK.shape[1], w_NK is not None
    if N * D:
        size = tile(D, 2048)
        inputs = y_PD, w_NK if weighted else y_PD, token_to_pos_NK
        _reduce[N, -(-D // size)](*inputs, out_ND, D, K=K, WEIGHTED=weighted, TILE=size)


@jit
def _reduce_backward(
    grad,
    y,
    w,
    token_to_pos,
    pos_to_expert,
    dy,
    dw,
    N,
    P,
    D,
    K: tl.constexpr,
    WIDE_K: tl.constexpr,
    TILE: tl.constexpr,
    PLACES: tl.constexpr,
):
    n = tl.program_id(0)
    if n < N:
        k = tl.arange(0, WIDE_K)
        p = tl.load(token_to_pos + n * K + k, mask=k < K, other=-1).to(tl.int64)
        real = p >= 0
        weight = tl.load(w + n * K + k, mask=real, other=0).to(tl.float32)
        dot = tl.zeros((WIDE_K,), tl.float32)
        for first in range(0, D, TILE):
            d = first + tl.arange(0, TILE)
            g = tl.load(grad + n.to(tl.int64) * D + d, mask=d < D, other=0).to(tl.float32)
            place, inside = p[:, None] * D + d[None, :], real[:, None] & (d < D)[None, :]
            row = tl.load(y + place, mask=inside, other=0).to(tl.float32)
            dot += tl.sum(tl.where(inside, row * g[None, :], 0), axis=1)
            tl.store(dy + place, (weight[:, None] * g[None, :]).to(dy.dtype.element_ty), mask=inside)
        tl.store(dw + n * K + k, dot, mask=k < K)
    else:
        for first in range(0, D, TILE):
            d = first + tl.arange(0, TILE)
            clear_padding(dy, pos_to_expert, (n - N) * PLACES, P, D, d, TILE, PLACES)


def _launch_backward(gradients: tuple[Tensor, Tensor], *inputs: Tensor) -> None:
    (P, D), (N, K) = (x.shape for x in gradients)
    programs = N + -(-P // PLACES)
    if programs:
        wide = tile(K)
        sizes = dict(K=K, WIDE_K=wide, TILE=tile(D, 4096 // wide), PLACES=PLACES, num_warps=8)
        _reduce_backward[programs,](*inputs, *gradients, N, P, D, **sizes)


@op("reduce_fused", _launch, reduce_fused_torch)
def reduce_fused(
    y_PD: Tensor, w_NK: Tensor | None, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor | None = None
) -> Tensor:
    """The rows (N, D) that tokens get from ``y_PD``, in its dtype; zeros for a token masked everywhere.

    ``w_NK``: float32 weights, or None for ones. ``token_to_pos_NK``: int32 or int64, -1 where masked; such a
    term is left out, whatever its weight. Rows of no token are not read, NaN in them does not matter.
    ``pos_to_expert_P`` says which rows those are, -1; without it the backward finds out, in some small
    launches more. Differentiable once in ``y_PD`` and ``w_NK``. Raises ``ValueError`` for shapes that do not
    fit.
    """
    if (
        y_PD.dim() != 2
        or token_to_pos_NK.dim() != 2
        or (w_NK is not None and w_NK.shape != token_to_pos_NK.shape)
    ):
        raise ValueError(
            f"reduce_fused: y {tuple(y_PD.shape)} must be (P, D); token_to_pos "
            f"{tuple(token_to_pos_NK.shape)} and w {None if w_NK is None else tuple(w_NK.shape)} both (N, K)"
        )
    return y_PD.new_empty(token_to_pos_NK.shape[0], y_PD.shape[1])


@op("reduce_fused_backward", _launch_backward, reduce_fused_backward_torch)
def reduce_fused_backward(
    grad_ND: Tensor, y_PD: Tensor, w_NK: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of ``y_PD`` and ``w_NK``, in their dtypes."""
    return y_PD.new_empty(y_PD.shape), w_NK.new_empty(w_NK.shape)


def _remember(ctx, inputs, output) -> None:
    y_PD, w_NK, token_to_pos_NK, pos_to_expert_P = inputs
    ctx.rows = y_PD.shape[0]
    ctx.save_for_backward(None if w_NK is None else y_PD, w_NK, token_to_pos_NK, pos_to_expert_P)


def _adjoint(ctx, grad_ND: Tensor):
    y_PD, w_NK, token_to_pos_NK, pos_to_expert_P = ctx.saved_tensors
    if pos_to_expert_P is None:
        # Row P takes what is masked, and is cut off.
        taken_P = token_to_pos_NK.new_full((ctx.rows + 1,), -1)
        places = torch.where(token_to_pos_NK < 0, ctx.rows, token_to_pos_NK).flatten().long()
        pos_to_expert_P = taken_P.index_fill(0, places, 0)[: ctx.rows].contiguous()
    if w_NK is None:
        return expand_to_fused(grad_ND, token_to_pos_NK, pos_to_expert_P), None, None, None
    return *reduce_fused_backward(grad_ND, y_PD, w_NK, token_to_pos_NK, pos_to_expert_P), None, None


reduce_fused.register_autograd(_adjoint, setup_context=_remember)
