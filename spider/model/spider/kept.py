"""How many bytes a Spider's forward pass keeps for its backward pass.

An estimate, in elements for each byte (prelude, coda) or row of the core, spare ones too, of a layer and a
loop of a micro-batch, as it runs uncompiled:

    a norm       2 D wide, 1 D narrow                                     its input, normalised, weighted
    attention    2 H (nope + rope) + H (nope + v) + 2 H v + 3 kv + rope   q, k, kv, output twice, latent
    SwiGLU       4 F                                                      gate and up, silu(gate), product
    MoE          K (2 D + 4 F_expert) + 4 F_shared                        rows in and out of K experts
    Engram       9 D wide        a loop around the layers   5 D wide

A compiler makes again, unasked, what costs little. What it keeps was counted in the traced step of spider-1b
(docs/LOG.md), S being the width of the stream:

    a layer      D of S (its input); 3 D: what enters attention and feed-forward, what leaves attention
    attention    2 H (nope + rope) + 2 H v + 2 kv                         q, k, v, output; of bytes D more
    SwiGLU       3 F             MoE   K (2 D + 3 F_expert) + 3 F_shared; D wide for the router of a wide S
    Engram       3 D of S        a loop around the layers   D, D wide

Wide is fp32 always; narrow is 2 bytes under autocast, else 4. A layer that is recomputed keeps its input, and
of the selective way the outputs of its products and of attention::

    attention    H (nope + rope) + H (nope + v) + H v + kv + rope + D
    SwiGLU       2 F (+ D)       MoE    K (D + 2 F_expert) + 2 F_shared (+ D)     (D): uncompiled

One layer at a time has the rest. Tests hold this against what real forward passes keep; the copies of weights
that autocast makes, temporaries and the allocator's rest come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from spider.model.spider.config import SpiderConfig
from spider.tokens import BYTES

_VOCABULARY = BYTES.size


@dataclass(frozen=True)
class Position:
    """Bytes that are kept of one position of a layer."""

    dense: float
    core: float
    engram: float


@dataclass(frozen=True)
class Kept:
    """Of a whole forward pass: of a layer by what it recomputes, and of what is around the layers."""

    config: SpiderConfig
    whole: Position
    block: Position
    """As its dense layers are run, and as its recurrent ones are."""
    core: Position
    loop: float
    """Of a row, in each loop."""
    row: float
    byte: float

    def of(self, bytes_: int, rows: int, loops: int) -> int:
        """In ``loops`` that have gradients."""
        c, whole, D = self.config, self.whole, self.config.hidden
        layer = self.core.core + self.core.engram * len(c.engram.layers) / c.recurrence.layers
        total = rows * (self.row + loops * (self.loop + c.recurrence.layers * layer))
        total += bytes_ * (self.byte + (c.prelude_layers + c.coda_layers) * self.block.dense)
        # What is recomputed of a layer, one at a time, whose input is there.
        again = [0.0]
        if c.recurrence.of_core != "none":
            again.append(rows * (whole.core + whole.engram - self.core.core + D * 4))
        if c.recurrence.of_blocks != "none":
            again.append(bytes_ * (whole.dense - self.block.dense + D * 4))
        return round(total + max(again))


def kept(c: SpiderConfig, size: int) -> Kept:
    """Uncompiled; ``size``: bytes of what is narrow."""
    D, a, moe = c.hidden, c.attention, c.moe
    heads = 2 * (a.nope_dim + a.rope_dim) + (a.nope_dim + a.v_dim) + 2 * a.v_dim
    attention = a.heads * heads + 3 * a.kv_lora_rank + a.rope_dim
    ffn = experts = 4 * c.ffn_hidden
    if moe is not None:
        experts = moe.top_k * (2 * D + 4 * moe.expert_hidden) + 4 * moe.shared_hidden
    norms, (attended, fed, chosen) = 4 * D * 4 + 2 * D * size, _products(c)
    ways = {
        "none": Position(norms + (attention + ffn) * size, norms + (attention + experts) * size, 9 * D * 4),
        "selective": Position(D * 4 + (attended + fed + D) * size, D * 4 + (attended + chosen + D) * size, 0),
        "full": Position(D * 4, D * 4, 0),
    }
    # Embedding, boundaries, the way down and up, the head's norm; then the logits and their gradient.
    around = 8 * D * 4 + 2 * _VOCABULARY * 4
    r = c.recurrence
    return Kept(c, ways["none"], ways[r.of_blocks], ways[r.of_core], 5 * D * 4, 0, around)


def kept_compiled(c: SpiderConfig, size: int) -> Kept:
    """As `kept`, of a compiled pass."""
    D, a, moe, r = c.hidden, c.attention, c.moe, c.recurrence
    stream = size if c.stream == "narrow" else 4
    attention = 3 * D + 2 * a.heads * (a.nope_dim + a.rope_dim + a.v_dim) + 2 * a.kv_lora_rank
    ffn = experts = 3 * c.ffn_hidden
    router = 0
    if moe is not None:
        experts = moe.top_k * (2 * D + 3 * moe.expert_hidden) + 3 * moe.shared_hidden
        router = D * 4 if stream > size else 0
    attended, fed, chosen = _products(c)
    ways = {
        "none": Position(
            D * stream + (attention + D + ffn) * size,
            D * stream + (attention + experts) * size + router,
            3 * D * stream,
        ),
        "selective": Position(
            D * stream + (attended + fed) * size, D * stream + (attended + chosen) * size, 0
        ),
        "full": Position(D * stream, D * stream, 0),
    }
    loop = D * 4 + (D * size if r.lora_rank else 0)
    # What enters the core and its mean; of each Engram what was looked up, keys before and behind their norm,
    # and values.
    looked_up = len(c.engram.orders) * c.engram.heads * c.engram.head_dim
    row = 2 * D * 4 + (3 * D + looked_up) * size * len(c.engram.layers)
    # Embedding, what boundaries and the head see, what enters the coda; then the logits and their gradient.
    byte = D * 4 + 2 * D * stream + 2 * (D + c.boundary.hidden) * size + 2 * _VOCABULARY * 4
    return Kept(c, ways["none"], ways[r.of_blocks], ways[r.of_core], loop, row, byte)


def _products(c: SpiderConfig) -> tuple[int, int, int]:
    """Outputs of the products of attention, of a dense layer's feed-forward and of a core layer's."""
    D, a, moe = c.hidden, c.attention, c.moe
    attended = a.heads * (2 * a.nope_dim + a.rope_dim + 2 * a.v_dim) + a.kv_lora_rank + a.rope_dim + D
    fed = chosen = 2 * c.ffn_hidden
    if moe is not None:
        chosen = moe.top_k * (D + 2 * moe.expert_hidden) + 2 * moe.shared_hidden
    return attended, fed, chosen
