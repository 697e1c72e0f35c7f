"""Compare latent attention with its equation, computed head by head."""

from __future__ import annotations

import pytest
import torch

from spider.model import layers
from spider.model.layers import causal_attention, rope_table, rotate
from spider.model.spider.attention import LatentAttention
from spider.model.spider.config import AttentionConfig


def attention() -> LatentAttention:
    torch.manual_seed(0)
    config = AttentionConfig(heads=2, nope_dim=4, rope_dim=6, v_dim=10, kv_lora_rank=8)
    module = LatentAttention(16, config)
    for part in module.modules():
        if hasattr(part, "init_weights"):
            part.init_weights()
    torch.nn.init.normal_(module.out.weight)
    return module.double()


def test_equals_the_equation_written_out():
    module, T = attention(), 7
    x = torch.randn(1, T, 16, dtype=torch.float64)
    rope = rope_table(T, 6, 10_000.0, x.device)
    latent, k_rope = module.kv_a(x[0]).split([8, 6], dim=-1)
    kv = module.kv_b(module.kv_norm(latent))
    q_all = module.q(x[0])
    heads = []
    for h in range(2):
        q = torch.cat([q_all[:, h * 10 : h * 10 + 4], rotate(q_all[:, h * 10 + 4 : h * 10 + 10], rope)], -1)
        k = torch.cat([kv[:, h * 14 : h * 14 + 4], rotate(k_rope, rope)], -1)
        v = kv[:, h * 14 + 4 : h * 14 + 14]
        scores = (q @ k.T / 10**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(module(x, rope)[0], module.out(torch.cat(heads, -1)))


@pytest.mark.parametrize("T", [64, 91, 256])
def test_the_two_halves_of_a_window_attend_as_the_whole_does(T, monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, T, 8, dtype=torch.bfloat16) for _ in range(3))
    whole = causal_attention(q, k, v)
    monkeypatch.setattr(layers, "_SMALL_SCORES", 0)
    k[:, :, T // 2 :] *= torch.linspace(1, 2, T - T // 2, dtype=torch.bfloat16)[:, None]
    halves = causal_attention(q, k, v)
    torch.testing.assert_close(halves[:, :, : T // 2], whole[:, :, : T // 2], rtol=0, atol=0.02)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(halves.double(), exact, rtol=0, atol=0.03)
