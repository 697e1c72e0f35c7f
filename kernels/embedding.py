"""Embedding lookup whose gradient is deterministic on a GPU, also under ``torch.compile``.

    y[n] = table[id[n]]          dtable[v] = sum of dy[n] over the n with id[n] = v, in rising order

torch's own gradient on a GPU sorts the ids and adds the rows of each id in a fixed order. ``torch.compile``
decomposes it into ``tl.atomic_add`` on floats, whose order, and so whose rounding, differs between runs. A
custom op is not decomposed. On a CPU torch's own lookup is used. There the gradient of a table that its
optimizer updates ``by_rows`` holds only the rows that were looked up, if they are few (`FEW`): it is sparse.

Where the same ids look up several tables, `sort_once` sorts them for all (torch sorts them for each). Equal
ids are then neighbours in the order. They are cut into pieces of at most `PIECE`, so no program adds many
rows of a frequent id. One kernel sums the rows of each piece, in float32, and one the pieces of each id.
Every sum has a fixed order.

Letters: N ids, V rows of a table, D features, P pieces (an upper bound; the last ones are empty).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.segment_sum import launch_sum
from kernels.switch import use_triton

PIECE = 32
"""Most rows that one program adds."""
FEW = 4
"""A table has more than so many rows for each id of a lookup whose gradient is sparse."""


class Sorted(NamedTuple):
    """Ids, and what the gradients of all tables that they look up share."""

    ids: Tensor
    order_N: Tensor
    """int64, places of the ids in rising order of the ids; equal ones keep their order."""
    piece_P1: Tensor
    """int64, where each piece begins in this order, and the end."""
    first_V1: Tensor
    """int64, first piece of each id, and the end."""


def sort_once(ids: Tensor, table_VD: Tensor) -> Tensor | Sorted:
    """Return ``ids`` for `embedding` in several tables of as many rows as ``table_VD``: sorted, where that
    serves a gradient."""
    return _sort(ids, len(table_VD)) if _is_on_gpu(table_VD) and torch.is_grad_enabled() else ids


def _sort(ids: Tensor, V: int) -> Sorted:
    sorted_N, order_N = ids.flatten().to(torch.int32).sort(stable=True)
    N, device = len(order_N), ids.device
    start_V1 = torch.searchsorted(sorted_N, torch.arange(V + 1, dtype=torch.int32, device=device))
    first_V1 = F.pad(((start_V1.diff() + PIECE - 1) // PIECE).cumsum(0), (1, 0))
    p_P1 = torch.arange(min(N, V) + N // PIECE + 1, device=device)
    v_P1 = (torch.searchsorted(first_V1, p_P1, right=True) - 1).clamp(max=V - 1)
    piece_P1 = (start_V1[v_P1] + PIECE * (p_P1 - first_V1[v_P1])).clamp(max=N)
    return Sorted(ids, order_N, piece_P1, first_V1)


def embedding(ids: Tensor | Sorted, table_VD: Tensor) -> Tensor:
    """Return the rows (..., D) of ``table_VD`` at ``ids`` (...), int64 in 0..V-1; differentiable once in the
    table."""
    if isinstance(ids, Sorted):
        return _embedding(ids.ids, table_VD, *ids[1:])
    if _is_on_gpu(table_VD):
        return _embedding(ids, table_VD)
    few = _few(ids, table_VD)
    return F.embedding(ids.clone() if few else ids, table_VD, sparse=few)  # a sparse gradient keeps the ids


def embedding_sum(ids: Tensor, table_VD: Tensor) -> Tensor:
    """Return the sums (..., D) of the rows of ``table_VD`` at ``ids`` (..., O), as ``sum(-2)`` adds them."""
    # torch adds features by 64 in the order of the rows, and what is left over in another.
    in_order = table_VD.dtype == torch.float32 and table_VD.shape[1] % 64 == 0
    if table_VD.device.type != "cpu" or not in_order or torch.compiler.is_compiling():
        return embedding(ids, table_VD).sum(-2)
    # One pass, and nothing as large as the rows is kept for the gradient.
    few, ids_NO = _few(ids, table_VD), ids.flatten(0, -2)
    sum_ND = F.embedding_bag(ids_NO.clone() if few else ids_NO, table_VD, mode="sum", sparse=few)
    return sum_ND.view(*ids.shape[:-1], -1)


def _few(ids: Tensor, table_VD: Tensor) -> bool:
    by_rows = getattr(table_VD, "by_rows", False) and not torch.compiler.is_compiling()
    return by_rows and len(table_VD) > FEW * ids.numel()


def _is_on_gpu(table_VD: Tensor) -> bool:
    return table_VD.is_cuda


@torch.library.custom_op("spider::embedding", mutates_args=())
def _embedding(
    ids: Tensor,
    table_VD: Tensor,
    order_N: Tensor | None = None,
    piece_P1: Tensor | None = None,
    first_V1: Tensor | None = None,
) -> Tensor:
    return F.embedding(ids, table_VD)


@_embedding.register_fake
def _(ids, table_VD, order_N=None, piece_P1=None, first_V1=None):
    return table_VD.new_empty(*ids.shape, table_VD.shape[1])


@torch.library.custom_op("spider::embedding_backward", mutates_args=())
def _embedding_backward(
    dy: Tensor,
    ids: Tensor,
    rows: int,
    order_N: Tensor | None = None,
    piece_P1: Tensor | None = None,
    first_V1: Tensor | None = None,
) -> Tensor:
    if piece_P1 is None or first_V1 is None or not use_triton(dy):
        return torch.ops.aten.embedding_dense_backward(dy, ids, rows, -1, False)
    sum_PD = dy.new_empty(len(piece_P1) - 1, dy.shape[-1], dtype=torch.float32)
    launch_sum(sum_PD, dy, order_N, piece_P1)
    dtable_VD = dy.new_empty(rows, dy.shape[-1])
    launch_sum(dtable_VD, sum_PD, None, first_V1)
    return dtable_VD


@_embedding_backward.register_fake
def _(dy, ids, rows, order_N=None, piece_P1=None, first_V1=None):
    return dy.new_empty(rows, dy.shape[-1])


def _remember(ctx, inputs, output) -> None:
    ids, table_VD, *order = inputs
    ctx.rows = len(table_VD)
    ctx.save_for_backward(ids, *order)


def _adjoint(ctx, dy: Tensor):
    ids, *order = ctx.saved_tensors
    return None, _embedding_backward(dy.contiguous(), ids, ctx.rows, *order), None, None, None


_embedding.register_autograd(_adjoint, setup_context=_remember)
