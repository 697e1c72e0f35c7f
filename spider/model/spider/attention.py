"""Multi-head latent attention (DeepSeek-V2) with decoupled RoPE, causal.

Keys and values of all heads are made from one small latent, and position lives in a separate key that all
heads share::

    [c_kv; k_r] = W_a x          [k_nope; v] = W_b RMS(c_kv)
    q = [q_nope; RoPE(q_r)]      k = [k_nope; RoPE(k_r)]      scale (d_nope + d_rope)^-1/2

The product itself is torch's SDPA; where ``v_dim = nope_dim + rope_dim`` it runs the fused kernel on every
device.

Generation keeps only ``RMS(c_kv)`` and ``RoPE(k_r)`` of each position, not keys and values a head, and never
makes those: ``W_b`` is applied to the query and to the weighted sum of latents instead (DeepSeek-V2 calls it
absorbed), ``q_nope . (W_k c) = (W_k^T q_nope) . c`` and ``sum_t p_t W_v c_t = W_v sum_t p_t c_t``.

Shapes: B batch, T positions (bytes or patches), N new ones of them, D features, H heads, C latent width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.layers import Linear, RMSNorm
from spider.model.spider.config import AttentionConfig


class Rope(NamedTuple):
    """Cosine and sine of every position's angles, each (T, d_rope / 2)."""

    cos: Tensor
    sin: Tensor

    def part(self, start: int, end: int) -> Rope:
        """The angles of positions start..end-1."""
        return Rope(self.cos[start:end], self.sin[start:end])


def rope_table(length: int, dim: int, base: float, device: torch.device) -> Rope:
    """Angles ``t * base^(-2i/dim)`` of positions 0..length-1, in float32."""
    frequency = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    return Rope(angle.cos(), angle.sin())


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs ``(x_i, x_{i + dim/2})`` of the last axis; ``x`` is (..., T, d_rope)."""
    cos, sin = rope.cos.to(x.dtype), rope.sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``softmax(q k^T / sqrt(d)) v`` over this and earlier positions; all (B, H, T, d).

    SDPA, except for short windows in bf16 on a CPU: there its kernel is slower, forward and backward, than
    the products written out (benchmarks/cpu_step.py).
    """
    B, H, T, d = q.shape
    keeps_weights = T <= 512  # longer windows have too many of them
    if not (q.device.type == "cpu" and q.dtype == torch.bfloat16 and keeps_weights):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    later_TT = torch.full((T, T), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    q, k, v = (x.reshape(B * H, T, -1) for x in (q, k, v))
    weight = torch.baddbmm(later_TT, q, k.mT, alpha=d**-0.5).softmax(-1)
    return torch.bmm(weight, v).view(B, H, T, -1)


class LayerCache:
    """What a layer keeps of earlier positions, in one loop: ``[RMS(c_kv); RoPE(k_r)]`` of each, in one buffer
    of a fixed length, and the last inputs of its Engram's convolution, on which the next look back."""

    def __init__(self, positions: int) -> None:
        self.positions, self.length = positions, 0
        self._buffer: Tensor | None = None
        self._past_BPD: Tensor | None = None

    def latents(self, new_BNK: Tensor) -> Tensor:
        """Take N positions in; returns all of them, (B, length, C + d_rope)."""
        if self._buffer is None:
            self._buffer = new_BNK.new_empty(len(new_BNK), self.positions, new_BNK.shape[2])
        start, self.length = self.length, self.length + new_BNK.shape[1]
        self._buffer[:, start : self.length] = new_BNK
        return self._buffer[:, : self.length]

    def convolved(self, new_BND: Tensor, past: int) -> Tensor:
        """The new inputs behind the ``past`` ones before them, zeros where there were none."""
        before = self._past_BPD
        seen = F.pad(new_BND, (0, 0, past, 0)) if before is None else torch.cat([before, new_BND], dim=1)
        self._past_BPD = seen[:, seen.shape[1] - past :]
        return seen


class LatentAttention(nn.Module):
    def __init__(self, dim: int, config: AttentionConfig, eps: float) -> None:
        super().__init__()
        self.config = c = config
        self.q = Linear(dim, c.heads * (c.nope_dim + c.rope_dim))
        self.kv_a = Linear(dim, c.kv_lora_rank + c.rope_dim)
        self.kv_norm = RMSNorm(c.kv_lora_rank, eps)
        self.kv_b = Linear(c.kv_lora_rank, c.heads * (c.nope_dim + c.v_dim))
        self.out = Linear(c.heads * c.v_dim, dim, std=0.0)

    def forward(self, x_BTD: Tensor, rope: Rope, cache: LayerCache | None = None) -> Tensor:
        """Attend; with a ``cache`` the positions of ``x_BTD`` and ``rope`` follow those that it holds."""
        c = self.config
        B, T, _ = x_BTD.shape
        q_BHTK = self.q(x_BTD).view(B, T, c.heads, -1).transpose(1, 2)
        q_nope, q_rope = q_BHTK.split([c.nope_dim, c.rope_dim], dim=-1)
        q_rope = rotate(q_rope, rope)
        latent, k_rope = self.kv_a(x_BTD).split([c.kv_lora_rank, c.rope_dim], dim=-1)
        latent, k_rope = self.kv_norm(latent), rotate(k_rope, rope)
        if cache is None:
            kv_BHTK = self.kv_b(latent).view(B, T, c.heads, -1).transpose(1, 2)
            k_nope, v = kv_BHTK.split([c.nope_dim, c.v_dim], dim=-1)
            k = torch.cat([k_nope, k_rope[:, None].expand(-1, c.heads, -1, -1)], dim=-1)
            out_BHTV = causal_attention(torch.cat([q_nope, q_rope], dim=-1), k, v)
        else:
            seen_BTK = cache.latents(torch.cat([latent, k_rope.to(latent.dtype)], dim=-1))
            out_BHTV = self._absorbed(q_nope, q_rope, seen_BTK)
        return self.out(out_BHTV.transpose(1, 2).reshape(B, T, -1))

    def _absorbed(self, q_nope_BHNK: Tensor, q_rope_BHNK: Tensor, seen_BTK: Tensor) -> Tensor:
        """Attention of the last N positions over all T, on the latents themselves: (B, H, N, d_v)."""
        c = self.config
        (B, H, N, _), T = q_nope_BHNK.shape, seen_BTK.shape[1]
        to_k_HKC, to_v_HVC = self.kv_b.weight.view(H, -1, c.kv_lora_rank).split([c.nope_dim, c.v_dim], dim=1)
        q_BHNK = torch.cat([q_nope_BHNK @ to_k_HKC, q_rope_BHNK], dim=-1)
        # All heads share keys and values, so that heads and positions are the rows of one product.
        score_BHNT = (q_BHNK.flatten(1, 2) @ seen_BTK.mT).view(B, H, N, T) * (c.nope_dim + c.rope_dim) ** -0.5
        if N > 1:
            later_NT = torch.ones(N, T, dtype=torch.bool, device=seen_BTK.device).triu(T - N + 1)
            score_BHNT = score_BHNT.masked_fill(later_NT, -torch.inf)
        mixed_BRC = score_BHNT.softmax(-1).flatten(1, 2) @ seen_BTK[..., : c.kv_lora_rank]
        return mixed_BRC.view(B, H, N, -1) @ to_v_HVC.mT
