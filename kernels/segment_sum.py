"""Segments, runs of contiguous rows: sum the rows of each, and copy a row to all rows of its segment.

    segment_sum:     out[m] = sum of x[n] over edge[m] <= n < edge[m + 1]

    segment_expand:  out[n] = z[m] for edge[m] <= n < edge[m + 1];  0 before edge[0] and from edge[M] on

Each is the other's adjoint. Sums are in float32 and in a fixed order. Unlike ``index_add`` they need no
atomic operations, and every run gives the same bits. NaN and inf stay in their own segment.

Layout: a program of the sum takes a tile of a segment's features and adds ROWS rows at a time, so their loads
do not wait for one another. A program of the expansion copies a tile of a row.
"""

import torch
from torch import Tensor

from kernels.switch import check_shapes, jit, op, tile, tl

ROWS = 4
"""Rows of a segment that a program loads at once."""


def segment_sum_torch(x_ND: Tensor, segment_N: Tensor, edge_S: Tensor) -> Tensor:
    """Compute ``segment_sum`` in torch: rows of no segment go to a row past the end, which is cut off."""
    M = len(edge_S) - 1
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    sum_MD = x_ND.new_zeros(M + 1, x_ND.shape[1], dtype=wide)
    return sum_MD.index_add(0, segment_N, x_ND.to(wide))[:M].to(x_ND.dtype)


def segment_expand_torch(z_MD: Tensor, segment_N: Tensor, edge_S: Tensor) -> Tensor:
    """Compute ``segment_expand`` in torch: rows of no segment read zeros after the last one."""
    return torch.nn.functional.pad(z_MD, (0, 0, 0, 1)).index_select(0, segment_N)


@jit
def _sum(x, order, edge, out, D, ORDERED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    m = tl.program_id(0)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    first, end = tl.load(edge + m), tl.load(edge + m + 1)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(first, end, ROWS):
        n = start + tl.arange(0, ROWS)
        inside = (n < end)[:, None] & (d < D)[None, :]
        if ORDERED:
            n = tl.load(order + n, mask=n < end, other=0)
        rows = tl.load(x + n[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0)
        total += tl.sum(rows.to(tl.float32), axis=0)
    tl.store(out + m.to(tl.int64) * D + d, total.to(out.dtype.element_ty), mask=d < D)


@jit
def _expand(z, segment, out, M, D, TILE: tl.constexpr):
    n = tl.program_id(0)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m = tl.load(segment + n).to(tl.int64)
    row = tl.load(z + m * D + d, mask=d < tl.where(m < M, D, 0), other=0)
    tl.store(out + n.to(tl.int64) * D + d, row, mask=d < D)


def launch_sum(out_MD: Tensor, x_ND: Tensor, order_N: Tensor | None, edge_S: Tensor) -> None:
    """Launch the kernel of ``segment_sum``, on the rows of ``x_ND`` in this order (None: their own)."""
    M, D = out_MD.shape
    if M * D:
        size, ordered = tile(D, 1024), order_N is not None
        _sum[M, -(-D // size)](x_ND, order_N, edge_S, out_MD, D, ORDERED=ordered, ROWS=ROWS, TILE=size)


def _launch_sum(out_MD: Tensor, x_ND: Tensor, _: Tensor, edge_S: Tensor) -> None:
    launch_sum(out_MD, x_ND, None, edge_S)


def _launch_expand(out_ND: Tensor, z_MD: Tensor, segment_N: Tensor, _: Tensor) -> None:
    N, D = out_ND.shape
    if N * D:
        size = tile(D, 2048)
        _expand[N, -(-D // size)](z_MD, segment_N, out_ND, len(z_MD), D, TILE=size)


@op("segment_sum", _launch_sum, segment_sum_torch)
def segment_sum(x_ND: Tensor, segment_N: Tensor, edge_S: Tensor) -> Tensor:
    """Return the sums (M, D) of the rows of each segment, in the dtype of ``x_ND``; zero for an empty one.

    It is differentiable in ``x_ND``.

    Args:
        segment_N: int64, segment of each row, consistent with the edges; M for rows of no segment.
        edge_S: int64, M + 1 ascending row numbers from 0 to N.

    Raises:
        ValueError: the shapes do not fit.
    """
    check_shapes("segment_sum", x_ND=x_ND, segment_N=segment_N, edge_S=edge_S)
    return x_ND.new_empty(len(edge_S) - 1, x_ND.shape[1])


@op("segment_expand", _launch_expand, segment_expand_torch)
def segment_expand(z_MD: Tensor, segment_N: Tensor, edge_S: Tensor) -> Tensor:
    """Return for each of N rows the row of ``z_MD`` of its segment, (N, D); zeros for rows of no segment."""
    check_shapes("segment_expand", z_MD=z_MD, segment_N=segment_N, edge_S=edge_S)
    if len(edge_S) != len(z_MD) + 1:
        raise ValueError(f"segment_expand: {len(edge_S)} edges do not fit z_MD {tuple(z_MD.shape)}, M + 1 do")
    return z_MD.new_empty(len(segment_N), z_MD.shape[1])


def _remember(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:])


torch.library.register_autograd(
    segment_sum,
    lambda ctx, grad_MD: (segment_expand(grad_MD, *ctx.saved_tensors), None, None),
    setup_context=_remember,
)
torch.library.register_autograd(
    segment_expand,
    lambda ctx, grad_ND: (segment_sum(grad_ND, *ctx.saved_tensors), None, None),
    setup_context=_remember,
)
