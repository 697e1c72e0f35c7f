"""Embedding lookup whose gradient is deterministic on a GPU, also under ``torch.compile``.

    y[n] = table[id[n]]          dtable[v] = sum of dy[n] over the n with id[n] = v, in rising order

torch's own gradient on a GPU sorts the ids and adds the rows of each id in a fixed order. ``torch.compile``
decomposes it into ``tl.atomic_add`` on floats, whose order, and so whose rounding, differs between runs. A
custom op is not decomposed. On a CPU torch's own lookup is used.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(ids: Tensor, table_VD: Tensor) -> Tensor:
    """Return the rows (..., D) of ``table_VD`` at ``ids`` (...), int64 in 0..V-1; differentiable once in the
    table."""
    return _embedding(ids, table_VD) if _is_on_gpu(table_VD) else F.embedding(ids, table_VD)


def _is_on_gpu(table_VD: Tensor) -> bool:
    return table_VD.is_cuda


@torch.library.custom_op("spider::embedding", mutates_args=())
def _embedding(ids: Tensor, table_VD: Tensor) -> Tensor:
    return F.embedding(ids, table_VD)


@_embedding.register_fake
def _(ids, table_VD):
    return table_VD.new_empty(*ids.shape, table_VD.shape[1])


@torch.library.custom_op("spider::embedding_backward", mutates_args=())
def _embedding_backward(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(dy, ids, rows, -1, False)


@_embedding_backward.register_fake
def _(dy, ids, rows):
    return dy.new_empty(rows, dy.shape[-1])


def _remember(ctx, inputs, output) -> None:
    ids, table_VD = inputs
    ctx.rows = len(table_VD)
    ctx.save_for_backward(ids)


def _adjoint(ctx, dy: Tensor):
    (ids,) = ctx.saved_tensors
    return None, _embedding_backward(dy.contiguous(), ids, ctx.rows)


_embedding.register_autograd(_adjoint, setup_context=_remember)
