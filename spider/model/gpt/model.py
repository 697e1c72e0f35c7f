"""The GPT: a transformer over ids, bytes or tokens, whose parts are switches (docs/gpt.md).

With ``rms(x) = x / sqrt(mean(x^2) + eps)`` and ids t, one pass is ::

    x = x0 = rms(E[t])                                       then for each layer l in its order:
        x <- m x + b x0                                      residual_mix
        h  = rms(x) / sqrt(l + 1)                            the root: norm_scale
        q, k, v = Wq h, Wk h, Wv h                           kv_heads <= heads
        v <- v + 2 sigmoid(Wg h[:32]) V_l[t]                 value_embeddings, a gate for each head of v
        q <- g rope(rms(q)),  k <- rope(rms(k))              qk_gain; rope_dim
        y  = softmax(q k^T / sqrt(d)) v                      windows, documents: `spider.model.gpt.attend`
        y <- y - (y . u) u,  u = v / |v|                     xsa, v of the same position
        x <- x + a Wo y                                      branch_scales
        x <- x + c W2 leaky(W1 rms(x) / sqrt(l + 1))^2       slope; parallel_from: of the same h, at once
    logits = c tanh(W rms(x) / c)                            softcap; tied: W = E

With ``skips`` the first half of the layers that run leave what they made, and each of the second half takes
the latest that is left: ``x <- (1 - sigmoid(s)) w skip + sigmoid(s) x``. With ``recurrence`` some layers run
several times in a row, with the same weights, and each run counts as a layer there.

Norms have no weights; vectors and numbers act in fp32, also on a narrow stream. At first Wo, W2 and Wg are
zero: a layer adds nothing, and gates are 1. Other matrices are orthogonal or, like V_l, uniform of deviation
1/sqrt(D) (``start``); E is N(0, 1) and W N(0, 0.001^2), both N(0, 0.005^2) where they are one. E, V_l and W
are tables for AdamW, never matrices for Muon; `scaled_lr` has their rates.

Shapes: B windows, T ids of them, V ids of the vocabulary, D features, H heads, G heads of keys and values, K
features of a head; N new ids of a stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.embedding import embedding
from spider.model import interface
from spider.model.gpt.attend import Cache, View, attend, view, view_behind
from spider.model.gpt.config import GPTConfig
from spider.model.gpt.inspector import GPTInspector
from spider.model.gpt.kept import kept
from spider.model.interface import LanguageModel, ModelOutput, Reader
from spider.model.layers import (
    Linear,
    Rope,
    compute_dtype,
    cross_entropy,
    embedding_like,
    no_decay,
    rms_norm,
    rope_table,
    rotate,
    scaled_lr,
    streamed,
    wide,
)
from spider.tokens import IGNORED

#: How the names of each part's parameters end or begin; the first that fits has it.
_PARTS = {
    "embedding": r"embedding$",
    "value_embeddings": r".*\.values$",
    "head": r"head\.",
    "matrices": r".*\.weight$",
    "scalars": "",
}
#: Rates of tables, of the stream's share and of the embedding's, in times of the rate: nanochat's 0.3, 0.005
#: and 0.5 over its head's 0.004.
_TABLE_LR, _STREAM_LR, _EMBEDDING_LR = 75.0, 1.25, 125.0
#: Features of the stream that a gate of values reads.
_GATE_READS = 32
#: With more ids than these, logits are made for so many positions at a time, and again for the backward pass.
_MANY_IDS, _POSITIONS = 4096, 8192


class Spread(Linear):
    """A linear map that starts uniform, of deviation 1/sqrt(fan_in), or orthogonal."""

    def __init__(self, fan_in: int, fan_out: int, config: GPTConfig) -> None:
        super().__init__(fan_in, fan_out)
        self.orthogonal = config.start == "orthogonal"

    def init_weights(self) -> None:
        limit = 3**0.5 * self.std
        if self.orthogonal:
            nn.init.orthogonal_(self.weight)
        else:
            nn.init.uniform_(self.weight, -limit, limit)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, vocabulary: int) -> None:
        super().__init__()
        self.config = c = config
        D, K, G = c.hidden, c.head_dim, c.groups
        self.q, self.k, self.v = (Spread(D, size, c) for size in (D, G * K, G * K))
        self.out = Linear(D, D, std=0.0)
        self.gain = nn.Parameter(torch.empty(c.heads)) if c.qk_gain else None
        self.values: nn.Parameter | None = None
        self.gate: Linear | None = None
        if c.has_values(layer):
            self.values = nn.Parameter(torch.empty(vocabulary, G * K))
            self.gate = Linear(min(_GATE_READS, D), G, std=0.0)

    def init_weights(self) -> None:
        if self.gain is not None:
            nn.init.constant_(self.gain, self.config.qk_gain or 1.0)
            no_decay(self.gain)
        if self.values is not None:
            limit = (3 / self.config.hidden) ** 0.5
            nn.init.uniform_(self.values, -limit, limit)
            embedding_like(self.values)
            scaled_lr(self.values, _TABLE_LR)

    def forward(
        self, h_BTD: Tensor, tokens_BT: Tensor, rope: Rope, seen: View, cache: Cache | None = None
    ) -> Tensor:
        """What attention adds, before its scale. ``rope`` is of these positions, (T, 1, d_rope / 2); with a
        ``cache`` they stand behind the positions that it holds."""
        K = self.config.head_dim
        q, k, v = (part(h_BTD).unflatten(-1, (-1, K)) for part in (self.q, self.k, self.v))
        if self.values is not None and self.gate is not None:
            gate_BTG = 2 * self.gate(h_BTD[..., :_GATE_READS]).sigmoid()
            values = embedding(tokens_BT, self.values).unflatten(-1, (-1, K))
            v = v + gate_BTG[..., None].to(v.dtype) * values.to(v.dtype)
        q, k = (self.turned(rms_norm(wide(x), self.config.norm_eps), rope) for x in (q, k))
        if self.gain is not None:
            q = q * self.gain[:, None]
        q, k = q.to(v.dtype), k.to(v.dtype)
        all_k, all_v = (k, v) if cache is None else cache.extend(k, v)
        y_BTHK = attend(q, all_k, all_v, seen)
        if self.config.xsa:
            u = F.normalize(v, dim=-1).repeat_interleave(self.config.heads // self.config.groups, dim=2)
            y_BTHK = y_BTHK - (y_BTHK * u).sum(-1, keepdim=True) * u
        return self.out(y_BTHK.flatten(2))

    def turned(self, x: Tensor, rope: Rope) -> Tensor:
        """The first ``rope_dim`` features of each head, rotated, and the others."""
        d = 2 * rope.cos.shape[-1]
        return rotate(x, rope) if d == x.shape[-1] else torch.cat([rotate(x[..., :d], rope), x[..., d:]], -1)


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.slope = config.slope
        self.up = Spread(config.hidden, config.ffn_ratio * config.hidden, config)
        self.down = Linear(config.ffn_ratio * config.hidden, config.hidden, std=0.0)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.down(F.leaky_relu(self.up(h_BTD), self.slope).square())


class Mix(nn.Module):
    """``m x + b x0``, of one number each or one a feature."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.start, size = config.mix_start, config.hidden if config.residual_mix == "vector" else 1
        self.stream, self.embedded = (nn.Parameter(torch.empty(size)) for _ in range(2))

    def init_weights(self) -> None:
        nn.init.ones_(self.stream)
        nn.init.constant_(self.embedded, self.start)
        no_decay(self.stream, self.embedded)
        if self.stream.numel() == 1:
            scaled_lr(self.stream, _STREAM_LR)
            scaled_lr(self.embedded, _EMBEDDING_LR)

    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        return (self.stream * x + self.embedded * x0).to(x.dtype)


