"""What a Spider is made of: its parts, in the order in which they are made, its embedding and its head.

Apart from `spider.model.spider.model`, which runs them, so that what reads a stream (``incremental.py``) or
counts (``cost.py``) needs this alone.

Shapes: B batch, T bytes, D features, V vocabulary, N recurrent layers, R loops, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model import interface
from spider.model.layers import RMSNorm, SwiGLU, embedding_like, rms_norm
from spider.model.spider.attention import LatentAttention, LatentCache, Rope, rope_table
from spider.model.spider.chunking import Chunker, Patches
from spider.model.spider.config import SpiderConfig
from spider.model.spider.engram import NgramEmbedding, primes_from
from spider.model.spider.recurrence import RecurrentCore


@dataclass
class Trace:
    """What the parts did with each byte and patch, for those who want to look inside.

    Attributes:
        patches: where the batch was cut.
        loops_BL: loops each slot used; None without halting.
        counts_NRE: tokens each expert was given, (layers, loops, experts) int64; None without experts.
    """

    patches: Patches
    loops_BL: Tensor | None
    counts_NRE: Tensor | None


class DenseBlock(nn.Module):
    """``x += attention(RMS x); x += SwiGLU(RMS x)``."""

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = LatentAttention(config.hidden, config.attention, config.norm_eps)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.ffn = SwiGLU(config.hidden, config.ffn_hidden)

    def forward(self, x_BTD: Tensor, rope: Rope, cache: LatentCache | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, cache)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Body(interface.Model):
    """The modules of a Spider; their names and order are those of its checkpoints."""

    config: SpiderConfig

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.config = config
        D, engram = config.hidden, config.engram
        self.embed_tokens = nn.Parameter(torch.empty(self.tokens.size, D))
        per_layer = len(engram.orders) * engram.heads
        primes = primes_from(engram.table_size, per_layer * len(engram.layers) + len(engram.byte_orders))
        of_layer = {layer: primes[i * per_layer :][:per_layer] for i, layer in enumerate(engram.layers)}
        of_bytes = primes[per_layer * len(engram.layers) :]
        self.ngram_embedding = NgramEmbedding(D, engram.byte_orders, of_bytes) if of_bytes else None
        self.prelude = nn.ModuleList(DenseBlock(config) for _ in range(config.prelude_layers))
        self.chunker = Chunker(D, config.boundary, config.norm_eps)
        self.core = RecurrentCore(config, of_layer)
        self.coda = nn.ModuleList(DenseBlock(config) for _ in range(config.coda_layers))
        self.final_norm = RMSNorm(D, config.norm_eps)

    def init_weights(self) -> None:
        nn.init.normal_(self.embed_tokens, std=0.02)
        embedding_like(self.embed_tokens)

    def rope(self, length: int) -> Rope:
        """The angles of positions 0..length-1."""
        a = self.config.attention
        return rope_table(length, a.rope_dim, a.rope_base, self.embed_tokens.device)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """What enters the prelude, (B, T, D)."""
        h_BTD = rms_norm(F.embedding(tokens_BT, self.embed_tokens), self.config.norm_eps)
        return h_BTD if self.ngram_embedding is None else h_BTD + self.ngram_embedding(tokens_BT)

    def head(self, h_BTD: Tensor) -> Tensor:
        """What leaves the coda as logits (B, T, V), through the transposed embedding."""
        return F.linear(self.final_norm(h_BTD), self.embed_tokens)
