"""Expand and reduce: copy each token's row to the rows that its experts read, and sum them back into one.

With p = token_to_pos[n, k], which is negative where a choice is masked::

    expand_to_fused    out[p] = x[n]        zero in rows p' with pos_to_expert[p'] < 0

    reduce_fused       out[n] = sum over k, ascending, of w[n, k] y[p]        masked terms are left out

                       + shared[n] + residual[n]        if they are given

    its gradients      dy[p] = w[n, k] dout[n]        zero in rows of no token

                       dw[n, k] = <dout[n], y[p]>        zero where masked

Without weights and addends each is the adjoint of the other, so both ops are in this file. All sums are in
float32 for every dtype of the rows, and in a fixed order, so every run gives the same bits.

Layout of expand: the first N programs take one token each, hold a tile of its row in registers and store it K
times. Each program after them looks at 32 rows of the result and clears those that are padding. The padding
therefore costs no launch of its own, and the rest of the result is not cleared. Row offsets are int64,
because P D may exceed 2^31.

Layout of reduce: a program takes a token, or a tile of its row, and adds its K rows one after the other. The
K loads do not wait for one another. In bfloat16 it moves 2 N D (K + 1) bytes, and 2 N D more for each addend.
A separate addition would move 4 N D more, because the sum is written and read again.

Layout of its backward pass: with weights it is one kernel. A program holds a tile of dout[n] and of its K
rows of y at once, so each is read once. The tile is narrower for large K, and 8 warps share it, because with
4 some tiles exceed the registers. Rows of no token must be zero and not merely unread, because the experts'
weight gradient sums over whole segments, padding included. The programs after the N tokens clear them by
``pos_to_expert``, an argument that only the backward pass uses.
"""

from functools import reduce

import torch
from torch import Tensor

from kernels.switch import check_shapes, jit, op, tile, tl

PLACES = 32
"""Rows of the result that one program searches for padding and clears."""


def expand_to_fused_torch(x_ND: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor) -> Tensor:
    """Compute ``expand_to_fused`` in torch: masked copies go to a row past the end, which is cut off."""
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