class Skip(nn.Module):
    """``lerp(w skip, x, sigmoid(s))``; x where these loops have no skip for it, with a gradient of zero: DDP
    waits for one of every parameter."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale, self.gate = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))

    def init_weights(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.gate)
        no_decay(self.scale, self.gate)

    def forward(self, skip: Tensor | None, x: Tensor) -> Tensor:
        if skip is None:
            return x + (0 * self.scale * self.gate).to(x.dtype)
        return torch.lerp(self.scale * skip, wide(x), self.gate.sigmoid()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, vocabulary: int) -> None:
        super().__init__()
        self.eps, self.shrink = config.norm_eps, (layer + 1) ** -0.5 if config.norm_scale else 1.0
        self.parallel = config.parallel_from is not None and layer >= config.parallel_from
        self.mix = Mix(config) if config.residual_mix != "none" else None
        self.attention, self.ffn = Attention(config, layer, vocabulary), FeedForward(config)
        self.attention_scale = nn.Parameter(torch.empty(config.hidden)) if config.branch_scales else None
        self.ffn_scale = nn.Parameter(torch.empty(config.hidden)) if config.branch_scales else None

    def init_weights(self) -> None:
        for scale in (self.attention_scale, self.ffn_scale):
            if scale is not None:
                nn.init.ones_(scale)
                no_decay(scale)

    def forward(self, x: Tensor, x0: Tensor, *of_attention: Any) -> Tensor:
        """``of_attention``: what `Attention` is given beside what it reads."""
        if self.mix is not None:
            x = self.mix(x, x0)
        h = self.norm(x)
        x = x + _scaled(self.attention(h, *of_attention), self.attention_scale)
        return x + _scaled(self.ffn(h if self.parallel else self.norm(x)), self.ffn_scale)

    def norm(self, x: Tensor) -> Tensor:
        return (rms_norm(wide(x), self.eps) * self.shrink).to(x.dtype)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else (x * scale).to(x.dtype)


class GPT(interface.Model):
    """See the module's docstring; `spider.model.build_model` builds one with its weights set."""

    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = c = config
        V = c.vocab_size or self.tokens.size
        self.embedding = nn.Parameter(torch.empty(V, c.hidden))
        self.blocks = nn.ModuleList(Block(c, layer, V) for layer in range(c.layers))
        count = len(c.order(c.loops)) // 2 if c.skips else 0
        self.skips = nn.ModuleList(Skip(c.hidden) for _ in range(count))
        self.head = None if c.tied else Linear(c.hidden, V, std=0.001)
        if c.ngram is not None:
            from spider.model.ngram_head import NgramHead  # not of the source of a model without one

            self.ngram = NgramHead(c.hidden, c.ngram, self.tokens)

    def init_weights(self) -> None:
        nn.init.normal_(self.embedding, std=0.005 if self.head is None else 1.0)
        embedding_like(self.embedding)
        if self.head is not None:
            scaled_lr(self.embedding, _TABLE_LR)
            embedding_like(self.head.weight)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        n_loops: int | None = None,
        reduction: Literal["mean", "none"] = "mean",
        trace: bool = False,
        candidates_BTW: Tensor | None = None,
        segments_BT: Tensor | None = None,
    ) -> ModelOutput:
        """`LanguageModel.__call__`; ``segments_BT`` (int) says which document of its row each position
        belongs to, 0 where it is padding: a position sees its own only. The trace is the ids."""
        order, device = self.config.order(self.loops(n_loops)), tokens_BT.device
        shape, dtype = (tokens_BT.shape[0], tokens_BT.shape[1]), compute_dtype(self.embedding)
        views = {
            window: view(shape, window, segments_BT, self.most_documents, device, dtype)
            for window in {self.config.window(layer) for layer in order}
        }
        h_BTD = self.read(tokens_BT, self.rope(shape[1]), views, order)
        inside = tokens_BT if trace else None
        if labels_BT is None:
            return ModelOutput(None, self.logits(h_BTD, candidates_BTW), {}, inside)
        nats_BT = self.nats(h_BTD, labels_BT, candidates_BTW)
        mean = nats_BT.sum() / (labels_BT != IGNORED).sum().clamp(min=1)
        metrics = {"cross_entropy": mean.detach()}
        return ModelOutput(nats_BT if reduction == "none" else mean, None, metrics, inside)

    def rope(self, length: int) -> Rope:
        """Return the angles of positions 0..length-1, as wide as the embedding and at least float32."""
        c, table = self.config, self.embedding
        angles = rope_table(length, c.rope_dim or c.head_dim, c.rope_base, table.device, table.dtype)
        return Rope(*(part_TR[:, None] for part_TR in angles))

    def read(
        self,
        tokens_BT: Tensor,
        rope: Rope,
        views: Mapping[int | None, View],
        order: Sequence[int],
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """The normalised states (B, T, D) that the layers come to, run in this order."""
        eps, half = self.config.norm_eps, len(order) // 2
        x0 = streamed(rms_norm(embedding(tokens_BT, self.embedding), eps), self.config.stream)
        left: list[Tensor] = []
        x, skips = x0, iter(self.skips)
        for at, (layer, cache) in enumerate(zip(order, caches or repeat(None), strict=False)):
            if at >= half and left and (skip := next(skips, None)) is not None:
                x = skip(left.pop(), x)
            x = self.blocks[layer](x, x0, tokens_BT, rope, views[self.config.window(layer)], cache)
            if at < half and self.config.skips:
                left.append(x)
        for skip in skips:
            x = skip(None, x)
        return rms_norm(wide(x), eps).to(x.dtype)

    def logits(self, h_BTD: Tensor, candidates_BTW: Tensor | None = None) -> Tensor:
        """(B, T, V), at least float32; what an n-gram index knows comes behind the cap."""
        z_BTV = wide(F.linear(h_BTD, self.embedding) if self.head is None else self.head(h_BTD))
        if (cap := self.config.softcap) is not None:
            z_BTV = cap * (z_BTV / cap).tanh()
        return self.with_ngrams(z_BTV, h_BTD, candidates_BTW)

    def nats(self, h_BTD: Tensor, labels_BT: Tensor, candidates_BTW: Tensor | None) -> Tensor:
        """Each target's cross entropy, (B, T)."""
        if len(self.embedding) <= _MANY_IDS:
            return cross_entropy(self.logits(h_BTD, candidates_BTW), labels_BT)[0]

        def piece(h_1ND: Tensor, labels_1N: Tensor) -> Tensor:
            return cross_entropy(self.logits(h_1ND), labels_1N)[0]

        pieces = zip(
            *(x.flatten(0, 1)[None].split(_POSITIONS, dim=1) for x in (h_BTD, labels_BT)), strict=True
        )
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(piece, *part, **how) for part in pieces], 1).view_as(labels_BT)

    def incremental(self, context: int, n_loops: int | None = None) -> Incremental:
        return Incremental(self, context, n_loops)

    def inspector(self) -> GPTInspector:
        return GPTInspector(self.tokens)

    def parameters_by_part(self) -> dict[str, int]:
        parts = dict.fromkeys([*_PARTS, "ngram"], 0)
        for name, parameter in self.named_parameters():
            fit = (part for part, names in _PARTS.items() if re.match(names, name))
            parts["ngram" if name.startswith("ngram.") else next(fit)] += parameter.numel()
        return {part: count for part, count in parts.items() if count}

    def looked_up(self) -> int:
        """Tables, but an embedding that is the head as well."""
        parts = self.parameters_by_part()
        return parts.get("value_embeddings", 0) + (parts["embedding"] if self.head is not None else 0)

    def scaling_parameters(self) -> int:
        """What is multiplied of the network: matrices and head."""
        return self.parameters_by_part()["matrices"] + self.embedding.numel()

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        """6 a parameter that is multiplied, as often as it is, and 12 an id that a position sees and a
        feature; the position itself is not counted in a window."""
        order, total = self.config.order(self.loops(n_loops)), float(self.embedding.numel())
        for layer in order:
            linear = (part for part in self.blocks[layer].modules() if isinstance(part, nn.Linear))
            total += sum(part.weight.numel() for part in linear)
            total += 2 * self.config.hidden * min(self.config.window(layer) or length, length)
        return 6 * (total + (self.ngram.multiplies() if self.ngram else 0))

    def activation_bytes(
        self, windows: int, length: int, n_loops: int | None, *, narrow: bool, compiled: bool
    ) -> int:
        positions, V = windows * length, len(self.embedding)
        at_once = positions if V <= _MANY_IDS else min(positions, _POSITIONS)
        runs = len(self.config.order(self.loops(n_loops)))
        total = positions * runs * kept(self.config, 2 if narrow else 4) + at_once * V * 3 * 4
        return total + positions * (self.ngram.activation_bytes() if self.ngram else 0)

    def keeps_wide(self, name: str) -> bool:
        return name == "head" or name.endswith(".gate") or name.startswith("ngram.")


class Incremental(Reader):
    """One stream's state: rotated keys and values of each layer in each pass."""

    model: GPT

    def __init__(self, model: GPT, context: int, n_loops: int | None = None) -> None:
        super().__init__(model, context, n_loops)
        self.order = model.config.order(self.n_loops)
        self.windows = {model.config.window(layer) for layer in self.order}
        self.caches = [Cache(context, model.config.window(layer)) for layer in self.order]
        self.rope = model.rope(context)

    def read(self, N: int) -> Tensor:
        model, start = self.model, len(self.ids) - N
        tokens_1N = torch.tensor([self.ids[start:]], device=model.embedding.device)
        kept = {window: start if window is None else min(start, window) for window in self.windows}
        views = {w: view_behind(kept[w], N, w, tokens_1N.device) for w in self.windows}
        h_1ND = model.read(tokens_1N, self.rope.part(start, start + N), views, self.order, self.caches)
        return model.logits(h_1ND, None if self.candidates_NW is None else self.candidates_NW[None, -N:])[0]


Model: type[LanguageModel] = GPT
