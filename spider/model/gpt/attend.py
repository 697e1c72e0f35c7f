"""Causal attention over windows and documents, and over the cached past of a stream.

What a position may see is decided once per forward pass, for all layers of one window (`view`). It selects
one of three ways to compute the same sums:

    offsets   windows or documents, in two bytes on a GPU: flash attention, given where documents begin
    causal    neither windows nor documents: SDPA's causal kernel
    mask      otherwise: SDPA with a mask

A window W is a number of tokens: a position sees itself and W earlier ones, W + 1 keys. The documents of a
row are contiguous, and padding counts as a document.

Shapes: B rows, T positions, S keys, H heads, G heads of keys and values, K features of a head, N new
positions of a stream, P documents of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spider.model.layers import attention_by_offsets, causal_attention, has_offsets


class View(NamedTuple):
    """Keys that the positions of a batch see."""

    window: int | None = None
    mask: Tensor | None = None
    """bool, (T, S) or (B, 1, T, S); None: all earlier positions, or what ``offset_P`` says."""
    offset_P: Tensor | None = None
    """int32, (P + 1,): beginning of each document in all rows joined, and the end. Documents beyond those of
    the batch begin at the end."""


def view(
    shape: tuple[int, int],
    window: int | None,
    document_BT: Tensor | None,
    most_documents: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> View:
    """Return the view of a batch of shape (B, T) that is multiplied in ``dtype``.

    Args:
        document_BT: number of each position's document within its row.
        most_documents: maximum number of documents in a row, without padding. If it is None, documents are
            separated by a mask, because the size of a kernel launch must not depend on the batch.
    """
    B, T = shape
    window = None if window is None or window >= T - 1 else window
    if window is None and document_BT is None:
        return View()
    if has_offsets(device, dtype):
        if document_BT is None:
            return View(window, offset_P=torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device))
        if most_documents is not None:
            return View(window, offset_P=document_offsets(document_BT, B * (most_documents + 1)))
    mask = causal_mask(T, T, window, device)
    if document_BT is not None:
        mask = mask & (document_BT[:, None, :, None] == document_BT[:, None, None, :])
    return View(window, mask)


def view_behind(cached: int, N: int, window: int | None, device: torch.device) -> View:
    """Return the view of N new positions of a stream that follow ``cached`` ones of a `Cache`."""
    sees_all = window is None or cached + N <= window + 1
    if N == 1 or (sees_all and not cached):
        return View()
    return View(window, causal_mask(N, cached + N, window, device))


def causal_mask(T: int, S: int, window: int | None, device: torch.device) -> Tensor:
    """Return which of S keys each of the last T positions sees: bool (T, S)."""
    query_T1 = torch.arange(S - T, S, device=device)[:, None]
    key_S = torch.arange(S, device=device)
    seen_TS = key_S <= query_T1
    return seen_TS if window is None else seen_TS & (key_S >= query_T1 - window)


def document_offsets(document_BT: Tensor, most: int) -> Tensor:
    """Return `View.offset_P` for at most ``most`` documents in all.

    It is computed on the device and its size does not depend on the batch. The caller must make sure that
    there are not more documents.
    """
    first_BT = torch.ones_like(document_BT, dtype=torch.bool)
    first_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    number_M = first_BT.flatten().cumsum(0) - 1
    wanted_P = torch.arange(most + 1, device=document_BT.device)
    return torch.searchsorted(number_M, wanted_P, out_int32=True)


def attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, seen: View) -> Tensor:
    """Return ``softmax(q k^T / sqrt(K)) v`` over what is seen, (B, T, H, K).

    Heads that share keys form the rows of one product if a stream is read token by token. Otherwise the keys
    are copied, because the offset kernel of torch 2.11 does not support sharing.
    """
    B, T, H, K = q_BTHK.shape
    G = k_BSGK.shape[2]
    if T == 1:
        q_BGRK = q_BTHK.view(B, G, -1, K)
        return _attend_one(q_BGRK, k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2)).reshape(q_BTHK.shape)
    if H > G:
        k_BSGK, v_BSGK = (x.repeat_interleave(H // G, dim=2) for x in (k_BSGK, v_BSGK))
    offset_P = seen.offset_P
    if offset_P is not None:
        q, k, v = (x.flatten(0, 1) for x in (q_BTHK, k_BSGK, v_BSGK))
        return attention_by_offsets(q, k, v, offset_P, T, seen.window).unflatten(0, (B, T))
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    if seen.mask is None:
        return causal_attention(q, k, v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.mask).transpose(1, 2)


def _attend_one(q_BGRK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
    """Attend from a single position.

    On a CPU in float32 it uses two products: SDPA's kernel runs on one thread there and reads many keys half
    as fast.
    """
    if q_BGRK.device.type != "cpu" or q_BGRK.dtype == torch.bfloat16:
        return F.scaled_dot_product_attention(q_BGRK, k_BGSK, v_BGSK)
    weight_BGRS = (q_BGRK * q_BGRK.shape[-1] ** -0.5 @ k_BGSK.mT).softmax(-1)
    return weight_BGRS @ v_BGSK


class Cache:
    """Keys and values of the earlier positions of R streams, for one layer and one run of it.

    They lie in one buffer of a fixed length, the positions of a head contiguous. The length is ``context``,
    or 2 W + 1 for a shorter window W, so the buffer is moved only when it is full.
    """

    def __init__(self, context: int, window: int | None) -> None:
        self.shown = context if window is None else min(window, context)
        self.capacity = min(context, 2 * self.shown + 1)
        self.length = 0
        self._buffer: Tensor | None = None

    def extend(self, k_RNGK: Tensor, v_RNGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append N positions; return their keys and values after those of the window, (R, cached + N, G,
        K)."""
        new = torch.stack([k_RNGK, v_RNGK]).transpose(2, 3)
        if self._buffer is None:
            self._buffer = new.new_empty(*new.shape[:3], self.capacity, new.shape[4])
        start = self.length
        end = start + new.shape[3]
        first = max(0, start - self.shown)
        if end <= self.capacity:
            self._buffer[..., start:end, :] = new
            self.length = end
            seen = self._buffer[..., first:end, :]
        else:
            seen = torch.cat([self._buffer[..., first:start, :], new], dim=3)
            self.length = min(self.shown, seen.shape[3])
            self._buffer[..., : self.length, :] = seen[..., -self.length :, :]
        k_RSGK, v_RSGK = seen.transpose(2, 3)
        return k_RSGK, v_RSGK

    def choose(self, row_R: Tensor) -> None:
        """Go on with these streams."""
        if self._buffer is not None:
            self._buffer = self._buffer[:, row_R]
