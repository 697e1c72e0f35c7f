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

Several streams are read at once. Each has as many bytes as the others, but patches of its own. So the rows
that a piece adds are windows as well, of the streams that get any (`Places`).

Shapes: B batch, T positions (bytes or patches), M rows of the core or of a piece, D features, H heads. C is
the width of the latent, K and V are those of a key and of a value. X stands for the features of all heads. R
streams, G of which get rows, at most L each; T positions of the longest of them.
"""

from __future__ import annotations

import torch
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
from spider.model.spider.chunking import PatchLayout, lay_out
from spider.model.spider.config import AttentionConfig


def takes_offsets(q: Tensor, heads: AttentionConfig) -> bool:
    """Tell whether a kernel separates windows by offsets for heads of these widths."""
    head = heads.nope_dim + heads.rope_dim
    return head == heads.v_dim and head % 8 == 0 and head <= 256 and has_offsets(q.device, q.dtype)


class Places:
    """Number of rows of each stream, bytes or patches, and where those of the newest piece are.

    The caches of all layers and loops share it. Each stream has at most ``limit`` rows.
    """

    windows: PatchLayout
    """Rows of the piece: a window for each of the G streams that get any."""
    stream_G: Tensor
    """Numbers of these streams."""
    rows_G: Tensor
    """Rows that each of them gets."""
    stream_M: Tensor
    """Stream of each row."""
    number_M: Tensor
    """Position of each row in its stream."""
    seen: int
    """T, the positions of the longest of these streams."""
    later_GL1T: Tensor | None
    """Whether a position comes after that of a row, or is not of its stream; None if none does."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.filled_R = [0]

    def extend(self, rows_R: list[int], device: torch.device) -> None:
        """Add so many rows to each stream, at least one in all."""
        going = [(r, rows, self.filled_R[r]) for r, rows in enumerate(rows_R) if rows]
        self.stream_G, self.rows_G, before_G = torch.tensor(going, device=device).unbind(1)
        longest, total = max(rows_R), sum(rows_R)
        self.windows = lay_out(self.rows_G, total, longest)
        self.stream_M = self.stream_G.repeat_interleave(self.rows_G, output_size=total)
        before_M = before_G.repeat_interleave(self.rows_G, output_size=total)
        self.number_M = before_M + self.windows.number_M
        self.filled_R = [filled + rows for filled, rows in zip(self.filled_R, rows_R, strict=True)]
        ends = {self.filled_R[r] for r, *_ in going}
        self.seen = max(ends)
        number_GL11 = self.windows.pad_to_windows(self.number_M)[:, :, None, None]
        alone = longest == len(ends) == 1
        self.later_GL1T = None if alone else torch.arange(self.seen, device=device) > number_GL11


class LayerCache:
    """Cache of a layer in one loop, of all streams.

    It holds ``[RMS(c_kv); RoPE(k_r)]`` of each earlier position, in one buffer of a fixed length, and the
    last inputs of the layer's Engram convolution.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._buffer: Tensor | None = None
        self._past_RPD: Tensor | None = None

    def latents(self, new_MK: Tensor) -> Tensor:
        """Keep the rows of the piece; return those of its streams, (G, T, C + d_rope)."""
        places = self.places
        if self._buffer is None:
            # Zeros, because a weight of zero times what no row has filled must be zero.
            self._buffer = new_MK.new_zeros(len(places.filled_R), places.limit, new_MK.shape[1])
        self._buffer[places.stream_M, places.number_M] = new_MK
        seen_RTK = self._buffer[:, : places.seen]
        return seen_RTK if len(places.stream_G) == len(seen_RTK) else seen_RTK[places.stream_G]

    def convolved(self, new_MD: Tensor, past: int) -> Tensor:
        """Return the ``past`` earlier inputs of each stream (zeros before the first) and then the new ones,
        (G, past + L, D)."""
        places = self.places
        if self._past_RPD is None:
            self._past_RPD = new_MD.new_zeros(len(places.filled_R), past, new_MD.shape[1])
        new_GLD = places.windows.pad_to_windows(new_MD)
        seen_GSD = torch.cat([self._past_RPD[places.stream_G], new_GLD], dim=1)
        last_GP = places.rows_G[:, None] + torch.arange(past, device=new_MD.device)
        self._past_RPD[places.stream_G] = seen_GSD.take_along_dim(last_GP[:, :, None], dim=1)
        return seen_GSD


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
            x: windows (B, T, D), or rows (M, D) of ``windows``. With a ``cache``: those of its piece.
            rope: the angles of the positions of a window. With a ``cache``: those of each row, `Rope.at`.
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
        self, q_MX: Tensor, latent_MC: Tensor, k_rope: Tensor, rope: Rope, cache: LayerCache
    ) -> Tensor:
        """Attend from the rows of a piece to the cached positions of their streams and to themselves, on the
        latents; return (M, H V)."""
        c, windows, later_GL1T = self.config, cache.places.windows, cache.places.later_GL1T
        k_rope = rotate(k_rope[:, None], rope)[:, 0].to(latent_MC.dtype)
        seen_GTK = cache.latents(torch.cat([latent_MC, k_rope], dim=-1))
        q_nope, q_rope = q_MX.unflatten(-1, (c.heads, -1)).split([c.nope_dim, c.rope_dim], dim=-1)
        to_k_HKC, to_v_HVC = self.kv_b.weight.unflatten(0, (c.heads, -1)).split([c.nope_dim, c.v_dim], dim=1)
        q_MHC = (q_nope.transpose(0, 1) @ to_k_HKC).transpose(0, 1)
        q_GLHK = windows.pad_to_windows(torch.cat([q_MHC, rotate(q_rope, rope)], dim=-1))
        # All heads share keys and values, so positions and heads form the rows of one product.
        score_GLHT = (q_GLHK.flatten(1, 2) @ seen_GTK.mT).unflatten(1, (-1, c.heads))
        score_GLHT = score_GLHT * (c.nope_dim + c.rope_dim) ** -0.5
        if later_GL1T is not None:
            score_GLHT = score_GLHT.masked_fill(later_GL1T, -torch.inf)
        mixed_GQC = score_GLHT.softmax(-1).flatten(1, 2) @ seen_GTK[..., : c.kv_lora_rank]
        mixed_MHC = windows.gather(mixed_GQC.unflatten(1, (-1, c.heads)))
        return (mixed_MHC.transpose(0, 1) @ to_v_HVC.mT).transpose(0, 1).flatten(1)
