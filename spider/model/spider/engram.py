"""Engram: a memory of hashed byte n-grams (DeepSeek, conditional memory).

Hash (``kernels/engram_hash.py`` has the equations). The n-gram that ends at a byte is mixed with fixed odd
64-bit multipliers. Each head of an order reduces the mix modulo its own prime, so a collision in all heads at
once is rare. Bytes before the document's BOS, or before the window, read as PAD. All arithmetic is on
integers, so every device finds the same row.

At patch level (`Engram`), an n-gram ends at the patch's closing byte. Its rows ``m`` are looked up, and their
key and value computed, once per forward pass; every loop gates them with its own state (W_k, W_v are
matrices, the RMS norms have weights)::

    s = <RMS(W_k m), RMS(h)> / sqrt(D)      g = sigmoid(sign(s) sqrt|s|)
    v = g W_v m                             h += v + SiLU(conv(RMS(v)))

conv is depthwise and causal over patches, and starts at zero. One kernel computes ``v``
(``kernels/engram_gate.py``), a second the sum (``kernels/engram_conv.py``). At byte level (`NgramEmbedding`,
optional) rows of width D are added to the byte embedding. In small models this gives the first layers
statistics that would otherwise cost depth.

Shapes: B batch, T bytes, M rows of the core (patches of all windows), D features. O is the number of orders,
G = O * heads that of tables, W the features of all rows of a position, K the taps of the convolution.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.embedding import embedding, embedding_sum
from kernels.engram_conv import engram_conv, engram_conv_torch
from kernels.engram_gate import engram_gate, engram_gate_torch
from kernels.engram_hash import engram_hash, engram_hash_torch
from kernels.switch import use_triton
from spider.model.layers import NORM_EPS, Linear, RMSNorm
from spider.model.spider.attention import LayerCache
from spider.model.spider.config import EngramConfig
from spider.tokens import BYTES

_MASK = (1 << 64) - 1
#: Taps of the convolution over patches (the paper's).
CONV_TAPS = 4


def multiplier(index: int) -> int:
    """Return the odd signed 64-bit multiplier of the byte ``index`` positions back (splitmix64 of the
    index)."""
    z = (index + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    z = (z ^ (z >> 31)) | 1
    return z - (1 << 64) if z >> 63 else z


def primes_from(start: int, count: int) -> list[int]:
    """Return the first ``count`` primes that are at least ``start``."""
    numbers = itertools.count(max(start, 2))
    primes = (n for n in numbers if all(n % d for d in range(2, int(n**0.5) + 1)))
    return list(itertools.islice(primes, count))


class Tables(nn.Module):
    """Hash tables, back to back in one embedding of ``sum(primes)`` rows."""

    def __init__(self, orders: list[int], primes: list[int], dim: int, std: float) -> None:
        super().__init__()
        self.orders = orders
        self.primes = primes
        self.std = std
        self.weight = nn.Parameter(torch.empty(sum(primes), dim))

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def rows(self, tokens_BT: Tensor) -> Tensor:
        """Return the row of every table for the n-grams that end at each byte: int64 (B, T, G), the heads of
        an order side by side. No n-gram reaches across a document's BOS."""
        multipliers = [multiplier(i) for i in range(max(self.orders))]
        hashed = engram_hash if use_triton(tokens_BT) else engram_hash_torch
        return hashed(tokens_BT, self.orders, multipliers, self.primes, BYTES.bos, BYTES.pad)

    def forward(self, rows_G: Tensor) -> Tensor:
        """Return the contents of rows (..., G): (..., G, dim)."""
        return embedding(rows_G, self.weight)


class NgramEmbedding(nn.Module):
    """Sum of one D-wide row per order, times sqrt(D), for every byte: (B, T, D). It starts at zero.

    A row occurs in few batches, and Adam moves it by at most the learning rate in each. The factor lets it
    reach the unit scale of the byte embedding within those few steps.
    """

    def __init__(self, dim: int, orders: list[int], primes: list[int]) -> None:
        super().__init__()
        self.tables = Tables(orders, primes, dim, std=0.0)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        sum_BTD = embedding_sum(self.tables.rows(tokens_BT), self.tables.weight)
        return sum_BTD * sum_BTD.shape[-1] ** 0.5


class Retrieved(NamedTuple):
    """``RMS(W_k m)`` and ``W_v m`` of one Engram for this batch; the same in every loop."""

    key_MD: Tensor
    value_MD: Tensor


class Engram(nn.Module):
    """N-gram lookup of one layer of the core; see the module's docstring."""

    def __init__(self, dim: int, config: EngramConfig, primes: list[int]) -> None:
        super().__init__()
        width = len(primes) * config.head_dim
        self.tables = Tables(list(config.ORDERS), primes, config.head_dim, std=1.0)
        self.key = Linear(width, dim)
        self.value = Linear(width, dim)
        self.key_norm = RMSNorm(dim)
        self.query_norm = RMSNorm(dim)
        self.value_norm = RMSNorm(dim)
        self.conv = nn.Parameter(torch.empty(dim, 1, CONV_TAPS))

    def init_weights(self) -> None:
        nn.init.zeros_(self.conv)

    def read(self, tokens_BT: Tensor, close_M: Tensor, filled_M: Tensor) -> Retrieved:
        """Look up the n-grams that end at bytes ``close_M``, numbered through all windows.

        Rows outside ``filled_M`` (null patches and spare rows) lack a closing byte and read zeros.
        """
        rows_MG = self.tables.rows(tokens_BT).flatten(0, 1)[close_M]
        m_MW = self.tables(rows_MG).flatten(-2) * filled_M[:, None]
        return Retrieved(self.key_norm(self.key(m_MW)), self.value(m_MW))

    def forward(
        self, h_MD: Tensor, retrieved: Retrieved, number_M: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        """Return what to add to ``h_MD``, rows with the numbers ``number_M`` in their windows.

        With a ``cache`` they follow the rows that it has seen of their streams.
        """
        triton = use_triton(h_MD)
        gate = engram_gate if triton else engram_gate_torch
        conv = engram_conv if triton else engram_conv_torch
        v_MD = gate(h_MD, retrieved.key_MD, retrieved.value_MD, self.query_norm.weight, NORM_EPS)
        taps_KD = self.conv[:, 0].flip(1).T
        if cache is None:
            return conv(v_MD, number_M, taps_KD, self.value_norm.weight, NORM_EPS)
        # Prepend the rows that the taps look back on, zeros before the first.
        past = CONV_TAPS - 1
        v_GSD = cache.convolved(v_MD, past)
        G, S, _ = v_GSD.shape
        number_N = torch.arange(S, device=v_MD.device).repeat(G)
        out_ND = conv(v_GSD.flatten(0, 1), number_N, taps_KD, self.value_norm.weight, NORM_EPS)
        return cache.places.windows.gather(out_ND.view(G, S, -1)[:, past:])
