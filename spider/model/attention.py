"""Multi-head latent attention (DeepSeek-V2) with decoupled RoPE, causal.

Keys and values of all heads are made from one small latent, and position lives in a separate key that all
heads share::

    [c_kv; k_r] = W_a x          [k_nope; v] = W_b RMS(c_kv)
    q = [q_nope; RoPE(q_r)]      k = [k_nope; RoPE(k_r)]      scale (d_nope + d_rope)^-1/2

A generator therefore needs to keep only ``c_kv`` and ``k_r`` per position, not keys and values per head.
The product itself is torch's SDPA; where ``v_dim = nope_dim + rope_dim`` it runs the fused kernel on every
device.

Shapes: B batch, T positions (bytes or patches), D features, H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.config import AttentionConfig
from spider.model.layers import Linear, RMSNorm

#: Longest window whose (T, T) weights are worth keeping.
_SHORT = 512


class Rope(NamedTuple):
    """Cosine and sine of every position's angles, each (T, d_rope / 2)."""

    cos: Tensor
    sin: Tensor


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
    if not (q.device.type == "cpu" and q.dtype == torch.bfloat16 and T <= _SHORT):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    later_TT = torch.full((T, T), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    q, k, v = (x.reshape(B * H, T, -1) for x in (q, k, v))
    weight = torch.baddbmm(later_TT, q, k.mT, alpha=d**-0.5).softmax(-1)
    return torch.bmm(weight, v).view(B, H, T, -1)


class LatentAttention(nn.Module):
    def __init__(self, dim: int, config: AttentionConfig, eps: float) -> None:
        super().__init__()
        self.config = c = config
        self.q = Linear(dim, c.heads * (c.nope_dim + c.rope_dim))
        self.kv_a = Linear(dim, c.kv_lora_rank + c.rope_dim)
        self.kv_norm = RMSNorm(c.kv_lora_rank, eps)
        self.kv_b = Linear(c.kv_lora_rank, c.heads * (c.nope_dim + c.v_dim))
        self.out = Linear(c.heads * c.v_dim, dim, std=0.0)

    def forward(self, x_BTD: Tensor, rope: Rope) -> Tensor:
        c = self.config
        B, T, _ = x_BTD.shape
        q_BHTK = self.q(x_BTD).view(B, T, c.heads, -1).transpose(1, 2)
        q_nope, q_rope = q_BHTK.split([c.nope_dim, c.rope_dim], dim=-1)
        latent, k_rope = self.kv_a(x_BTD).split([c.kv_lora_rank, c.rope_dim], dim=-1)
        kv_BHTK = self.kv_b(self.kv_norm(latent)).view(B, T, c.heads, -1).transpose(1, 2)
        k_nope, v = kv_BHTK.split([c.nope_dim, c.v_dim], dim=-1)
        k_rope = rotate(k_rope, rope)[:, None].expand(-1, c.heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rope, rope)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        out_BHTV = causal_attention(q, k, v)
        return self.out(out_BHTV.transpose(1, 2).reshape(B, T, -1))
