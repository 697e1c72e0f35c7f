"""The GPT: a transformer over bytes or tokens. Its parts are switches of the configuration (docs/gpt.md).

With ``rms(x) = x / sqrt(mean(x^2) + eps)`` and tokens t, one pass begins with ``x = x0 = rms(E[t])``. Then
each layer l, in its order, computes::

    x <- m x + b x0                                      residual_mix
    h  = rms(x) / sqrt(l + 1)                            the root: norm_scale

    q, k, v = Wq h, Wk h, Wv h                           kv_heads <= heads
    v <- v + 2 sigmoid(Wg h[:32]) V_l[t]                 value_embeddings, a gate for each head of v

    q <- g rope(rms(q)),  k <- rope(rms(k))              qk_gain; rope_dim
    y  = softmax(q k^T / sqrt(d)) v                      windows, documents: `spider.model.gpt.attend`
    y <- y - (y . u) u,  u = v / |v|                     xsa, v of the same position

    x <- x + a Wo y                                      residual_mix: vector
    x <- x + c W2 leaky(W1 rms(x) / sqrt(l + 1))^2       slope; parallel_from: of the same h, at once

At the end ``logits = c tanh(W rms(x) / c)`` with ``softcap``; if ``tied``, W = E.

With ``skips`` the first half of the layers that run push their outputs on a stack, and each layer of the
second half pops one: ``x <- (1 - sigmoid(s)) w skip + sigmoid(s) x``. With ``recurrence`` some layers run
several times in a row with the same weights; each run counts as a layer for the skips.

Norms use no weights. Vectors and scalars act in fp32, also on a narrow stream. At first Wo, W2 and Wg
are zero, so a layer adds nothing and gates are 1. Other matrices start orthogonal, or uniform with standard
deviation 1/sqrt(D) as V_l does (``start``). With ``start: torch`` all matrices but Wg start as torch's linear
layers do. E starts as N(0, 1) and W as N(0, 0.001^2); tied, both are N(0, 0.005^2). E, V_l and W are tables:
AdamW trains them, never Muon (`GPT.parameter_groups` sets their rates).

Shapes: B windows, T tokens of a window, V vocabulary size, D features, H heads, G heads of keys and values, K
features of a head; N new tokens of a stream.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.embedding import Sorted, embedding, sort_once
from spider.config.model import Recompute
from spider.model import interface
from spider.model.gpt.attend import Cache, View, attend, view, view_behind
from spider.model.gpt.config import GPTConfig
from spider.model.interface import ModelOutput, ParameterGroup, Reader
from spider.model.layers import (
    Linear,
    Rope,
    capped,
    compute_dtype,
    cross_entropy,
    recomputing,
    rms_norm,
    rope_table,
    rotate,
    wide,
)
from spider.tokens import IGNORED, Tokens

_TITLE = "Bytes per token"


class GPTInspector:
    """See `spider.model.interface.Inspector`."""

    segments = "tokens"

    def __init__(self, tokens: Tokens) -> None:
        self.bytes_of = tokens.bytes_of
        alone = self.bytes_of.max() <= 1
        self.uncut = "this model reads bytes, each is its own token" if alone else None
        self.lengths: Counter[int] = Counter()

    def observe(self, trace: Any, scored_BT: np.ndarray) -> None:
        size_N = self.bytes_of[trace.cpu().numpy()[scored_BT]]
        self.lengths.update(size_N[size_N > 0].tolist())

    def figures(self) -> list[dict[str, Any]]:
        """Return the lengths in bytes, or a note if the model reads bytes."""
        if self.uncut:
            return [interface.note(_TITLE, "it reads bytes:\neach is its own token")]
        return [interface.histogram(_TITLE, "bytes", "tokens", self.lengths)]

    def cut(self, tokens_BT: Tensor) -> tuple[np.ndarray, None]:
        """Cut after every token."""
        return np.ones(tokens_BT.shape, dtype=bool), None

    def caption(self, total: int, closed: list[int]) -> str:
        if self.uncut:
            return f"No tokenizer: each of {total:,} bytes stands alone."
        mean = f", {sum(closed) / len(closed):.2f} bytes a token" if closed else ""
        return f"{len(closed):,} tokens in {total:,} bytes{mean}."


#: Learning rates of tables, of m and of b, as factors on the rate: nanochat's 0.3, 0.005 and 0.5 over its
#: head's 0.004.
_TABLE_RATE = 75.0
_STREAM_RATE = 1.25
_EMBEDDING_RATE = 125.0
#: Features of the stream that the gate of a value embedding reads.
_GATE_WIDTH = 32
#: For a vocabulary larger than this, the logits are computed for so many positions at a time, and again in
#: the backward pass, where `GPT.in_pieces` says so.
_LARGE_VOCABULARY = 4096
_POSITIONS = 8192


# ------------------------------------------------------------------------------------------------- the layers


class Spread(Linear):
    """Linear map that starts orthogonal, or uniform with standard deviation 1/sqrt(fan_in), or as torch's
    does: uniform with 1/sqrt(3 fan_in)."""

    def __init__(self, fan_in: int, fan_out: int, config: GPTConfig) -> None:
        super().__init__(fan_in, fan_out)
        self.start = config.start

    def init_weights(self) -> None:
        limit = self.std if self.start == "torch" else 3**0.5 * self.std
        if self.start == "orthogonal":
            nn.init.orthogonal_(self.weight)
        else:
            nn.init.uniform_(self.weight, -limit, limit)


def _output(fan_in: int, fan_out: int, config: GPTConfig) -> Linear:
    """Return a linear map into the residual stream, which starts at zero except for torch's start."""
    return Spread(fan_in, fan_out, config) if config.start == "torch" else Linear(fan_in, fan_out, std=0.0)


