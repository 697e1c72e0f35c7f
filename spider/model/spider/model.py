"""The Spider: a byte-level language model that thinks on patches, as many times as asked.

::

    bytes (B,T) -> embed -> prelude (dense)                           h      (B,T,D)
      -> boundaries -> mean of each patch                             e      (B,L,D)
      -> recurrent core: R loops over a few MoE layers with Engram    z      (B,L,D)
      -> each byte reads its last closed patch, plus its own h        h'     (B,T,D)
      -> coda (dense) -> norm -> tied head                            logits (B,T,V)

Every part is in a module of its own and may be switched off in the configuration. The residual stream is
float32 under autocast (embeddings, norms' weights and the injection are float32), only matrix products are
narrow. Cross entropy is float32. Embeddings are normalised when read, so their scale belongs to the head
alone.

Shapes: B batch, T bytes, L patch slots, D features, V vocabulary, N recurrent layers, R loops, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.interface import IGNORED, LanguageModel, ModelOutput
from spider.model.layers import RMSNorm, SwiGLU, embedding_like, rms_norm
from spider.model.spider.attention import LatentAttention, LatentCache, Rope, rope_table
from spider.model.spider.chunking import Chunker, Patches
from spider.model.spider.config import SpiderConfig
from spider.model.spider.engram import Memory, NgramEmbedding, primes_from
from spider.model.spider.experts import Experts
from spider.model.spider.incremental import Incremental
from spider.model.spider.moe import MoE
from spider.model.spider.recurrence import CoreOutput, RecurrentCore
from spider.vocab import VOCAB_SIZE


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


class Spider(nn.Module):
    """See the module's docstring; `spider.model.build_model` builds one with its weights set."""

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.config = config
        D, engram = config.hidden, config.engram
        self.embed_tokens = nn.Parameter(torch.empty(VOCAB_SIZE, D))
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

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every weight and buffer from the torch RNG; the same seed gives the same model."""
        for module in self.modules():
            initialise = getattr(module, "init_weights", None)
            if initialise is not None:
                initialise()

    def init_weights(self) -> None:
        nn.init.normal_(self.embed_tokens, std=0.02)
        embedding_like(self.embed_tokens)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        n_loops: int | None = None,
        reduction: Literal["mean", "none"] = "mean",
        trace: bool = False,
    ) -> ModelOutput:
        """Predict, at every position, the id that follows.

        Args:
            tokens_BT: ids, int64.
            labels_BT: the id that follows each, -100 where it does not count.
            n_loops: loops of the core (default: the configuration's).
            reduction: "mean" for training; "none" for each position's cross entropy in nats, 0 where ignored.
            trace: also tell what happened to each byte and patch.
        """
        n_loops = self.loops(n_loops)
        rope_dim, base = self.config.attention.rope_dim, self.config.attention.rope_base
        rope = rope_table(tokens_BT.shape[1], rope_dim, base, tokens_BT.device)

        h_BTD = self.embed(tokens_BT)
        for block in self.prelude:
            h_BTD = block(h_BTD, rope)
        patches, metrics, boundary_loss = self.chunker.cut(tokens_BT, h_BTD)
        e_BLD = self.chunker.down(h_BTD, patches)
        memories: list[Memory | None] = [None] * len(self.core.layers)
        if self.config.engram.layers:
            memories = self.core.read_memories(tokens_BT, patches.close_BL, patches.filled_BL)
        patch_rope = rope_table(e_BLD.shape[1], rope_dim, base, tokens_BT.device)
        core = self.core(e_BLD, memories, patch_rope, patches.valid_BL, n_loops)
        h_BTD = h_BTD + self.chunker.up(core.z_BLD, patches)
        for block in self.coda:
            h_BTD = block(h_BTD, rope)
        logits_BTV = self.head(h_BTD)

        auxiliary = self.config.boundary.weight * boundary_loss
        auxiliary = auxiliary + self._halting(core, patches.valid_BL, metrics) + self._routing(core, metrics)
        inside = Trace(patches, core.loops_BL, _counts(core)) if trace else None
        if labels_BT is None:
            return ModelOutput(None, _wide(logits_BTV), metrics, inside)
        nats_BT = F.cross_entropy(
            _wide(logits_BTV).flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(labels_BT)
        cross_entropy = nats_BT.sum() / (labels_BT != IGNORED).sum().clamp(min=1)
        metrics["cross_entropy"] = cross_entropy.detach()
        loss = nats_BT if reduction == "none" else cross_entropy + auxiliary
        return ModelOutput(loss, None, metrics, inside)

    def incremental(self, context: int, n_loops: int | None = None) -> Incremental:
        """A stream of at most ``context`` ids that this model reads piece by piece."""
        return Incremental(self, context, n_loops)

    def after_step(self, *, updated: bool = True) -> None:
        """Balance the experts; call once after every step, with ``updated`` false if its update was skipped:
        then their load is forgotten."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.rebalance() if updated else module.load.zero_()

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def parameters_by_part(self) -> dict[str, int]:
        """Parameters of each part, in the lines of the table in DESIGN section 4; they sum to
        `num_parameters`."""
        parts = dict.fromkeys(
            ("embedding", "dense_blocks", "routed_experts", "shared_experts", "core_layers", "engram"), 0
        )
        parts |= {"recurrence": 0, "boundary": 0}
        for name, parameter in self.named_parameters():
            parts[_part(name)] += parameter.numel()
        return parts

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        """FLOPs of forward and backward per byte of a window of ``length`` bytes.

        Counts matrix products, a multiply and an add each, attention as the full square (as
        ``torch.utils.flop_counter`` does), the backward pass as twice the forward, recomputation not at all.
        """
        c = self.config
        loops = n_loops or c.recurrence.loops
        slots = self.chunker.slots(length)

        a = c.attention
        square = a.heads * (a.nope_dim + a.rope_dim + a.v_dim)
        dense = sum(_multiplies(block) + square * length for block in [*self.prelude, *self.coda])
        predictor = _multiplies(self.chunker)
        memory = sum(_multiplies(layer.engram) for layer in self.core.stack() if layer.engram is not None)
        loop = _multiplies(self.core) - memory + square * slots * len(self.core.layers)
        forward = 2 * (
            length * (dense + predictor + self.embed_tokens.numel()) + slots * (memory + loops * loop)
        )
        return 3 * forward / length

    def loops(self, asked: int | None) -> int:
        """How often the core runs: as asked, else as configured."""
        if asked is not None and asked < 1:
            raise ValueError(f"n_loops: the core runs at least once (got {asked})")
        return asked or self.config.recurrence.loops

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """What enters the prelude, (B, T, D)."""
        h_BTD = rms_norm(F.embedding(tokens_BT, self.embed_tokens), self.config.norm_eps)
        return h_BTD if self.ngram_embedding is None else h_BTD + self.ngram_embedding(tokens_BT)

    def head(self, h_BTD: Tensor) -> Tensor:
        """What leaves the coda as logits (B, T, V), through the transposed embedding."""
        return F.linear(self.final_norm(h_BTD), self.embed_tokens)

    def _halting(self, core: CoreOutput, valid_BL: Tensor, metrics: dict[str, Tensor]) -> Tensor | float:
        if core.loops_BL is None or core.remainder_BL is None:
            return 0.0
        total = valid_BL.sum()
        ponder = ((core.loops_BL + core.remainder_BL) * valid_BL).sum() / total
        metrics["ponder"] = ponder.detach()
        metrics["halt_depth"] = (core.loops_BL * valid_BL).sum() / total
        return self.config.recurrence.ponder_weight * ponder

    def _routing(self, core: CoreOutput, metrics: dict[str, Tensor]) -> Tensor | float:
        """Mean router losses over layers and loops, load metrics, and the load that `after_step` balances."""
        if self.config.moe is None:
            return 0.0
        seen = [s for of_layer in core.stats for s in of_layer]
        aux, z = torch.stack([s.aux for s in seen]).mean(), torch.stack([s.z for s in seen]).mean()
        counts_NRE = _counts(core)
        assert counts_NRE is not None
        load_NE = counts_NRE.sum(1)
        share_NE = load_NE / load_NE.sum(1, keepdim=True).clamp(min=1)
        metrics |= {
            "moe_aux": aux.detach(),
            "moe_z": z.detach(),
            "moe_load_max": (share_NE.amax(1) * share_NE.shape[1]).mean(),
            "moe_load_entropy": torch.special.entr(share_NE).sum(1).mean(),
        }
        if self.training:
            for layer, load_E in zip(self.core.stack(), load_NE, strict=True):
                cast(MoE, layer.ffn).load += load_E
        return self.config.moe.aux_weight * aux + self.config.moe.z_weight * z


def _counts(core: CoreOutput) -> Tensor | None:
    """Tokens of every layer's experts in every loop that has a gradient (in evaluation, all), (N, R, E)."""
    if not all(core.stats):
        return None
    return torch.stack([torch.stack([s.counts_E for s in of_layer]) for of_layer in core.stats])


def _multiplies(module: nn.Module) -> int:
    """Multiplies per position of every matrix in ``module`` that each position meets."""
    total = 0
    for m in module.modules():
        if isinstance(m, nn.Linear):
            total += m.in_features * m.out_features
        elif isinstance(m, Experts):
            total += (m.up.numel() + m.down.numel()) * m.top_k // m.up.shape[0]
    return total


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _part(name: str) -> str:
    if name == "embed_tokens":
        return "embedding"
    if name.startswith(("prelude.", "coda.")):
        return "dense_blocks"
    if ".experts." in name:
        return "routed_experts"
    if ".shared." in name:
        return "shared_experts"
    if ".engram." in name or name.startswith("ngram_embedding."):
        return "engram"
    if name.startswith("core.layers."):
        return "core_layers"
    return "recurrence" if name.startswith("core.") else "boundary"


Model: type[LanguageModel] = Spider
