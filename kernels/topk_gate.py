"""Top-k gate: the k experts with the largest scores, in descending order, ties by the lower index.

NaN counts as larger than every number, as in ``torch.sort``, and -0 equals 0. The k indices are always
different.

Layout: a program takes as many rows as fill a tile of 2048 scores. It packs a score and its index into one
int64 key, which sorts in the wanted order, so a maximum needs no rule for ties. It takes the maximum k times.
Sorting whole rows would be more work for the small k of a gate.
"""

import torch
from torch import Tensor

from kernels.switch import jit, op, tile, tl


def topk_gate_torch(scores_NE: Tensor, k: int) -> Tensor:
    """Compute ``topk_gate`` by a stable sort, because ``torch.topk`` leaves the order of ties undefined."""
    return scores_NE.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()


@jit
def sortable(scores, e, E, WIDE_E: tl.constexpr):
    """Return int64 keys of the float32 ``scores`` (ROWS, WIDE_E) at columns ``e``, distinct within a row.

    A larger key is a better choice. Columns from E on get the lowest key.
    """
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(scores != scores, 0x7FFFFFFF, order)
    keys = (order.to(tl.int64) << 32) | (WIDE_E - 1 - e).to(tl.int64)
    return tl.where(e < E, keys, -0x8000000000000000)


@jit
def take_best(keys, WIDE_E: tl.constexpr):
    """Return the column of each row's best key, and the keys without it."""
    best = tl.max(keys, axis=1)
    e = WIDE_E - 1 - (best & 0xFFFFFFFF).to(tl.int32)
    return e, tl.where(keys == best[:, None], -0x8000000000000000, keys)


@jit
def _topk(scores, chosen, N, E, K: tl.constexpr, WIDE_E: tl.constexpr, ROWS: tl.constexpr):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, WIDE_E)[None, :]
    inside = (n < N)[:, None] & (e < E)
    row = tl.load(scores + n[:, None].to(tl.int64) * E + e, mask=inside, other=0).to(tl.float32)
    keys = sortable(row, e, E, WIDE_E)
    for k in tl.static_range(K):
        best, keys = take_best(keys, WIDE_E)
        tl.store(chosen + n.to(tl.int64) * K + k, best.to(tl.int64), mask=n < N)


def _launch(chosen_NK: Tensor, scores_NE: Tensor, k: int) -> None:
    N, E = scores_NE.shape
    if N:
        wide = tile(E)
        rows = max(2048 // wide, 1)
        _topk[-(-N // rows),](scores_NE, chosen_NK, N, E, K=k, WIDE_E=wide, ROWS=rows)


@op("topk_gate", _launch, topk_gate_torch)
def topk_gate(scores_NE: Tensor, k: int) -> Tensor:
    """Return the int64 indices (N, k) of the k largest scores of each row, without a derivative.

    Raises:
        ValueError: k is not in 1..E.
    """
    if scores_NE.dim() != 2 or not 1 <= k <= scores_NE.shape[1]:
        raise ValueError(f"topk_gate: k = {k} must be in 1..E for scores (N, E) {tuple(scores_NE.shape)}")
    return scores_NE.new_empty(scores_NE.shape[0], k, dtype=torch.int64)
