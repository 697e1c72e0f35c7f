"""Estimate of the bytes that a Spider's forward pass keeps for its backward pass.

It is derived and not measured on the meta device, because autocast does not support that device, and because
it also serves compiled passes, which keep less than eager ones.

Uncompiled, in elements per byte (prelude, coda) or row of the core, spare rows included, per layer and loop:

    a norm       2 D wide, 1 D narrow                                     its input, normalised, weighted
    attention    2 H (nope + rope) + H (nope + v) + 2 H v + 3 kv + rope   q, k, kv, output twice, latent

    SwiGLU       4 F                                                      gate and up, silu(gate), product
    MoE          K (2 D + 4 F_expert) + 4 F_shared                        rows in and out of K experts

    Engram       9 D wide        a loop around the layers   5 D wide

A compiler recomputes cheap operations by itself. What it keeps was counted in the traced step of spider-1b
(docs/LOG.md). S is the width of the stream:

    a layer      D of S                                 its input
                 3 D                                    inputs of attention and feed-forward, and the
                                                        output of attention

    attention    2 H (nope + rope) + 2 H v + 2 kv       q, k, v, output; for bytes D more
    SwiGLU       3 F

    MoE          K (2 D + 3 F_expert) + 3 F_shared      and D wide for the router of a wide S

    Engram       3 D of S        a loop around the layers   D, D wide

Wide elements are fp32. Narrow ones take 2 bytes under autocast, else 4. A recomputed layer keeps its input.
Selective recomputation also keeps the outputs of its products and of attention::

    attention    H (nope + rope) + H (nope + v) + H v + kv + rope + D
    SwiGLU       2 F (+ D)       MoE    K (D + 2 F_expert) + 2 F_shared (+ D)     (D): uncompiled

Compiled, it also keeps the router's 3 E wide products, if S is narrow. One layer at a time has the rest.
Tests compare this with what real forward passes keep. The copies of weights that autocast makes, temporaries
and the allocator's overhead are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from spider.model.spider.config import SpiderConfig
from spider.tokens import BYTES

_VOCABULARY = BYTES.size


@dataclass(frozen=True)
class Position:
    """Bytes kept per position of a layer."""

    dense: float
    core: float
    engram: float


@dataclass(frozen=True)
class Kept:
    """Bytes kept by a forward pass: per layer, given what it recomputes, and around the layers."""

    config: SpiderConfig
    whole: Position
    """A layer without recomputation."""
    block: Position
    """A dense layer, with its recomputation."""
    core: Position
    """A recurrent layer, with its recomputation."""
    loop: float
    """Bytes per row and loop around the layers."""
    row: float
    """Bytes per row around the loops."""
    byte: float
    """Bytes per byte of text around the core."""

    def of(self, bytes_: int, rows: int, loops: int) -> int:
        """Return the bytes of a pass with ``loops`` loops that have gradients."""
        c = self.config
        D = c.hidden
        whole = self.whole
        layer = self.core.core + self.core.engram * len(c.engram.layers) / c.recurrence.layers
        total = rows * (self.row + loops * (self.loop + c.recurrence.layers * layer))
        total += bytes_ * (self.byte + (c.prelude_layers + c.coda_layers) * self.block.dense)
        # The backward pass recomputes one layer at a time; its input is already counted.
        again = [0.0]
        if c.recurrence.of_core != "none":
            again.append(rows * (whole.core + whole.engram - self.core.core + D * 4))
        if c.recurrence.of_blocks != "none":
            again.append(bytes_ * (whole.dense - self.block.dense + D * 4))
        return round(total + max(again))


def kept(c: SpiderConfig, size: int) -> Kept:
    """Return the estimate of an uncompiled pass; ``size`` is that of a narrow element."""
    D, a, moe = c.hidden, c.attention, c.moe
    heads = 2 * (a.nope_dim + a.rope_dim) + (a.nope_dim + a.v_dim) + 2 * a.v_dim
    attention = a.heads * heads + 3 * a.kv_lora_rank + a.rope_dim
    ffn = experts = 4 * c.ffn_hidden
    if moe is not None:
        experts = moe.top_k * (2 * D + 4 * moe.expert_hidden) + 4 * moe.shared_hidden
    norms = 4 * D * 4 + 2 * D * size
    attended, fed, chosen = _products(c)
    ways = {
        "none": Position(norms + (attention + ffn) * size, norms + (attention + experts) * size, 9 * D * 4),
        "selective": Position(D * 4 + (attended + fed + D) * size, D * 4 + (attended + chosen + D) * size, 0),
        "full": Position(D * 4, D * 4, 0),
    }
    # Embedding, boundaries, down and up, the head's norm; then the logits and their gradient.
    around = 8 * D * 4 + 2 * _VOCABULARY * 4
    r = c.recurrence
    return Kept(c, ways["none"], ways[r.of_blocks], ways[r.of_core], 5 * D * 4, 0, around)


def kept_compiled(c: SpiderConfig, size: int) -> Kept:
    """Return the estimate of a compiled pass; ``size`` is that of a narrow element."""
    D, a, moe, r = c.hidden, c.attention, c.moe, c.recurrence
    stream = size if c.stream == "narrow" else 4
    attention = 3 * D + 2 * a.heads * (a.nope_dim + a.rope_dim + a.v_dim) + 2 * a.kv_lora_rank
    ffn = experts = 3 * c.ffn_hidden
    router = cut = 0
    if moe is not None:
        experts = moe.top_k * (2 * D + 3 * moe.expert_hidden) + 3 * moe.shared_hidden
        router = D * 4 if stream > size else 0
        cut = 3 * moe.experts * 4 if stream == 2 else 0
    attended, fed, chosen = _products(c)
    ways = {
        "none": Position(
            D * stream + (attention + D + ffn) * size,
            D * stream + (attention + experts) * size + router,
            3 * D * stream,
        ),
        "selective": Position(
            D * stream + (attended + fed) * size, D * stream + (attended + chosen) * size + cut, 0
        ),
        "full": Position(D * stream, D * stream, 0),
    }
    loop = D * 4 + (D * size if r.lora_rank else 0)
    # Input of the core and its mean; for each Engram the looked-up rows, keys before and after their norm,
    # and values.
    looked_up = len(c.engram.ORDERS) * c.engram.HEADS * c.engram.head_dim
    row = 2 * D * 4 + (3 * D + looked_up) * size * len(c.engram.layers)
    # Embedding, inputs of boundaries and head, input of the coda; then the logits and their gradient.
    byte = D * 4 + 2 * D * stream + 2 * (D + c.boundary.hidden) * size + 2 * _VOCABULARY * 4
    return Kept(c, ways["none"], ways[r.of_blocks], ways[r.of_core], loop, row, byte)


def _products(c: SpiderConfig) -> tuple[int, int, int]:
    """Return the output widths of the products of attention, and of a dense and a core feed-forward."""
    D, a, moe = c.hidden, c.attention, c.moe
    attended = a.heads * (2 * a.nope_dim + a.rope_dim + 2 * a.v_dim) + a.kv_lora_rank + a.rope_dim + D
    fed = chosen = 2 * c.ffn_hidden
    if moe is not None:
        chosen = moe.top_k * (D + 2 * moe.expert_hidden) + 2 * moe.shared_hidden
    return attended, fed, chosen