class Attention(nn.Module):
    """Causal attention with the switches of the module's docstring."""

    def __init__(self, config: GPTConfig, layer: int, vocabulary: int) -> None:
        super().__init__()
        self.config = c = config
        D, K, G = c.hidden, c.head_dim, c.groups
        self.q = Spread(D, D, c)
        self.k = Spread(D, G * K, c)
        self.v = Spread(D, G * K, c)
        self.out = _output(D, D, c)
        self.gain = nn.Parameter(torch.empty(c.heads)) if c.qk_gain else None
        self.values: nn.Parameter | None = None
        self.gate: Linear | None = None
        if c.has_values(layer):
            self.values = nn.Parameter(torch.empty(vocabulary, G * K))
            self.gate = Linear(min(_GATE_WIDTH, D), G, std=0.0)

    def init_weights(self) -> None:
        if self.gain is not None:
            nn.init.constant_(self.gain, self.config.qk_gain or 1.0)
        if self.values is not None:
            limit = (3 / self.config.hidden) ** 0.5
            nn.init.uniform_(self.values, -limit, limit)

    def forward(
        self, h_BTD: Tensor, ids: Tensor | Sorted, rope: Rope, seen: View, cache: Cache | None = None
    ) -> Tensor:
        """Return the output of attention, without its scale.

        Args:
            ids: tokens of these positions, (B, T).
            rope: angles of these positions, (T, 1, d_rope / 2).
            cache: earlier positions of a stream, which these follow.
        """
        K = self.config.head_dim
        q, k, v = (part(h_BTD).unflatten(-1, (-1, K)) for part in (self.q, self.k, self.v))
        if self.values is not None and self.gate is not None:
            gate_BTG = 2 * self.gate(h_BTD[..., :_GATE_WIDTH]).sigmoid()
            values = embedding(ids, self.values).unflatten(-1, (-1, K))
            v = v + gate_BTG[..., None].to(v.dtype) * values.to(v.dtype)
        q, k = (self.rotated(rms_norm(wide(x)), rope) for x in (q, k))
        if self.gain is not None:
            q = q * self.gain[:, None]
        q, k = q.to(v.dtype), k.to(v.dtype)
        all_k, all_v = (k, v) if cache is None else cache.extend(k, v)
        y_BTHK = attend(q, all_k, all_v, seen)
        if self.config.xsa:
            u = F.normalize(v, dim=-1).repeat_interleave(self.config.heads // self.config.groups, dim=2)
            y_BTHK = y_BTHK - (y_BTHK * u).sum(-1, keepdim=True) * u
        return self.out(y_BTHK.flatten(2))

    def rotated(self, x: Tensor, rope: Rope) -> Tensor:
        """Rotate the first ``rope_dim`` features of each head."""
        d = 2 * rope.cos.shape[-1]
        if d == x.shape[-1]:
            return rotate(x, rope)
        return torch.cat([rotate(x[..., :d], rope), x[..., d:]], -1)


class FeedForward(nn.Module):
    """``W2 leaky(W1 h)^2``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.slope = config.slope
        self.up = Spread(config.hidden, config.ffn_ratio * config.hidden, config)
        self.down = _output(config.ffn_ratio * config.hidden, config.hidden, config)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.down(self.inner(h_BTD))

    def inner(self, h_BTD: Tensor) -> Tensor:
        """Return ``leaky(W1 h)^2``."""
        return F.leaky_relu(self.up(h_BTD), self.slope).square()


class Mix(nn.Module):
    """``m x + b x0``, with scalars or with one factor per feature."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        vector = config.residual_mix == "vector"
        self.start = 0.0 if vector else 0.1
        size = config.hidden if vector else 1
        self.stream = nn.Parameter(torch.empty(size))  # m
        self.embedded = nn.Parameter(torch.empty(size))  # b

    def init_weights(self) -> None:
        nn.init.ones_(self.stream)
        nn.init.constant_(self.embedded, self.start)

    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        return (self.stream * x + self.embedded * x0).to(x.dtype)


class Skip(nn.Module):
    """``lerp(w skip, x, sigmoid(s))``.

    Without a skip it returns x, and its parameters get a gradient of zero, because DDP waits for a gradient
    of every parameter.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))  # w
        self.gate = nn.Parameter(torch.empty(dim))  # s

    def init_weights(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.gate)

    def forward(self, skip: Tensor | None, x: Tensor) -> Tensor:
        if skip is None:
            return x + (0 * self.scale * self.gate).to(x.dtype)
        return torch.lerp(self.scale * skip, wide(x), self.gate.sigmoid()).to(x.dtype)


class Block(nn.Module):
    """One layer: mix, attention, feed-forward."""

    def __init__(self, config: GPTConfig, layer: int, vocabulary: int) -> None:
        super().__init__()
        self.parallel = config.parallel_from is not None and layer >= config.parallel_from
        self.mix = Mix(config) if config.residual_mix != "none" else None
        self.attention = Attention(config, layer, vocabulary)
        self.ffn = FeedForward(config)
        scaled = config.residual_mix == "vector"
        self.attention_scale = nn.Parameter(torch.empty(config.hidden)) if scaled else None
        self.ffn_scale = nn.Parameter(torch.empty(config.hidden)) if scaled else None

    def init_weights(self) -> None:
        for scale in (self.attention_scale, self.ffn_scale):
            if scale is not None:
                nn.init.ones_(scale)

    def forward(self, x: Tensor, x0: Tensor, shrink: Any, *inputs: Any) -> Tensor:
        """Return the stream after this layer; the number or tensor ``shrink`` multiplies its norms, and
        ``inputs`` are the further arguments of `Attention`."""
        if self.mix is not None:
            x = self.mix(x, x0)
        h = _normed(x, shrink)
        x = x + _scaled(self.attention(h, *inputs), self.attention_scale)
        return x + _scaled(self.ffn(h if self.parallel else _normed(x, shrink)), self.ffn_scale)


def run_layer(layer: Block, recompute: Recompute, skip: Skip | None, *inputs: Any) -> Tensor:
    """Return the stream after a layer, whose inputs are those of `_blended`; in training, keep only the
    activations that ``recompute`` leaves."""
    return recomputing(layer, recompute, partial(_blended, layer, skip), *inputs)


def _blended(layer: Block, skip: Skip | None, skipped: Tensor | None, x: Tensor, *inputs: Any) -> Tensor:
    return layer(x if skip is None else skip(skipped, x), *inputs)


def _normed(x: Tensor, shrink: Any = 1.0) -> Tensor:
    return (rms_norm(wide(x)) * shrink).to(x.dtype)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else (x * scale).to(x.dtype)


# -------------------------------------------------------------------------------------------------- the model


class GPT(interface.Model):
    """See the module's docstring. `spider.model.build_model` builds one with its weights set."""

    TABLES = r"embedding|.*\.values|head\.weight"
    PARTS: ClassVar[Mapping[str, str]] = {
        "embedding": r"embedding$",
        "value_embeddings": r".*\.values$",
        "head": r"head\.",
        "ngram": r"ngram\.",
        "matrices": r".*\.weight$",
        "scalars": "",
    }

    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = c = config
        self.vocabulary = c.vocab_size or self.tokens.size
        V = -(-self.vocabulary // c.vocab_multiple) * c.vocab_multiple
        self.embedding = nn.Parameter(torch.empty(V, c.hidden))
        self.blocks = nn.ModuleList(Block(c, layer, V) for layer in range(c.layers))
        count = len(c.order(c.loops)) // 2 if c.skips else 0
        self.skips = nn.ModuleList(Skip(c.hidden) for _ in range(count))
        self.head = None if c.tied else Linear(c.hidden, V, std=0.001)
        if c.ngram is not None:
            # Imported here because a compressed model counts the source that it imports.
            from spider.model.ngram_head import NgramHead

            self.ngram = NgramHead(c.hidden, c.ngram, self.tokens)
        self.run_layer = run_layer

    def init_weights(self) -> None:
        nn.init.normal_(self.embedding, std=0.005 if self.head is None else 1.0)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        scalar = self.config.residual_mix == "scalar"
        own = {
            "embedding": ("embedding", 1.0 if self.head is None else _TABLE_RATE),
            r".*\.values": ("value_embeddings", _TABLE_RATE),
            r"head\.weight": ("head", 1.0),
            r".*\.mix\.stream": ("residual", _STREAM_RATE if scalar else 1.0),
            r".*\.mix\.embedded": ("x0", _EMBEDDING_RATE if scalar else 1.0),
        }
        groups = super().parameter_groups()
        for name, group in groups.items():
            for pattern, (title, rate) in own.items():
                if re.fullmatch(pattern, name):
                    groups[name] = replace(group, name=title, rate=rate)
        return groups

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        n_loops: int | None = None,
        reduction: Literal["mean", "none"] = "mean",
        trace: bool = False,
        candidates_BTW: Tensor | None = None,
        document_BT: Tensor | None = None,
    ) -> ModelOutput:
        """See `spider.model.interface.Model`; a position attends only within its document, and the trace is
        the tokens."""
        x_BTD = self.layers(tokens_BT, n_loops, document_BT)
        inside = tokens_BT if trace else None
        if labels_BT is None:
            return ModelOutput(None, self.logits(x_BTD, candidates_BTW), {}, inside)
        nats_BT, mean = self.predict(x_BTD, labels_BT, candidates_BTW)
        metrics = {"cross_entropy": mean.detach()}
        return ModelOutput(nats_BT if reduction == "none" else mean, None, metrics, inside)

    def ffn_inputs(
        self, tokens_BT: Tensor, layers: Sequence[int], n_loops: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        h_BTD = _normed(self.layers(tokens_BT, n_loops))
        blocks = [cast(Block, self.blocks[layer]) for layer in layers]
        return h_BTD, [block.ffn.inner(h_BTD) for block in blocks]

    def parts_to_compile(self) -> list[tuple[nn.Module, str]]:
        """Return what surrounds the layers, and one function for all layers.

        Layers with the same parts share a graph. The gradients of a layer are ready when its own part of the
        backward pass ends, so processes exchange them while the layers before it go on.
        """
        return [(self, name) for name in ("embed", "run_layer", "predict")]

    def units(self) -> dict[nn.Module, list[nn.Module]]:
        return {block: [block] for block in self.blocks}

    def layers(self, tokens_BT: Tensor, n_loops: int | None, document_BT: Tensor | None = None) -> Tensor:
        """Return the stream after the layers, (B, T, D)."""
        order = self.config.order(self.loops(n_loops))
        B, T = tokens_BT.shape
        views = {
            window: view(
                shape=(B, T),
                window=window,
                document_BT=document_BT,
                most_documents=self.most_documents,
                device=tokens_BT.device,
                dtype=compute_dtype(self.embedding),
            )
            for window in {self.config.window(layer) for layer in order}
        }
        return self.decode(tokens_BT, self.rope(T), views, order)

    def rope(self, length: int) -> Rope:
        """Return the angles of positions 0..length-1, as wide as the embedding and at least float32."""
        c = self.config
        table = self.embedding
        angles = rope_table(length, c.rope_dim or c.head_dim, c.rope_base, table.device, table.dtype)
        return Rope(angles.cos[:, None], angles.sin[:, None])

    def decode(
        self,
        tokens_BT: Tensor,
        rope: Rope,
        views: Mapping[int | None, View],
        order: Sequence[int],
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """Run the layers in this order and return the stream after them, (B, T, D)."""
        c, half = self.config, len(order) // 2
        ids = sort_once(tokens_BT, self.embedding)
        x = x0 = self.embed(ids)
        shrink: Any = 1.0
        stack: list[Tensor] = []
        skips = iter(cast(Sequence[Skip], self.skips))
        for i, (layer, cache) in enumerate(zip(order, caches or repeat(None), strict=False)):
            skip = next(skips, None) if i >= half and stack else None
            skipped = None if skip is None else stack.pop()
            if c.norm_scale:  # a tensor, because the compiler makes a graph for each number
                shrink = wide(x.new_empty(())).fill_((layer + 1) ** -0.5)
            inputs = x0, shrink, ids, rope, views[c.window(layer)], cache
            x = self.through(self.blocks[layer], self.run_layer, c.of_layers, skip, skipped, x, *inputs)
            if i < half and c.skips:
                stack.append(x)
        for skip in skips:
            x = skip(None, x)
        return x

    def embed(self, ids: Tensor | Sorted) -> Tensor:
        """Return the input of the first layer, (B, T, D)."""
        x0 = rms_norm(embedding(ids, self.embedding))
        # A table may be narrower than the layers (optimizer.groups).
        x0 = x0.to(torch.promote_types(x0.dtype, next(self.blocks.parameters()).dtype))
        return x0.to(compute_dtype(x0))

    def logits(self, x_BTD: Tensor, candidates_BTW: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of the stream after the layers in at least float32, without those of
        added rows. The n-gram head corrects them after the softcap."""
        h_BTD = _normed(x_BTD)
        z_BTV = F.linear(h_BTD, self.embedding) if self.head is None else self.head(h_BTD)
        z_BTV = wide(z_BTV[..., : self.vocabulary])
        cap = self.config.softcap
        if cap is not None:
            z_BTV = capped(z_BTV, cap)
        return self.with_ngrams(z_BTV, h_BTD, candidates_BTW)

    def predict(
        self, x_BTD: Tensor, labels_BT: Tensor, candidates_BTW: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return each target's cross entropy, (B, T), and their mean."""
        if not self.in_pieces(torch.compiler.is_compiling()):
            return cross_entropy(self.logits(x_BTD, candidates_BTW), labels_BT)

        def piece(x_1ND: Tensor, labels_1N: Tensor) -> Tensor:
            return cross_entropy(self.logits(x_1ND), labels_1N)[0]

        streams = x_BTD.flatten(0, 1)[None].split(_POSITIONS, dim=1)
        labels = labels_BT.flatten()[None].split(_POSITIONS, dim=1)
        nats = [
            checkpoint(piece, x_1ND, labels_1N, use_reentrant=False, preserve_rng_state=False)
            for x_1ND, labels_1N in zip(streams, labels, strict=True)
        ]
        nats_BT = torch.cat(nats, 1).view_as(labels_BT)
        return nats_BT, nats_BT.sum() / (labels_BT != IGNORED).sum().clamp(min=1)

    def in_pieces(self, compiled: bool) -> bool:
        """Tell whether the logits are computed piece by piece, and again in the backward pass.

        Compiled code keeps of many logits only the narrow product, which then takes their gradient in place.
        Nothing is recomputed, and the head's gradient is one sum. Uncompiled code would keep three fp32
        copies.
        """
        many = len(self.embedding) > _LARGE_VOCABULARY
        return many and (not compiled or self.config.of_layers == "full")

    def incremental(self, context: int, n_loops: int | None = None) -> Incremental:
        return Incremental(self, context, n_loops)

    def inspector(self) -> GPTInspector:
        return GPTInspector(self.tokens)

    def looked_up(self) -> int:
        """Count the tables, except an embedding that is the head as well."""
        parts = self.parameters_by_part()
        return parts.get("value_embeddings", 0) + (parts["embedding"] if self.head is not None else 0)

    def scaling_parameters(self) -> int:
        """Count the parameters that are multiplied: the matrices and the head."""
        return self.parameters_by_part()["matrices"] + self.embedding.numel()

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        """Return 6 per multiplied parameter and run, and 12 per feature and token that a position sees. The
        position itself does not count within a window."""
        total = float(self.embedding.numel())
        for layer in self.config.order(self.loops(n_loops)):
            linear = (part for part in self.blocks[layer].modules() if isinstance(part, nn.Linear))
            total += sum(part.weight.numel() for part in linear)
            total += 2 * self.config.hidden * min(self.config.window(layer) or length, length)
        return 6 * (total + (self.ngram.multiplies() if self.ngram else 0))

    def activation_bytes(
        self, windows: int, length: int, n_loops: int | None, *, narrow: bool, compiled: bool
    ) -> int:
        """Estimate the bytes of a pass without masks.

        Elements of a position, of a layer in each run unless it says otherwise::

            wide      2 D + K (H + G)        inputs of the norms of layer, feed-forward, q and k
                      K H                    qk_gain
                      3 V                    once: the logits (of a large vocabulary: see `in_pieces`)

            narrow    3 D + 3 F + 3 K H      inputs of matrices, attention (shared keys copied) and the square

                      2 D                    residual_mix: vector
                      4 D                    xsa
                      K G                    value_embeddings: two in every other layer

            stream    D                      residual_mix

        Wide elements are float32. Narrow ones take 2 bytes under autocast, else 4. F is the feed-forward's
        width. A recomputed layer keeps D of the stream, and selectively what its products and attention
        return: 2 K (H + G) + 2 D + F. One layer at a time has the rest. Tests compare this with what real
        passes keep.

        A compiled pass widens and applies the leaky ReLU again, which costs no pass over memory. So its wide
        elements have the width of the stream, and it keeps 2 F.
        """
        c = self.config
        D, heads, groups = c.hidden, c.head_dim * c.heads, c.head_dim * c.groups
        wide_elements = 2 * D + heads + groups + (heads if c.qk_gain else 0)
        narrow_elements = 3 * D + (2 if compiled else 3) * c.ffn_ratio * D + 3 * heads
        narrow_elements += (
            2 * D * (c.residual_mix == "vector") + 4 * D * c.xsa + groups * (c.value_embeddings != "none")
        )
        stream_elements = D if c.residual_mix != "none" else 0
        size = 2 if narrow else 4
        wide_size = size if compiled else 4
        layer = wide_size * wide_elements + size * (narrow_elements + stream_elements)

        positions = windows * length
        V = len(self.embedding)
        pieces = self.in_pieces(compiled)
        at_once = min(positions, _POSITIONS) if pieces else positions
        logit = size if V > _LARGE_VOCABULARY and not pieces else 3 * 4
        kept = layer if c.of_layers == "none" else D * size
        if c.of_layers == "selective":
            kept += size * (2 * (heads + groups) + (2 + c.ffn_ratio) * D)
        total = positions * (len(c.order(self.loops(n_loops))) * kept + layer - kept) + at_once * V * logit
        return total + positions * (self.ngram.activation_bytes() if self.ngram else 0)

    def keeps_wide(self, name: str) -> bool:
        return name == "head" or name.endswith(".gate") or name.startswith("ngram.")


class Incremental(Reader):
    """State of streams: rotated keys and values of each layer in each run."""

    model: GPT

    def __init__(self, model: GPT, context: int, n_loops: int | None = None) -> None:
        super().__init__(model, context, n_loops)
        self.order = model.config.order(self.n_loops)
        self.windows = {model.config.window(layer) for layer in self.order}
        self.caches = [Cache(context, model.config.window(layer)) for layer in self.order]
        self.rope = model.rope(context)

    def read(self, N: int) -> Tensor:
        model = self.model
        start = self.length - N
        tokens_RN = self.ids_RT[:, start:]
        cached = {window: start if window is None else min(start, window) for window in self.windows}
        views = {w: view_behind(cached[w], N, w, tokens_RN.device) for w in self.windows}
        x_RND = model.decode(tokens_RN, self.rope.part(start, self.length), views, self.order, self.caches)
        return model.logits(x_RND, self.candidates[-1] if self.candidates else None)

    def choose(self, row_R: Tensor) -> None:
        super().choose(row_R)
        for cache in self.caches:
            cache.choose(row_R)


Model = GPT
