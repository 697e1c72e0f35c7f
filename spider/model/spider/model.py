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

import re
from types import MappingProxyType
from typing import Literal, cast

import torch
from torch import Tensor

from spider.model.interface import Fp8Parts, LanguageModel, ModelOutput
from spider.model.layers import cross_entropy, wide
from spider.model.spider import cost
from spider.model.spider.body import Body, Trace
from spider.model.spider.engram import Memory
from spider.model.spider.experts import fp8_parts
from spider.model.spider.incremental import Incremental
from spider.model.spider.inspector import SpiderInspector
from spider.model.spider.moe import MoE
from spider.model.spider.recurrence import CoreOutput

#: Linear layers that decide something discrete or are tiny: fp8 leaves them alone.
_WIDE = re.compile(r"boundar|router|halt|loop|engram|embed|head|norm|lora")


class Spider(Body):
    """See the module's docstring; `spider.model.build_model` builds one with its weights set."""

    shown = MappingProxyType(
        {
            "bytes_per_patch": "{:.2f} bytes/patch",
            "moe_load_max": "fullest expert {:.2f}x its share",
            "halt_depth": "depth {:.2f} loops",
        }
    )

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        n_loops: int | None = None,
        reduction: Literal["mean", "none"] = "mean",
        trace: bool = False,
    ) -> ModelOutput:
        """Predict, at every position, the id that follows (`LanguageModel.__call__`); ``trace`` asks for a
        `Trace`."""
        n_loops = self.loops(n_loops)
        rope = self.rope(tokens_BT.shape[1])
        h_BTD = self.embed(tokens_BT)
        for block in self.prelude:
            h_BTD = block(h_BTD, rope)
        patches, metrics, boundary_loss = self.chunker.cut(tokens_BT, h_BTD)
        e_BLD = self.chunker.down(h_BTD, patches)
        memories: list[Memory | None] = [None] * len(self.core.layers)
        if self.config.engram.layers:
            memories = self.core.read_memories(tokens_BT, patches.close_BL, patches.filled_BL)
        core = self.core(e_BLD, memories, self.rope(e_BLD.shape[1]), patches.valid_BL, n_loops)
        h_BTD = h_BTD + self.chunker.up(core.z_BLD, patches)
        for block in self.coda:
            h_BTD = block(h_BTD, rope)
        logits_BTV = self.head(h_BTD)

        auxiliary = self.config.boundary.weight * boundary_loss
        auxiliary = auxiliary + self._halting(core, patches.valid_BL, metrics) + self._routing(core, metrics)
        inside = Trace(patches, core.loops_BL, _counts(core)) if trace else None
        if labels_BT is None:
            return ModelOutput(None, wide(logits_BTV), metrics, inside)
        nats_BT, mean = cross_entropy(logits_BTV, labels_BT)
        metrics["cross_entropy"] = mean.detach()
        loss = nats_BT if reduction == "none" else mean + auxiliary
        return ModelOutput(loss, None, metrics, inside)

    def incremental(self, context: int, n_loops: int | None = None) -> Incremental:
        return Incremental(self, context, n_loops)

    def after_step(self, *, updated: bool = True) -> None:
        """Balance the experts; where the update was skipped their load is forgotten."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.rebalance() if updated else module.load.zero_()

    def inspector(self) -> SpiderInspector:
        return SpiderInspector(self, self.config.boundary.kind, self.chunker.boundary_predictor)

    def parameters_by_part(self) -> dict[str, int]:
        return cost.parameters_by_part(self)

    def looked_up(self) -> int:
        """The embedding, which the head multiplies as well, and all of Engram."""
        parts = self.parameters_by_part()
        return parts["embedding"] + parts["engram"]

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        return cost.flops_per_token(self, length, self.loops(n_loops))

    def activation_bytes(self, windows: int, length: int, n_loops: int | None, *, narrow: bool) -> int:
        return cost.activation_bytes(self, windows, length, self.loops(n_loops), narrow=narrow)

    def keeps_wide(self, name: str) -> bool:
        return _WIDE.search(name) is not None

    def fp8_parts(self) -> Fp8Parts | None:
        """The routed experts (`spider.model.spider.experts`)."""
        return fp8_parts(self, self.config, self.chunker.slots)

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


Model: type[LanguageModel] = Spider
