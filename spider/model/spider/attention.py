"""Multi-head latent attention (DeepSeek-V2) with decoupled RoPE, causal.

Keys and values of all heads come from one small latent. A separate key, which all heads share, carries the
position::

    [c_kv; k_r] = W_a x          [k_nope; v] = W_b RMS(c_kv)
    q = [q_nope; RoPE(q_r)]      k = [k_nope; RoPE(k_r)]      scale (d_nope + d_rope)^-1/2

The product itself is torch's SDPA; with ``v_dim = nope_dim + rope_dim`` it runs the fused kernel on every
device. The core's rows are windows of several lengths (`spider.model.spider.chunking`). On a GPU, in two
bytes, the fused kernel separates them by offsets; elsewhere they are spread out for the product alone.

Generation caches only ``RMS(c_kv)`` and ``RoPE(k_r)`` of each position. Keys and values per head are never
computed: ``W_b`` is applied to the query and to the weighted sum of latents instead (absorption, in
DeepSeek-V2), ``q_nope . (W_k c) = (W_k^T q_nope) . c`` and ``sum_t p_t W_v c_t = W_v sum_t p_t c_t``.

Shapes: B batch, T positions (bytes or patches), M rows of the core, N new positions of one stream, D
features, H heads. C is the width of the latent, K and V are those of a key and of a value. X stands for the
features of all heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.layers import (
    Linear,
    RMSNorm,
    Rope,
    attention_by_offsets,
    causal_attention,
    has_offsets,
    rotate,
)
from spider.model.spider.chunking import PatchLayout
from spider.model.spider.config import AttentionConfig


def takes_offsets(q: Tensor, heads: AttentionConfig) -> bool:
    """Tell whether a kernel separates windows by offsets for heads of these widths."""
    head = heads.nope_dim + heads.rope_dim
    return head == heads.v_dim and head % 8 == 0 and head <= 256 and has_offsets(q.device, q.dtype)


class LayerCache:
    """Cache of a layer in one loop of a stream.

    It holds ``[RMS(c_kv); RoPE(k_r)]`` of each earlier position, in one buffer of a fixed length, and the
    last inputs of the layer's Engram convolution.
    """

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.length = 0
        self._buffer: Tensor | None = None
        self._past_PD: Tensor | None = None

    def latents(self, new_NK: Tensor) -> Tensor:
        """Append N positions and return all of them, (length, C + d_rope)."""
        if self._buffer is None:
            self._buffer = new_NK.new_empty(self.positions, new_NK.shape[1])
        start = self.length
        self.length = start + len(new_NK)
        self._buffer[start : self.length] = new_NK
        return self._buffer[: self.length]

    def convolved(self, new_ND: Tensor, past: int) -> Tensor:
        """Return the ``past`` earlier inputs (zeros before the first) followed by the new ones."""
        before = self._past_PD
        seen = F.pad(new_ND, (0, 0, past, 0)) if before is None else torch.cat([before, new_ND])
        self._past_PD = seen[len(seen) - past :]
        return seen


class LatentAttention(nn.Module):
    """Multi-head latent attention; see the module's docstring."""

    def __init__(self, dim: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = c = config
        self.q = Linear(dim, c.heads * (c.nope_dim + c.rope_dim))
        self.kv_a = Linear(dim, c.kv_lora_rank + c.rope_dim)
        self.kv_norm = RMSNorm(c.kv_lora_rank)
        self.kv_b = Linear(c.kv_lora_rank, c.heads * (c.nope_dim + c.v_dim))
        self.out = Linear(c.heads * c.v_dim, dim, std=0.0)

    def forward(
        self, x: Tensor, rope: Rope, windows: PatchLayout | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Attend within each window.

        Args:
            x: windows (B, T, D), or rows (M, D) of ``windows``. With a ``cache``: N new positions, (N, D).
            rope: the angles of the positions of a window, or of the N new ones.
        """
        c = self.config
        q = self.q(x)
        latent, k_rope = self.kv_a(x).split([c.kv_lora_rank, c.rope_dim], dim=-1)
        latent = self.kv_norm(latent)
        if cache is not None:
            return self.out(self._absorbed(q, latent, k_rope, rope, cache))
        kv = self.kv_b(latent)
        if windows is not None and windows.offset_S is not None and takes_offsets(q, c):
            q, k, v = self._heads(q, kv, k_rope, rope.at(windows.number_M), heads_first=False)
            return self.out(attention_by_offsets(q, k, v, windows.offset_S, windows.longest).flatten(1))
        if windows is not None:
            q, kv, k_rope = (windows.pad_to_windows(y) for y in (q, kv, k_rope))
        q, k, v = self._heads(q, kv, k_rope, rope, heads_first=True)
        out_BHTV = causal_attention(q, k, v)
        out_BTX = out_BHTV.transpose(1, 2).flatten(2)
        return self.out(out_BTX if windows is None else windows.gather(out_BTX))

    def _heads(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, rope: Rope, *, heads_first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values per head: (M, H, d), or (B, H, T, d) with ``heads_first``."""
        c = self.config
        q, kv = (y.unflatten(-1, (c.heads, -1)) for y in (q, kv))
        if heads_first:
            q, kv = q.transpose(1, 2), kv.transpose(1, 2)
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], dim=-1)
        k_nope, v = kv.split([c.nope_dim, c.v_dim], dim=-1)
        k_rope = rotate(k_rope[:, None], rope).expand(*k_nope.shape[:-1], -1)
        return torch.cat([q_nope, rotate(q_rope, rope)], dim=-1), torch.cat([k_nope, k_rope], dim=-1), v

    def _absorbed(
        self, q_NX: Tensor, latent_NC: Tensor, k_rope: Tensor, rope: Rope, cache: LayerCache
    ) -> Tensor:
        """Attend from N positions to the cached ones and to themselves, on the latents; return (N, H V)."""
        c = self.config
        N = len(q_NX)
        k_rope = rotate(k_rope, rope).to(latent_NC.dtype)
        seen_TK = cache.latents(torch.cat([latent_NC, k_rope], dim=-1))
        q_HNK = q_NX.unflatten(-1, (c.heads, -1)).transpose(0, 1)
        q_nope, q_rope = q_HNK.split([c.nope_dim, c.rope_dim], dim=-1)
        to_k_HKC, to_v_HVC = self.kv_b.weight.unflatten(0, (c.heads, -1)).split([c.nope_dim, c.v_dim], dim=1)
        q_HNK = torch.cat([q_nope @ to_k_HKC, rotate(q_rope, rope)], dim=-1)
        # All heads share keys and values, so heads and positions form the rows of one product.
        score_HNT = (q_HNK.flatten(0, 1) @ seen_TK.mT).unflatten(0, (c.heads, N))
        score_HNT = score_HNT * (c.nope_dim + c.rope_dim) ** -0.5
        if N > 1:
            T = len(seen_TK)
            later_NT = torch.ones(N, T, dtype=torch.bool, device=seen_TK.device).triu(T - N + 1)
            score_HNT = score_HNT.masked_fill(later_NT, -torch.inf)
        mixed_RC = score_HNT.softmax(-1).flatten(0, 1) @ seen_TK[:, : c.kv_lora_rank]
        return (mixed_RC.unflatten(0, (c.heads, N)) @ to_v_HVC.mT).transpose(0, 1).flatten(1)
