"""Mixture of experts: a router, E small SwiGLU experts of which each token uses K, and one shared expert.

Routing. ``p = softmax(W x)`` in float32. The K experts with the largest ``p + bias`` are used; their gates
are the *unbiased* ``p``, normalised to sum to one. The bias is not learned by gradient: after every optimizer
step it moves by ``bias_rate`` towards experts with less than the mean load (DeepSeek-V3), so it balances
without a gradient that fights the language model. An auxiliary loss (Switch) through the mean probabilities
and a z-loss on the logits help it. No token is dropped.

Computation. Tokens are sorted by expert, so an expert's rows are contiguous and ``grouped_mm`` multiplies
all experts in one call with no host sync. Exactly N*K rows are made and the last offset is N*K: there are
no padding rows whose output or gradient would be garbage. ``loop`` is one product an expert. float64, which
has no grouped kernel and serves proofs, runs every expert on every token: its products have one shape
whatever the routing, so a token's result does not depend, in its last bit, on how many others chose the
same expert.

Shapes: N tokens, D features, E experts, K experts a token, P = N*K expanded rows, F hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spider.config import MoEConfig
from spider.model.layers import Linear, SwiGLU, compute_dtype


class RouterStats(NamedTuple):
    """What routing one batch through one layer tells; counts are over valid tokens only."""

    counts_E: Tensor
    """Tokens each expert was given, int64."""
    aux: Tensor
    """``E * sum_e f_e mean(p_e)``, 1 when balanced."""
    z: Tensor
    """``mean(logsumexp(logits)^2)``."""


class Experts(nn.Module):
    """E SwiGLU experts in two stacks, ``up`` (E, D, 2F) and ``down`` (E, F, D)."""

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.implementation, self.top_k = config.implementation, config.top_k
        self.up = nn.Parameter(torch.empty(config.experts, dim, 2 * config.expert_hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.expert_hidden, dim))

    def init_weights(self) -> None:
        nn.init.normal_(self.up, std=self.up.shape[1] ** -0.5)
        nn.init.zeros_(self.down)

    def forward(self, x_ND: Tensor, chosen_NK: Tensor) -> Tensor:
        """What each token's experts make of it, (N, K, D)."""
        E, K = len(self.up), chosen_NK.shape[1]
        dtype = compute_dtype(x_ND)
        x_ND, up, down = x_ND.to(dtype), self.up.to(dtype), self.down.to(dtype)
        n_N = torch.arange(len(x_ND), device=x_ND.device)
        if dtype == torch.float64:
            y_END = _swiglu(x_ND @ up) @ down
            return y_END[chosen_NK, n_N[:, None]]
        order_P = chosen_NK.flatten().argsort(stable=True)
        place_P = order_P.argsort()
        x_PD, counts_E = x_ND.index_select(0, order_P // K), _count(chosen_NK, E)
        if self.implementation == "loop":
            parts = zip(x_PD.split(counts_E.tolist()), up, down, strict=True)
            y_PD = torch.cat([_swiglu(x @ u) @ d for x, u, d in parts])
        else:
            ends_E = counts_E.cumsum(0).to(torch.int32)
            y_PD = F.grouped_mm(_swiglu(F.grouped_mm(x_PD, up, offs=ends_E)), down, offs=ends_E)
        return y_PD.index_select(0, place_P).unflatten(0, (-1, K))


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


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
        """Mix the experts of every token; slots that are not ``valid_BL`` are computed but not counted.

        The load is returned and not added up here, because under recomputation this runs twice a step.
        """
        K = self.config.top_k
        x_ND = x_BLD.flatten(0, 1)
        with torch.autocast(x_BLD.device.type, enabled=False):
            wide = torch.promote_types(x_ND.dtype, torch.float32)
            logits_NE = x_ND.to(wide) @ self.router.weight.to(wide).T
            probs_NE = logits_NE.softmax(-1)
            chosen_NK = (probs_NE.detach() + self.balance_bias).topk(K, dim=-1).indices
            gates_NK = probs_NE.gather(1, chosen_NK)
            gates_NK = gates_NK / (1e-20 + gates_NK.sum(-1, keepdim=True))
            stats = _stats(logits_NE, probs_NE, chosen_NK, valid_BL.flatten())

        y_NKD = self.experts(x_ND, chosen_NK)
        y_BLD = (gates_NK[:, :, None].to(y_NKD.dtype) * y_NKD).sum(1).view_as(x_BLD)
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


def _count(chosen_NK: Tensor, experts: int, valid_N: Tensor | None = None) -> Tensor:
    """Tokens of each expert as int64; a comparison and a sum, because ``bincount`` waits for the device."""
    hits = chosen_NK.flatten()[:, None] == torch.arange(experts, device=chosen_NK.device)
    if valid_N is not None:
        hits = hits & valid_N.repeat_interleave(chosen_NK.shape[1])[:, None]
    return hits.sum(0)


def _stats(logits_NE: Tensor, probs_NE: Tensor, chosen_NK: Tensor, valid_N: Tensor) -> RouterStats:
    E, K = probs_NE.shape[1], chosen_NK.shape[1]
    weight_N = valid_N.to(probs_NE.dtype)
    total = weight_N.sum().clamp(min=1)
    counts_E = _count(chosen_NK, E, valid_N)
    mean_E = (probs_NE * weight_N[:, None]).sum(0) / total
    aux = E * (counts_E / (total * K) * mean_E).sum()
    z = (logits_NE.logsumexp(-1).square() * weight_N).sum() / total
    return RouterStats(counts_E, aux, z)
