"""Mixture of experts: a router, E small SwiGLU experts of which each token uses K, and one shared expert.

``p = softmax(W x)`` in float32. The K experts with the largest ``p + bias`` are used; their gates are the
*unbiased* ``p``, normalised to sum to one (``kernels/route.py`` is all of that). The bias is not learned by
gradient: after every optimizer step it moves by ``bias_rate`` towards experts with less than the mean load
(DeepSeek-V3), so it balances without a gradient that fights the language model. An auxiliary loss (Switch)
through the mean probabilities and a z-loss on the logits help it. No token is dropped; padding slots, which
are not valid, go to no expert and do not count.

Shapes: B batch, L slots, N = B L tokens, D features, E experts, K experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.route import Routing, route, route_torch
from kernels.switch import use_triton
from spider.model.layers import Linear, SwiGLU, wide
from spider.model.spider.config import MoEConfig
from spider.model.spider.experts import Experts


class RouterStats(NamedTuple):
    """What routing one batch through one layer tells; counts are over valid tokens only."""

    counts_E: Tensor
    """Tokens each expert was given, int64."""
    aux: Tensor
    """``E * sum_e f_e mean(p_e)``, 1 when balanced."""
    z: Tensor
    """``mean(logsumexp(logits)^2)``."""


class MoE(nn.Module):
    balance_bias: Tensor
    load: Tensor

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Linear(dim, config.experts)
        self.experts = Experts(dim, config)
        self.shared = SwiGLU(dim, config.shared_hidden) if config.shared_hidden else None
        self.register_buffer("balance_bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64))

    def init_weights(self) -> None:
        self.balance_bias.zero_()
        self.load.zero_()

    def forward(self, x_BLD: Tensor, valid_BL: Tensor) -> tuple[Tensor, RouterStats]:
        """Mix the experts of every token; slots that are not ``valid_BL`` get the shared expert alone.

        The load is returned and not added up here, because under recomputation this runs twice a step.
        """
        x_ND, valid_N = x_BLD.flatten(0, 1), valid_BL.flatten()
        with torch.autocast(x_BLD.device.type, enabled=False):
            x_wide = wide(x_ND)
            logits_NE = x_wide @ self.router.weight.to(x_wide.dtype).T
            router = route if use_triton(logits_NE) else route_torch
            routing = router(logits_NE, self.balance_bias, self.config.top_k, valid_N=valid_N)
            stats = _stats(routing, valid_N)
        y_BLD = self.experts(x_ND, routing).view_as(x_BLD)
        if self.shared is not None:
            y_BLD = y_BLD + self.shared(x_BLD)
        return y_BLD, stats

    @torch.no_grad()
    def rebalance(self) -> None:
        """Move the selection bias against the load gathered since the last call, over all processes."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.load)
        load = self.load.to(self.balance_bias.dtype)
        self.balance_bias += self.config.bias_rate * torch.sign(load.mean() - load)
        self.load.zero_()


def _stats(routing: Routing, valid_N: Tensor) -> RouterStats:
    E, K = routing.scores_NE.shape[1], routing.gates_NK.shape[1]
    weight_N = valid_N.to(routing.scores_NE.dtype)
    total = weight_N.sum().clamp(min=1)
    mean_E = (routing.scores_NE * weight_N[:, None]).sum(0) / total
    aux = E * (routing.count_E / (total * K) * mean_E).sum()
    z = (routing.logsumexp_N.square() * weight_N).sum() / total
    return RouterStats(routing.count_E.long(), aux, z)
