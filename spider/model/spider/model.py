"""The Spider: a byte-level language model that computes on patches, in as many loops as requested.

::

    bytes (B,T) -> embed -> prelude (dense)                           h      (B,T,D)
      -> boundaries -> mean of each patch                             e      (M,D)
      -> recurrent core: R loops over a few MoE layers with Engram    z      (M,D)
      -> each byte reads its last closed patch, plus its own h        h'     (B,T,D)
      -> coda (dense) -> norm -> tied head                            logits (B,T,V)

Every part is in a module of its own, and the configuration can switch it off. Under autocast the residual
stream is float32 (embeddings, norm weights and the injection are float32) and only matrix products are
narrow. Cross entropy is float32. Embeddings are normalised when read, so their scale belongs to the head.

Generation reads streams piece by piece (`Incremental`). For any pieces its logits equal those of one forward
pass over the whole stream. A piece of one byte costs one position of the prelude and the coda. It costs a
position of the core only if it closes a patch. Between pieces a stream keeps:

- Latents and rotated keys, one per byte and dense layer, and one per patch, core layer *and loop*. In loop r
  a patch attends to the states of earlier patches in loop r.

- The last inputs of each Engram's convolution.

- The running sum of the open patch, and the last closed patch, which the bytes of the open one read.

- The ids, for n-grams.

Patches and their capacity are those of a window of ``context`` bytes, or of the model's own ``window`` if
that is longer. A comparison with a forward pass must therefore pad its window to the longer of the two
(`tests/unit/model/test_incremental.py`).

FLOPs are those of matrix products, two per multiply-add. Attention counts as the full square, as in
``torch.utils.flop_counter``; the backward pass counts twice the forward pass; recomputation does not count.
The core's rows are those that a window fills at the wanted boundary rate; spare rows do not count.

Shapes: B batch, T bytes, M rows of the core (patches of all windows), D features, V vocabulary, N recurrent
layers, R loops, E experts. Of streams, R is the number, and N that of the bytes that each gets at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import call
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.embedding import embedding
from spider.model import interface
from spider.model.interface import Fp8Parts, ModelOutput, Reader, histogram, note
from spider.model.layers import RMSNorm, Rope, cross_entropy, rms_norm, rope_table, streamed, wide
from spider.model.ngram_head import NgramHead
from spider.model.spider.attention import LayerCache, Places
from spider.model.spider.chunking import Chunker, Patches, Streams
from spider.model.spider.config import SpiderConfig
from spider.model.spider.engram import NgramEmbedding, Retrieved, primes_from
from spider.model.spider.moe import Experts, MoE, fp8_parts
from spider.model.spider.recurrence import PONDER_WEIGHT, CoreOutput, Layer, RecurrentCore, run_layer


class SpiderInspector:
    """See `spider.model.interface.Inspector`.

    Args:
        kind: kind of the boundaries; ``none`` means that each byte is its own patch.
        predictor: module that returns the boundary logits; None unless they are learned.
    """

    segments = "patches"

    def __init__(self, model: interface.Model, kind: str, predictor: nn.Module | None) -> None:
        self.model = model
        self.kind = kind
        self.predictor = predictor
        self.uncut = "this model has no patches (boundary.kind is none)" if kind == "none" else None
        self.lengths: Counter[int] = Counter()
        self.loops: Counter[int] = Counter()
        self.load_NRE: np.ndarray | None = None

    def observe(self, trace: Any, scored_BT: np.ndarray) -> None:
        patches = trace.patches
        counted_M = _host(patches.filled_M) & scored_BT.flatten()[_host(patches.close_M)]
        if not self.uncut:
            self.lengths.update(np.diff(_host(patches.first_S))[counted_M].tolist())
        self.loops.update(_host(trace.loops_M)[counted_M].astype(int).tolist())
        if trace.counts_NRE is not None:
            load_NRE = _host(trace.counts_NRE)
            self.load_NRE = load_NRE if self.load_NRE is None else self.load_NRE + load_NRE

    def figures(self) -> list[dict[str, Any]]:
        """Return lengths, halting depth and load of the experts, or a note for a part that is switched
        off."""
        title, patches = "Bytes per patch", "patches are switched off:\nevery byte is its own"
        return [
            note(title, patches) if self.uncut else histogram(title, "bytes", "patches", self.lengths),
            histogram("Loops a patch uses", "loops", "patches", self.loops),
            self._experts(),
        ]

    def _experts(self) -> dict[str, Any]:
        title = "Expert load (1 = equal share)"
        if self.load_NRE is None:
            return note(title, "experts are switched off:\none dense layer instead")
        total_NR1 = self.load_NRE.sum(-1, keepdims=True)
        share_NRE = self.load_NRE * self.load_NRE.shape[-1] / np.maximum(total_NR1, 1)
        layers, loops, experts = share_NRE.shape
        return {
            "kind": "heatmap",
            "title": title,
            "rows": [f"layer {n + 1}, loop {r + 1}" for n in range(layers) for r in range(loops)],
            "column": "expert",
            "values": share_NRE.reshape(-1, experts).tolist(),
            "middle": 1.0,
            "most": 2.5,  # values above this get the strongest colour
            "caption": "red: more, blue: less than an equal share",
        }

    def cut(self, tokens_BT: torch.Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the closing positions of patches, and the probability of a boundary at each position.

        The core runs once, because its result does not matter here.
        """
        logits: list[torch.Tensor] = []

        def keep_logits(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            logits.append(output)

        hook = nullcontext() if self.predictor is None else self.predictor.register_forward_hook(keep_logits)
        with hook:
            candidates = self.model.empty_candidates(tokens_BT)
            patches = self.model(tokens_BT, n_loops=1, trace=True, **candidates).trace.patches
        return _host(patches.closes_BT), _host(logits[0].sigmoid()) if logits else None

    def caption(self, total: int, closed: list[int]) -> str:
        if self.uncut:
            return f"No patches (boundary.kind is none): each of {total:,} bytes stands alone."
        mean = f", {sum(closed) / len(closed):.2f} bytes a patch" if closed else ""
        return f"{self.kind.capitalize()} boundaries: {len(closed):,} in {total:,} bytes{mean}."


def _host(x: torch.Tensor) -> np.ndarray:
    return x.cpu().numpy()


#: Weight of the z-loss on router logits (ST-MoE's). It only keeps them small.
Z_WEIGHT = 1e-3
#: Weight of the loss that balances the load of experts.
_AUX_WEIGHT = 0.01
#: Base of the rotation's wavelengths.
_ROPE_BASE = 10_000.0
#: Linear layers that make a discrete decision or are tiny, and therefore stay out of fp8.
_WIDE = re.compile(r"boundar|router|halt|loop|engram|embed|head|norm|lora|ngram")


@dataclass
class Trace:
    """Treatment of each byte and patch by the parts, for inspection."""

    patches: Patches
    """Patches of the batch."""
    loops_M: Tensor
    """Loops that each row of the core used."""
    counts_NRE: Tensor | None
    """Tokens of each expert, int64, in every loop with a gradient (in evaluation, in all); None without
    experts."""


class Spider(interface.Model):
    """See the module's docstring. `spider.model.build_model` builds one with its weights set."""

    TABLES = r"embed_tokens|.*\.tables\.weight|.*\.prior"
    PARTS: ClassVar[Mapping[str, str]] = {
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

    config: SpiderConfig
    shown: Mapping[str, str] = {
        "bytes_per_patch": "{:.2f} bytes/patch",
        "moe_load_max": "fullest expert {:.2f}x its share",
        "halt_depth": "depth {:.2f} loops",
    }

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.config = config
        D = config.hidden
        engram = config.engram
        self.embed_tokens = nn.Parameter(torch.empty(self.tokens.size, D))
        # One prime per hash table: the tables of the core's layers first, then those of the byte embedding.
        per_layer = len(engram.ORDERS) * engram.HEADS
        primes = primes_from(engram.table_size, per_layer * len(engram.layers) + len(engram.byte_orders))
        layer_primes = {layer: primes[i * per_layer :][:per_layer] for i, layer in enumerate(engram.layers)}
        byte_primes = primes[per_layer * len(engram.layers) :]
        self.ngram_embedding = NgramEmbedding(D, engram.byte_orders, byte_primes) if byte_primes else None
        self.prelude = nn.ModuleList(Layer(config) for _ in range(config.prelude_layers))
        self.chunker = Chunker(D, config.boundary)
        self.core = RecurrentCore(config, layer_primes)
        self.coda = nn.ModuleList(Layer(config) for _ in range(config.coda_layers))
        self.final_norm = RMSNorm(D)
        self.run_layer = run_layer
        if config.ngram is not None:
            self.ngram = NgramHead(D, config.ngram, self.tokens)

    def init_weights(self) -> None:
        nn.init.normal_(self.embed_tokens, std=0.02)

    # ------------------------------------------------------------------------------------------ forward pass

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        n_loops: int | None = None,
        reduction: Literal["mean", "none"] = "mean",
        trace: bool = False,
        candidates_BTW: Tensor | None = None,
    ) -> ModelOutput:
        """See `spider.model.interface.Model`; ``trace`` returns a `Trace`."""
        rope = self.rope(tokens_BT.shape[1])
        recompute = self.config.recurrence.of_blocks
        h_BTD = self.embed(tokens_BT)
        for block in self.prelude:
            h_BTD, _ = self.through(block, self.run_layer, recompute, {}, h_BTD, rope)
        patches, metrics, boundary_loss, e_MD, retrieved = self.to_patches(tokens_BT, h_BTD)
        windows = patches.layout
        arguments = e_MD, retrieved, self.rope(windows.longest), windows, self.loops(n_loops)
        core = self.through(self.core, call, *arguments)
        h_BTD = self.rejoin(h_BTD, core.z_MD, patches)
        for block in self.coda:
            h_BTD, _ = self.through(block, self.run_layer, recompute, {}, h_BTD, rope)
        auxiliary, counts_NRE, core_metrics = self.auxiliary(core, windows.valid_M, boundary_loss)
        inside = Trace(patches, core.halt.loops_M, counts_NRE) if trace else None
        logits_BTV, nats_BT, mean = self.predict(h_BTD, candidates_BTW, labels_BT)
        metrics |= core_metrics
        if nats_BT is None or mean is None:
            return ModelOutput(None, logits_BTV, metrics, inside)
        metrics["cross_entropy"] = mean.detach()
        loss = nats_BT if reduction == "none" else mean + auxiliary
        return ModelOutput(loss, None, metrics, inside)

    def rope(self, length: int) -> Rope:
        """Return the angles of positions 0..length-1, as wide as the embedding and at least float32."""
        a = self.config.attention
        table = self.embed_tokens
        return rope_table(length, a.rope_dim, _ROPE_BASE, table.device, table.dtype)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the input of the prelude, (B, T, D)."""
        h_BTD = rms_norm(embedding(tokens_BT, self.embed_tokens))
        if self.ngram_embedding is not None:
            h_BTD = h_BTD + self.ngram_embedding(tokens_BT)
        return streamed(h_BTD, self.config.stream)

    def to_patches(
        self, tokens_BT: Tensor, h_BTD: Tensor
    ) -> tuple[Patches, dict[str, Tensor], Tensor, Tensor, list[Retrieved | None]]:
        """Cut bytes into patches; return the patches, their metrics and loss, the input of the core, and what
        each of its layers retrieves."""
        patches, metrics, loss = self.chunker.patch_bounds(tokens_BT, h_BTD, self.window)
        retrieved = self.core.retrieve(tokens_BT, patches.close_M, patches.filled_M)
        return patches, metrics, loss, self.chunker.down(h_BTD, patches), retrieved

    def rejoin(self, h_BTD: Tensor, z_MD: Tensor, patches: Patches) -> Tensor:
        """Add to each byte the patch that it reads."""
        return h_BTD + self.chunker.up(streamed(z_MD, self.config.stream), patches)

    def head(self, h_BTD: Tensor, candidates_BTW: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of the coda's output: by the transposed embedding, corrected by the
        n-gram head."""
        h_BTD = self.final_norm(h_BTD)
        return self.with_ngrams(F.linear(h_BTD, self.embed_tokens), h_BTD, candidates_BTW)

    def predict(
        self, h_BTD: Tensor, candidates_BTW: Tensor | None, labels_BT: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return logits, None, None without labels; else None, each target's cross entropy, and their
        mean."""
        logits_BTV = self.head(h_BTD, candidates_BTW)
        if labels_BT is None:
            return wide(logits_BTV), None, None
        nats_BT, mean = cross_entropy(logits_BTV, labels_BT)
        return None, nats_BT, mean

    def auxiliary(
        self, core: CoreOutput, valid_M: Tensor, boundary_loss: Tensor
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Return the auxiliary loss, the expert counts for `Trace`, and metrics."""
        metrics: dict[str, Tensor] = {}
        ponder_loss = self._halting(core, valid_M, metrics)
        router_loss, counts_NRE = self._routing(core, metrics)
        return boundary_loss + ponder_loss + router_loss, counts_NRE, metrics

    def _halting(self, core: CoreOutput, valid_M: Tensor, metrics: dict[str, Tensor]) -> Tensor:
        """Return the weighted ponder loss, and add its metrics."""
        total = valid_M.sum()
        loops_M = core.halt.loops_M
        ponder = ((loops_M + core.halt.remainder_M) * valid_M).sum() / total
        metrics["ponder"] = ponder.detach()
        metrics["halt_depth"] = (loops_M * valid_M).sum() / total
        return PONDER_WEIGHT * ponder

    def _routing(self, core: CoreOutput, metrics: dict[str, Tensor]) -> tuple[Tensor | float, Tensor | None]:
        """Return the mean router loss over layers and loops, and the counts for `Trace`.

        Metrics of the load are added; in training, so is the load that `after_step` balances.
        """
        moe = self.config.moe
        if moe is None:
            return 0.0, None
        stats = [s for layer_stats in zip(*core.stats, strict=True) for s in layer_stats]
        aux = torch.stack([s.aux for s in stats]).mean()
        z = torch.stack([s.z for s in stats]).mean()
        counts_NRE = torch.stack([s.counts_E for s in stats]).unflatten(0, (-1, len(core.stats)))
        load_NE = counts_NRE.sum(1)
        share_NE = load_NE / load_NE.sum(1, keepdim=True).clamp(min=1)
        metrics |= {
            "moe_aux": aux.detach(),
            "moe_z": z.detach(),
            "moe_load_max": (share_NE.amax(1) * share_NE.shape[1]).mean(),
            "moe_load_entropy": torch.special.entr(share_NE).sum(1).mean(),
        }
        if self.training:
            for layer, load_E in zip(self.core.layers, load_NE, strict=True):
                cast(MoE, layer.ffn).load += load_E
        return _AUX_WEIGHT * aux + Z_WEIGHT * z, counts_NRE

    # -------------------------------------------------------------------------------- what it tells of itself

    def parts_to_compile(self) -> list[tuple[nn.Module, str]]:
        """Return the functions that run once, and one function for all layers and loops."""
        own: list[tuple[nn.Module, str]] = [
            (self, name) for name in ("embed", "run_layer", "to_patches", "rejoin", "auxiliary", "predict")
        ]
        return [*own, *self.core.parts_to_compile()]

    def units(self) -> dict[nn.Module, Sequence[nn.Module]]:
        """Return the dense layers, and the core. All layers of the core are gathered once for all loops. One
        by one they would be gathered in each loop, and their gradients are not summed before the first."""
        before, after = ({layer: [layer] for layer in layers} for layers in (self.prelude, self.coda))
        return {**before, self.core: self.core.layers, **after}

    def after_step(self, *, updated: Tensor | bool = True) -> None:
        """Balance the experts; discard their load if the update was skipped."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.rebalance(updated)

    def inspector(self) -> SpiderInspector:
        return SpiderInspector(self, self.config.boundary.kind, self.chunker.boundary_predictor)

    def incremental(self, context: int, n_loops: int | None = None) -> Incremental:
        return Incremental(self, context, n_loops)

    def looked_up(self) -> int:
        """Count the embedding, which the head multiplies as well, and all of Engram."""
        parts = self.parameters_by_part()
        return parts["embedding"] + parts.get("engram", 0)

    def keeps_wide(self, name: str) -> bool:
        return _WIDE.search(name) is not None

    def fp8_parts(self) -> Fp8Parts | None:
        return fp8_parts(self, self.config)

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        rows = self.chunker.filled(length)
        a = self.config.attention
        square = a.heads * (a.nope_dim + a.rope_dim + a.v_dim)
        blocks = [*self.prelude, *self.coda]
        dense = _multiplies([*blocks, self.chunker]) + square * length * len(blocks)
        engrams = _multiplies(layer.engram for layer in self.core.layers if layer.engram is not None)
        loop = _multiplies([self.core]) - engrams + square * rows * len(self.core.layers)
        per_byte = dense + self.embed_tokens.numel() + (self.ngram.multiplies() if self.ngram else 0)
        per_row = engrams + self.loops(n_loops) * loop
        return 3 * 2 * (length * per_byte + rows * per_row) / length

    def activation_bytes(
        self, windows: int, length: int, n_loops: int | None, *, narrow: bool, compiled: bool
    ) -> int:
        """Estimate the bytes of a pass, as counted in the traced step of spider-1b (docs/LOG.md).

        Elements that a layer keeps of a position, a byte or in each loop a row of the core::

            stream   D                                   its input
            narrow   3 D + 2 H (nope + rope + v) + 2 kv  attention: input and output, queries, keys, values
                     D + 3 F                             SwiGLU
                     K (2 D + 3 F) + 3 F_shared          experts, and D wide for the router of a wide stream

        Wide elements are float32. Narrow ones take 2 bytes under autocast, else 4. A recomputed layer keeps
        its input, and selectively what its products return. One layer at a time has the rest. Around the
        layers are each loop's state, what Engram has looked up, boundaries, and the logits with their
        gradient. Code that is not compiled keeps a third more, and half more where it widens for norms.
        """
        c, a, r, moe = self.config, self.config.attention, self.config.recurrence, self.config.moe
        D, size, loops = c.hidden, 2 if narrow else 4, self.loops(n_loops)
        stream = size if c.stream == "narrow" else 4
        engrams = len(c.engram.layers)
        attention = 3 * D + 2 * a.heads * (a.nope_dim + a.rope_dim + a.v_dim) + 2 * a.kv_lora_rank
        attended = a.heads * (2 * a.nope_dim + a.rope_dim + 2 * a.v_dim) + a.kv_lora_rank + a.rope_dim + D
        fed = c.ffn_hidden
        experts, chosen, router, cut = 3 * fed, 2 * fed, 0, 0
        if moe is not None:
            experts = moe.top_k * (2 * D + 3 * moe.expert_hidden) + 3 * moe.shared_hidden
            chosen = moe.top_k * (D + 2 * moe.expert_hidden) + 2 * moe.shared_hidden
            router = D * 4 if stream > size else 0
            cut = 3 * moe.experts * 4 if stream == 2 else 0
        dense = {
            "none": (attention + D + 3 * fed) * size,
            "selective": (attended + 2 * fed) * size,
            "full": 0,
        }
        core = {
            "none": (attention + experts) * size + router + 3 * D * stream * engrams / r.layers,
            "selective": (attended + chosen) * size + cut,
            "full": 0,
        }
        looked_up = len(c.engram.ORDERS) * c.engram.HEADS * c.engram.head_dim
        a_loop = D * 4 + (D * size if r.lora_rank else 0)
        a_row = 2 * D * 4 + (3 * D + looked_up) * size * engrams
        a_byte = D * 4 + 2 * D * stream + 2 * (D + c.boundary.hidden) * size + 2 * self.tokens.size * 4
        bytes_, rows = windows * length, self.chunker.rows(windows, length)
        around = bytes_ * (a_byte + (c.prelude_layers + c.coda_layers) * (D * stream + dense[r.of_blocks]))
        around += rows * a_row
        kept = loops * (a_loop + r.layers * (D * stream + core[r.of_core]))
        again = max(
            bytes_ * (dense["none"] - dense[r.of_blocks] + D * 4) if r.of_blocks != "none" else 0,
            rows * (core["none"] - core[r.of_core] + D * 4) if r.of_core != "none" else 0,
        )
        total = around + rows * kept + again
        if narrow and r.of_core != "full":
            # As activations are freed, the gradients of the core's weights accumulate, one for each loop.
            weights = sum(p.numel() for name, p in self.core.named_parameters() if ".tables." not in name)
            total = max(total, around + again + loops * size * weights)
        if not compiled:
            total *= 1.5 if narrow else 4 / 3
        return round(total) + bytes_ * (self.ngram.activation_bytes() if self.ngram else 0)


def _multiplies(modules: Iterable[nn.Module]) -> int:
    """Count the multiplies per position of every matrix in ``modules`` that a position meets."""
    total = 0
    for m in (inner for module in modules for inner in module.modules()):
        if isinstance(m, nn.Linear):
            total += m.in_features * m.out_features
        elif isinstance(m, Experts):
            total += (m.up.numel() + m.down.numel()) * m.top_k // m.up.shape[0]
    return total


class Incremental(Reader):
    """State of streams; see the module's docstring. The model must be in evaluation mode at each piece.

    Every layer reads all streams at once, the core those that close a patch.
    """

    model: Spider

    def __init__(self, model: Spider, context: int, n_loops: int | None = None) -> None:
        super().__init__(model, context, n_loops)
        engram = model.config.engram
        slots = model.chunker.slots(context, model.window)
        free = model.chunker.capacity(context, model.window)
        self.streams = Streams(torch.tensor([[free]], device=self.ids_RT.device))
        self.bytes, self.patches = Places(context), Places(slots)
        self.blocks = [LayerCache(self.bytes) for _ in [*model.prelude, *model.coda]]
        self.core = [[LayerCache(self.patches) for _ in model.core.layers] for _ in range(self.n_loops)]
        self.rope = model.rope(max(context, slots))
        # An n-gram that ends in a piece begins at most this many bytes before it; boundaries look one back.
        self.reach = max([2, *(engram.ORDERS if engram.layers else ()), *engram.byte_orders]) - 1

    def read(self, N: int) -> Tensor:
        model = self.model
        assert not model.training, "a stream is read in evaluation mode"
        tokens_RT = self.ids_RT[:, max(0, self.length - N - self.reach) :]
        R = len(tokens_RT)
        self.bytes.extend([N] * R, tokens_RT.device)
        blocks = iter(self.blocks)
        h_RND = self._through(model.prelude, blocks, model.embed(tokens_RT)[:, -N:])
        z_MD, close_M, count_RN = model.chunker.down_next(tokens_RT, h_RND, self.streams)
        if len(z_MD):
            self.patches.extend(count_RN[:, -1].tolist(), z_MD.device)
            retrieved = model.core.retrieve(tokens_RT, close_M.clamp(min=0), close_M >= 0)
            rope = self.rope.at(self.patches.number_M)
            z_MD = model.core(z_MD, retrieved, rope, self.patches.windows, self.n_loops, self.core).z_MD
        z_MD = streamed(z_MD, model.config.stream)
        h_RND = h_RND + model.chunker.up_next(z_MD, count_RN, self.streams)
        h_RND = self._through(model.coda, blocks, h_RND)
        return wide(model.head(h_RND, self.candidates[-1] if self.candidates else None))

    def _through(self, layers: nn.ModuleList, caches: Iterator[LayerCache], h_RND: Tensor) -> Tensor:
        """Return the output of layers over bytes."""
        rope = self.rope.at(self.bytes.number_M)
        x_MD = h_RND.flatten(0, 1)
        for layer in layers:
            x_MD, _ = layer(x_MD, rope, cache=next(caches))
        return x_MD.view_as(h_RND)

    def choose(self, row_R: Tensor) -> None:
        super().choose(row_R)
        for places in (self.bytes, self.patches):
            places.filled_R = [places.filled_R[row] for row in row_R.tolist()]
        for state in (self.streams, *self.blocks, *chain(*self.core)):
            for name, value_R in vars(state).items():
                if isinstance(value_R, Tensor):
                    setattr(state, name, value_R[row_R])


Model = Spider
