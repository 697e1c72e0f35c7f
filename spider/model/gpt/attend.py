"""Causal attention over windows and documents, and over what a stream has kept of its past.

What a position may see is decided once a forward pass for all layers of one window (`view`), and with it one
of three ways to the same sums:

    offsets   a window, or documents, in two bytes on a GPU: flash attention, told where documents begin
    causal    neither a window nor documents: SDPA's causal kernel
    mask      else: SDPA with a mask

A window W is in ids: a position sees itself and W before it, W + 1 keys. Documents stand one behind the other
in a row, each in one piece; padding is a document like any other.

Shapes: B rows, T positions, S keys, H heads, G heads of keys and values, K features of a head, N new
positions of a stream, P documents of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spider.model.layers import causal_attention


class View(NamedTuple):
    """What the positions of a batch see."""

    window: int | None = None
    mask: Tensor | None = None
    """bool, (T, S) or (B, 1, T, S); None: all before, or where ``offset_P`` is given what that says."""
    offset_P: Tensor | None = None
    """int32, (P + 1,): where each document begins in all rows joined, and the end. Documents that are not
    there begin at the end."""


def has_offsets(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel takes windows and documents by offsets: flash attention, in two bytes on a GPU."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and narrow and torch.cuda.get_device_capability(device)[0] >= 8


def view(
    shape: tuple[int, int],
    window: int | None,
    segments_BT: Tensor | None,
    most: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> View:
    """Of a batch of shape (B, T), multiplied in ``dtype``.

    ``segments_BT`` says which document each position belongs to. At most ``most`` of them, padding not
    counted, are in a row; where that is not known, it is the mask's way: a kernel's launch has to be of a
    size that no batch changes.
    """
    B, T = shape
    window = None if window is None or window >= T - 1 else window
    if window is None and segments_BT is None:
        return View()
    if has_offsets(device, dtype) and (segments_BT is None or most is not None):
        if segments_BT is None or most is None:
            return View(window, offset_P=torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device))
        return View(window, offset_P=document_offsets(segments_BT, B * (most + 1)))
    mask = causal_mask(T, T, window, device)
    if segments_BT is not None:
        mask = mask & (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])
    return View(window, mask)


def view_behind(kept: int, N: int, window: int | None, device: torch.device) -> View:
    """Of N new positions of a stream, behind ``kept`` that a `Cache` holds for them."""
    sees_all = window is None or kept + N <= window + 1
    if N == 1 or (sees_all and not kept):
        return View()
    return View(window, causal_mask(N, kept + N, window, device))


def causal_mask(T: int, S: int, window: int | None, device: torch.device) -> Tensor:
    """Which of S keys, the last T of them its own, each of T positions sees: bool (T, S)."""
    at_T1, key_S = torch.arange(S - T, S, device=device)[:, None], torch.arange(S, device=device)
    seen_TS = key_S <= at_T1
    return seen_TS if window is None else seen_TS & (key_S >= at_T1 - window)


def document_offsets(segments_BT: Tensor, most: int) -> Tensor:
    """`View.offset_P` of at most so many documents in all; found on the device, of a size that no batch
    changes. More documents are an error of the caller that is not seen here."""
    first_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    first_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    number_M = first_BT.flatten().cumsum(0) - 1
    wanted_P = torch.arange(most + 1, device=segments_BT.device)
    return torch.searchsorted(number_M, wanted_P, out_int32=True)


def attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, seen: View) -> Tensor:
    """``softmax(q k^T / sqrt(K)) v`` over what is seen, (B, T, H, K). Heads that share keys are rows of one
    product where a stream is read id by id; else they get copies, for torch 2.11's kernel with offsets knows
    no sharing."""
    B, T, H, _ = q_BTHK.shape
    if T == 1:
        q_BGRK = q_BTHK.view(B, k_BSGK.shape[2], -1, q_BTHK.shape[3])
        k, v = k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2)
        return _attend_one(q_BGRK, k, v).reshape(q_BTHK.shape)
    if (each := H // k_BSGK.shape[2]) > 1:
        k_BSGK, v_BSGK = (x.repeat_interleave(each, dim=2) for x in (k_BSGK, v_BSGK))
    if (offset_P := seen.offset_P) is not None:
        from torch.nn.attention.varlen import varlen_attn  # which imports the compiler

        q, k, v = (x.flatten(0, 1) for x in (q_BTHK, k_BSGK, v_BSGK))
        window = (-1 if seen.window is None else seen.window, 0)
        out_MHK = varlen_attn(q, k, v, offset_P, offset_P, T, T, window_size=window)
        assert isinstance(out_MHK, Tensor), "nothing but the result was asked for"
        return out_MHK.unflatten(0, (B, T))
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    if seen.mask is None:
        return causal_attention(q, k, v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.mask).transpose(1, 2)


def _attend_one(q_BGRK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
    """Of a single position. On a CPU in wide numbers by two products: SDPA's kernel has no use for several
    threads there, and reads many keys half as fast (benchmarks/generation.py)."""
    if q_BGRK.device.type != "cpu" or q_BGRK.dtype == torch.bfloat16:
        return F.scaled_dot_product_attention(q_BGRK, k_BGSK, v_BGSK)
    weight_BGRS = (q_BGRK * q_BGRK.shape[-1] ** -0.5 @ k_BGSK.mT).softmax(-1)
    return weight_BGRS @ v_BGSK


class Cache:
    """Keys and values of a stream's earlier positions, of a layer and a pass through it, in one buffer of a
    fixed length: of ``context`` positions, or where a window ends sooner twice what that shows, so that it is
    moved only each time that it is full. A head's positions lie one behind the other."""

    def __init__(self, context: int, window: int | None) -> None:
        self.shown = context if window is None else min(window, context)
        self.room = min(context, 2 * self.shown + 1)
        self.length = 0
        self._buffer: Tensor | None = None

    def extend(self, k_1NGK: Tensor, v_1NGK: Tensor) -> tuple[Tensor, Tensor]:
        """Take N positions in; returns what they and the window's before them are, (1, kept + N, G, K)."""
        new = torch.stack([k_1NGK, v_1NGK]).transpose(2, 3)
        if self._buffer is None:
            self._buffer = new.new_empty(2, 1, new.shape[2], self.room, new.shape[4])
        start, end = self.length, self.length + new.shape[3]
        before = max(0, start - self.shown)
        if end <= self.room:
            self._buffer[..., start:end, :], self.length = new, end
            seen = self._buffer[..., before:end, :]
        else:
            seen = torch.cat([self._buffer[..., before:start, :], new], dim=3)
            self.length = min(self.shown, seen.shape[3])
            self._buffer[..., : self.length, :] = seen[..., -self.length :, :]
        k_1SGK, v_1SGK = seen.transpose(2, 3)
        return k_1SGK, v_1SGK
