"""What a Spider is made of, and what that costs: parameters by part and FLOPs.

The modules are here in the order in which they are made, with the embedding and the head; how they run is in
`spider.model.spider.model`.

FLOPs are those of matrix products, a multiply and an add each, attention as the full square (as
``torch.utils.flop_counter`` counts it), the backward pass as twice the forward, recomputation not at all. The
core's rows are those that a window fills at the wanted rate: what is spare is no use.

Shapes: B batch, T bytes, D features, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.embedding import embedding
from spider.model import interface
from spider.model.layers import RMSNorm, Rope, embedding_like, rms_norm, rope_table, streamed
from spider.model.ngram_head import NgramHead
from spider.model.spider.chunking import Chunker
from spider.model.spider.config import SpiderConfig
from spider.model.spider.engram import NgramEmbedding, primes_from
from spider.model.spider.kept import kept, kept_compiled
from spider.model.spider.moe import Experts, fp8_parts
from spider.model.spider.recompute import run
from spider.model.spider.recurrence import Layer, RecurrentCore

#: How the names of each part's parameters begin; the first that fits has it.
_PARTS = {
    "ngram": r"ngram\.",
    "embedding": "embed_tokens",
    "dense_blocks": r"(prelude|coda)\.",
    "routed_experts": r"core\.layers\.\d+\.ffn\.experts",
    "shared_experts": r"core\.layers\.\d+\.ffn\.shared",
    "core_layers": r"core\.layers\.\d+\.(attention|ffn)",
    "engram": r"core\.layers\.\d+\.engram|ngram_embedding",
    "recurrence": r"core\.",
    "boundary": "",
}
#: Linear layers that decide something discrete or are tiny: fp8 leaves them alone.
_WIDE = re.compile(r"boundar|router|halt|loop|engram|embed|head|norm|lora|ngram")


class Body(interface.Model):
    """The modules of a Spider; their names and order are those of its checkpoints."""

    config: SpiderConfig
    ngram: NgramHead | None

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
        self.prelude = nn.ModuleList(Layer(config) for _ in range(config.prelude_layers))
        self.chunker = Chunker(D, config.boundary, config.norm_eps)
        self.core = RecurrentCore(config, of_layer)
        self.coda = nn.ModuleList(Layer(config) for _ in range(config.coda_layers))
        self.final_norm = RMSNorm(D, config.norm_eps)
        self.run = run
        if config.ngram is not None:
            self.ngram = NgramHead(D, config.ngram, self.tokens)

    def init_weights(self) -> None:
        nn.init.normal_(self.embed_tokens, std=0.02)
        embedding_like(self.embed_tokens)

    def rope(self, length: int) -> Rope:
        """Return the angles of positions 0..length-1, as wide as the embedding and at least float32."""
        a, table = self.config.attention, self.embed_tokens
        return rope_table(length, a.rope_dim, a.rope_base, table.device, table.dtype)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """What enters the prelude, (B, T, D)."""
        h_BTD = rms_norm(embedding(tokens_BT, self.embed_tokens), self.config.norm_eps)
        if self.ngram_embedding is not None:
            h_BTD = h_BTD + self.ngram_embedding(tokens_BT)
        return streamed(h_BTD, self.config.stream)

    def head(self, h_BTD: Tensor, candidates_BTW: Tensor | None = None) -> Tensor:
        """What leaves the coda as logits (B, T, V): through the transposed embedding, and the index's."""
        h_BTD = self.final_norm(h_BTD)
        return self.with_ngrams(F.linear(h_BTD, self.embed_tokens), h_BTD, candidates_BTW)

    def parameters_by_part(self) -> dict[str, int]:
        parts = dict.fromkeys([part for part in _PARTS if part != "ngram" or self.ngram], 0)
        for name, parameter in self.named_parameters():
            parts[next(part for part in parts if re.match(_PARTS[part], name))] += parameter.numel()
        return parts

    def looked_up(self) -> int:
        """The embedding, which the head multiplies as well, and all of Engram."""
        parts = self.parameters_by_part()
        return parts["embedding"] + parts["engram"]

    def keeps_wide(self, name: str) -> bool:
        return _WIDE.search(name) is not None

    def fp8_parts(self) -> interface.Fp8Parts | None:
        return fp8_parts(self, self.config, self.chunker.rows)

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        rows, a = self.chunker.filled(length), self.config.attention
        square = a.heads * (a.nope_dim + a.rope_dim + a.v_dim)
        blocks = [*self.prelude, *self.coda]
        dense = _multiplies([*blocks, self.chunker]) + square * length * len(blocks)
        engrams = _multiplies(layer.engram for layer in self.core.layers if layer.engram is not None)
        loop = _multiplies([self.core]) - engrams + square * rows * len(self.core.layers)
        bytes_, patches = dense + self.embed_tokens.numel(), engrams + self.loops(n_loops) * loop
        bytes_ += self.ngram.multiplies() if self.ngram else 0
        return 3 * 2 * (length * bytes_ + rows * patches) / length

    def activation_bytes(
        self, windows: int, length: int, n_loops: int | None, *, narrow: bool, compiled: bool
    ) -> int:
        c, r, size = self.config, self.config.recurrence, 2 if narrow else 4
        loops = min(self.loops(n_loops), r.bptt or self.loops(n_loops))
        counted = kept_compiled(c, size) if compiled else kept(c, size)
        total = counted.of(windows * length, self.chunker.rows(windows, length), loops)
        return total + windows * length * (self.ngram.activation_bytes() if self.ngram else 0)


def _multiplies(modules: Iterable[nn.Module]) -> int:
    """Multiplies per position of every matrix in ``modules`` that each position meets."""
    total = 0
    for m in (inner for module in modules for inner in module.modules()):
        if isinstance(m, nn.Linear):
            total += m.in_features * m.out_features
        elif isinstance(m, Experts):
            total += (m.up.numel() + m.down.numel()) * m.top_k // m.up.shape[0]
    return total