def _launch_expand(out_PD: Tensor, x_ND: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor) -> None:
    (N, K), (P, D) = token_to_pos_NK.shape, out_PD.shape
    if P * D:
        size = tile(D, 2048)
        grid = (N + -(-P // PLACES), -(-D // size))
        _expand[grid](x_ND, token_to_pos_NK, pos_to_expert_P, out_PD, N, P, D, K=K, TILE=size, PLACES=PLACES)


@op("expand_to_fused", _launch_expand, expand_to_fused_torch)
def expand_to_fused(x_ND: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor) -> Tensor:
    """Return the fused rows (P, D) of ``x_ND``, in its dtype; rows of no token are zero.

    It is differentiable in ``x_ND`` and copies NaN and inf.

    Args:
        token_to_pos_NK: int32 or int64, each token's K rows of the result, -1 where masked.
        pos_to_expert_P: int32 or int64, -1 at padding. Any other row belongs to exactly one token, as
            ``get_fused_mapping`` guarantees.

    Raises:
        ValueError: the shapes do not fit.
    """
    check_shapes(
        "expand_to_fused", x_ND=x_ND, token_to_pos_NK=token_to_pos_NK, pos_to_expert_P=pos_to_expert_P
    )
    return x_ND.new_empty(pos_to_expert_P.shape[0], x_ND.shape[1])


def reduce_fused_torch(
    y_PD: Tensor,
    w_NK: Tensor | None,
    token_to_pos_NK: Tensor,
    pos_to_expert_P: Tensor,
    shared_ND: Tensor | None = None,
    residual_ND: Tensor | None = None,
) -> Tensor:
    """Compute ``reduce_fused`` in torch, one term after the other."""
    masked_NK = token_to_pos_NK < 0
    wide = torch.promote_types(y_PD.dtype, torch.float32)
    # A masked term reads any row, so there must be one.
    rows_PD = y_PD if len(y_PD) else y_PD.new_zeros(1, y_PD.shape[1])
    sum_ND = y_PD.new_zeros(len(token_to_pos_NK), y_PD.shape[1], dtype=wide)
    for k in range(token_to_pos_NK.shape[1]):
        pos_N, masked_N1 = token_to_pos_NK[:, k], masked_NK[:, k, None]
        term_ND = rows_PD.index_select(0, pos_N.clamp(min=0)).to(wide).masked_fill(masked_N1, 0)
        if w_NK is not None:
            term_ND = term_ND * w_NK[:, k, None].masked_fill(masked_N1, 0)
        sum_ND = sum_ND + term_ND
    for addend_ND in (shared_ND, residual_ND):
        sum_ND = sum_ND if addend_ND is None else sum_ND + addend_ND
    return sum_ND.to(_dtype(y_PD, shared_ND, residual_ND))


def _dtype(*terms: Tensor | None) -> torch.dtype:
    return reduce(torch.promote_types, [term.dtype for term in terms if term is not None])


def reduce_fused_backward_torch(
    grad_ND: Tensor, y_PD: Tensor, w_NK: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``reduce_fused_backward`` by torch's derivative of the twin."""

    def forward(y_PD: Tensor, w_NK: Tensor) -> Tensor:
        return reduce_fused_torch(y_PD, w_NK, token_to_pos_NK, pos_to_expert_P)

    return torch.func.vjp(forward, y_PD, w_NK)[1](grad_ND)


@jit
def _reduce(y, w, token_to_pos, shared, residual, out, D, K: tl.constexpr, TILE: tl.constexpr):
    n = tl.program_id(0)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = n.to(tl.int64) * D + d
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(K):
        p = tl.load(token_to_pos + n * K + k).to(tl.int64)
        term = tl.load(y + p * D + d, mask=d < tl.where(p >= 0, D, 0), other=0).to(tl.float32)
        if w is not None:
            # A masked term is zero even where its weight is NaN or inf.
            term *= tl.load(w + n * K + k, mask=p >= 0, other=0)
        total += term
    if shared is not None:
        total += tl.load(shared + here, mask=d < D, other=0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + here, mask=d < D, other=0).to(tl.float32)
    tl.store(out + here, total.to(out.dtype.element_ty), mask=d < D)


def _launch_reduce(
    out_ND: Tensor,
    y_PD: Tensor,
    w_NK: Tensor | None,
    token_to_pos_NK: Tensor,
    _: Tensor,
    shared_ND: Tensor | None = None,
    residual_ND: Tensor | None = None,
) -> None:
    N, D = out_ND.shape
    if N * D:
        size = tile(D, 2048)
        tensors = y_PD, w_NK, token_to_pos_NK, shared_ND, residual_ND, out_ND
        _reduce[N, -(-D // size)](*tensors, D, K=token_to_pos_NK.shape[1], TILE=size)


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


@op("reduce_fused", _launch_reduce, reduce_fused_torch)
def reduce_fused(
    y_PD: Tensor,
    w_NK: Tensor | None,
    token_to_pos_NK: Tensor,
    pos_to_expert_P: Tensor,
    shared_ND: Tensor | None = None,
    residual_ND: Tensor | None = None,
) -> Tensor:
    """Return the rows (N, D) of the tokens, in the widest dtype of ``y_PD`` and the addends; without addends
    zeros for a token masked everywhere.

    It is differentiable once in all floating tensors. Rows of no token are not read, so they may hold NaN.

    Args:
        w_NK: float32 weights, or None for ones.
        token_to_pos_NK: int32 or int64, -1 where masked. A masked term is left out even if its weight is NaN.
        pos_to_expert_P: int32 or int64, -1 in rows of no token.
        shared_ND: added to the sum, and ``residual_ND`` after it.

    Raises:
        ValueError: the shapes do not fit.
    """
    check_shapes(
        "reduce_fused",
        y_PD=y_PD,
        w_NK=w_NK,
        token_to_pos_NK=token_to_pos_NK,
        pos_to_expert_P=pos_to_expert_P,
        shared_ND=shared_ND,
        residual_ND=residual_ND,
    )
    dtype = _dtype(y_PD, shared_ND, residual_ND)
    return y_PD.new_empty(token_to_pos_NK.shape[0], y_PD.shape[1], dtype=dtype)


@op("reduce_fused_backward", _launch_backward, reduce_fused_backward_torch)
def reduce_fused_backward(
    grad_ND: Tensor, y_PD: Tensor, w_NK: Tensor, token_to_pos_NK: Tensor, pos_to_expert_P: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``y_PD`` and ``w_NK``, in their dtypes."""
    return y_PD.new_empty(y_PD.shape), w_NK.new_empty(w_NK.shape)


def _save_expand(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:])


def _expand_adjoint(ctx, grad_PD: Tensor):
    token_to_pos_NK, pos_to_expert_P = ctx.saved_tensors
    return reduce_fused(grad_PD, None, token_to_pos_NK, pos_to_expert_P), None, None


torch.library.register_autograd(expand_to_fused, _expand_adjoint, setup_context=_save_expand)


def _save_reduce(ctx, inputs, output) -> None:
    y_PD, w_NK, token_to_pos_NK, pos_to_expert_P, *addends = inputs
    ctx.save_for_backward(None if w_NK is None else y_PD, w_NK, token_to_pos_NK, pos_to_expert_P)
    ctx.dtype, ctx.added = y_PD.dtype, [None if addend is None else addend.dtype for addend in addends]


def _reduce_adjoint(ctx, grad_ND: Tensor):
    y_PD, w_NK, token_to_pos_NK, pos_to_expert_P = ctx.saved_tensors
    added = [None if dtype is None else grad_ND.to(dtype) for dtype in ctx.added]
    grad_ND = grad_ND.to(ctx.dtype)
    if w_NK is None:
        return expand_to_fused(grad_ND, token_to_pos_NK, pos_to_expert_P), None, None, None, *added
    dy_PD, dw_NK = reduce_fused_backward(grad_ND, y_PD, w_NK, token_to_pos_NK, pos_to_expert_P)
    return dy_PD, dw_NK, None, None, *added


torch.library.register_autograd(reduce_fused, _reduce_adjoint, setup_context=_save_reduce)
