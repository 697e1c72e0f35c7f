"""The Spider: a byte-level language model that thinks on patches, as many times as asked.

::

    bytes (B,T) -> embed -> prelude (dense)                           h      (B,T,D)
      -> boundaries -> mean of each patch                             e      (M,D)
      -> recurrent core: R loops over a few MoE layers with Engram    z      (M,D)
      -> each byte reads its last closed patch, plus its own h        h'     (B,T,D)
      -> coda (dense) -> norm -> tied head                            logits (B,T,V)

Every part is in a module of its own and may be switched off in the configuration. The residual stream is
float32 under autocast (embeddings, norms' weights and the injection are float32), only matrix products are
narrow. Cross entropy is float32. Embeddings are normalised when read, so their scale belongs to the head
alone.

Generation reads a stream piece by piece (`Incremental`), with the logits that one forward pass over all of it
would give, however it is cut. A piece of one byte costs one position of prelude and coda, and one of the core
only where it closes a patch. Kept between pieces are latents and rotated keys: one a byte and dense layer,
and one a patch, core layer *and loop* (in loop r a patch attends to what earlier patches were in loop r),
there with the last inputs of each Engram's convolution; the running sum of the open patch, and the last
closed one, which the bytes of the open one read; and the ids, for n-grams. Patches and their capacity are
those of a window of ``context`` bytes, so a comparison with a forward pass must pad its window to that length
(`tests/unit/model/test_incremental.py`).

Shapes: B batch, T bytes, M rows of the core (patches of all windows), D features, V vocabulary, N recurrent
layers, R loops, E experts; of a stream N ids of a piece, K patches that they close.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from spider.model.interface import LanguageModel, ModelOutput, Reader
from spider.model.layers import cross_entropy, streamed, wide
from spider.model.spider.attention import LayerCache
from spider.model.spider.body import Body
from spider.model.spider.chunking import Patches, Stream
from spider.model.spider.engram import Retrieved
from spider.model.spider.inspector import SpiderInspector
from spider.model.spider.moe import MoE
from spider.model.spider.recurrence import CoreOutput
from spider.model.spider.windows import equal_windows


@dataclass
class Trace:
    """What the parts did with each byte and patch, for those who want to look inside."""

    patches: Patches
    """Where the batch was cut."""
    loops_M: Tensor | None
    """Loops each row of the core used; None without halting."""
    counts_NRE: Tensor | None
    """Tokens each expert was given, int64, in every loop with a gradient (in evaluation, all); None without
    experts."""


class Spider(Body):
    """See the module's docstring; `spider.model.build_model` builds one with its weights set."""

    shown: Mapping[str, str] = {
        "bytes_per_patch": "{:.2f} bytes/patch",
        "moe_load_max": "fullest expert {:.2f}x its share",
        "halt_depth": "depth {:.2f} loops",
    }

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
        """`LanguageModel.__call__`; ``trace`` asks for a `Trace`."""
        rope, recompute = self.rope(tokens_BT.shape[1]), self.config.recurrence.of_blocks
        h_BTD = self.embed(tokens_BT)
        for block in self.prelude:
            h_BTD, _ = self.run(block, recompute, {}, h_BTD, rope)
        patches, metrics, boundary_loss, e_MD, retrieved = self.cut(tokens_BT, h_BTD)
        windows = patches.windows
        core = self.core(e_MD, retrieved, self.rope(windows.longest), windows, self.loops(n_loops))
        h_BTD = self.rejoin(h_BTD, core.z_MD, patches)
        for block in self.coda:
            h_BTD, _ = self.run(block, recompute, {}, h_BTD, rope)
        auxiliary, counts_NRE, more = self.judge(core, windows.valid_M, boundary_loss)
        inside = Trace(patches, core.halt and core.halt.loops_M, counts_NRE) if trace else None
        logits_BTV, nats_BT, mean = self.predict(h_BTD, candidates_BTW, labels_BT)
        metrics |= more
        if nats_BT is None or mean is None:
            return ModelOutput(None, logits_BTV, metrics, inside)
        metrics["cross_entropy"] = mean.detach()
        return ModelOutput(nats_BT if reduction == "none" else mean + auxiliary, None, metrics, inside)

    def parts_to_compile(self) -> list[tuple[nn.Module, str]]:
        """What runs once, and of layers and loops one, however many there are."""
        own: list[str] = ["embed", "run", "cut", "rejoin", "judge", "predict"]
        return [*((self, name) for name in own), *self.core.parts_to_compile()]

    def cut(
        self, tokens_BT: Tensor, h_BTD: Tensor
    ) -> tuple[Patches, dict[str, Tensor], Tensor, Tensor, list[Retrieved | None]]:
        """Bytes to patches: where they are cut, metrics and loss of that, what enters the core, and what its
        layers read for it."""
        patches, metrics, loss = self.chunker.cut(tokens_BT, h_BTD)
        retrieved = self.core.retrieve(tokens_BT, patches.close_M, patches.filled_M)
        return patches, metrics, loss, self.chunker.down(h_BTD, patches), retrieved

    def rejoin(self, h_BTD: Tensor, z_MD: Tensor, patches: Patches) -> Tensor:
        """Bytes that have read their patches."""
        return h_BTD + self.chunker.up(streamed(z_MD, self.config.stream), patches)

    def predict(
        self, h_BTD: Tensor, candidates_BTW: Tensor | None, labels_BT: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The logits without labels, or each target's cross entropy and their mean."""
        logits_BTV = self.head(h_BTD, candidates_BTW)
        if labels_BT is None:
            return wide(logits_BTV), None, None
        return None, *cross_entropy(logits_BTV, labels_BT)

    def judge(
        self, core: CoreOutput, valid_M: Tensor, boundary_loss: Tensor
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """What is added to the loss, the counts for `Trace`, and metrics."""
        metrics: dict[str, Tensor] = {}
        ponder_loss = self._halting(core, valid_M, metrics)
        router_loss, counts_NRE = self._routing(core, metrics)
        return self.config.boundary.weight * boundary_loss + ponder_loss + router_loss, counts_NRE, metrics

    def _halting(self, core: CoreOutput, valid_M: Tensor, metrics: dict[str, Tensor]) -> Tensor | float:
        if core.halt is None:
            return 0.0
        total, loops_M = valid_M.sum(), core.halt.loops_M
        ponder = ((loops_M + core.halt.remainder_M) * valid_M).sum() / total
        metrics["ponder"] = ponder.detach()
        metrics["halt_depth"] = (loops_M * valid_M).sum() / total
        return self.config.recurrence.ponder_weight * ponder

    def _routing(self, core: CoreOutput, metrics: dict[str, Tensor]) -> tuple[Tensor | float, Tensor | None]:
        """Mean router losses over layers and loops, and the counts for `Trace`; adds load metrics, and in
        training the load that `after_step` balances."""
        if (moe := self.config.moe) is None:
            return 0.0, None
        seen = [s for of_layer in zip(*core.stats, strict=True) for s in of_layer]
        aux, z = torch.stack([s.aux for s in seen]).mean(), torch.stack([s.z for s in seen]).mean()
        counts_NRE = torch.stack([s.counts_E for s in seen]).unflatten(0, (-1, len(core.stats)))
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
        return moe.aux_weight * aux + moe.z_weight * z, counts_NRE

    def after_step(self, *, updated: bool = True) -> None:
        """Balance the experts; where the update was skipped their load is forgotten."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.rebalance() if updated else module.load.zero_()

    def inspector(self) -> SpiderInspector:
        return SpiderInspector(self, self.config.boundary.kind, self.chunker.boundary_predictor)

    def incremental(self, context: int, n_loops: int | None = None) -> Incremental:
        return Incremental(self, context, n_loops)


class Incremental(Reader):
    """One stream's state; see the module's docstring. The model must be in evaluation mode at each piece."""

    model: Body

    def __init__(self, model: Body, context: int, n_loops: int | None = None) -> None:
        super().__init__(model, context, n_loops)
        engram, slots = model.config.engram, model.chunker.slots(context)
        self.stream = Stream(model.chunker.capacity(context))
        self.blocks = [LayerCache(context) for _ in [*model.prelude, *model.coda]]
        self.core = [[LayerCache(slots) for _ in model.core.layers] for _ in range(self.n_loops)]
        self.rope = model.rope(max(context, slots))
        # As many ids before a piece as the longest n-gram that ends in it can reach; one for boundaries.
        self.reach = max([2, *(engram.orders if engram.layers else []), *engram.byte_orders]) - 1

    def read(self, N: int) -> Tensor:
        model, start = self.model, len(self.ids) - N
        assert not model.training, "the stream is read in evaluation mode"
        tokens_1T = torch.tensor([self.ids[max(0, start - self.reach) :]], device=model.embed_tokens.device)
        rope, blocks = self.rope.part(start, start + N), iter(self.blocks)
        h_ND = model.embed(tokens_1T)[0, -N:]
        for block in model.prelude:
            h_ND, _ = block(h_ND, rope, cache=next(blocks))
        before = self.core[0][0].length
        z_KD, close_K, count_N = model.chunker.down_next(tokens_1T, h_ND, start, self.stream)
        if K := len(z_KD):
            retrieved = model.core.retrieve(tokens_1T, close_K.clamp(min=0), close_K >= 0)
            rope_K, windows = self.rope.part(before, before + K), equal_windows(1, K, z_KD.device)
            z_KD = model.core(z_KD, retrieved, rope_K, windows, self.n_loops, self.core).z_MD
        z_KD = streamed(z_KD, model.config.stream)
        h_ND = h_ND + model.chunker.up_next(z_KD, count_N, self.stream)
        for block in model.coda:
            h_ND, _ = block(h_ND, rope, cache=next(blocks))
        candidates_NW = None if self.candidates_NW is None else self.candidates_NW[-N:]
        return wide(model.head(h_ND, candidates_NW))


Model: type[LanguageModel] = Spider
