"""Mixture of experts: a router, E small SwiGLU experts, and one shared expert. Each token uses K of the E.

``p = softmax(W x)`` in float32. The K experts with the largest ``p + bias`` are used; their gates are the
*unbiased* ``p``, normalised to sum to one (``kernels/route.py`` computes all of this, and where an expert's
rows are). The bias is not learned by gradient: after every optimizer step it moves by `_BIAS_RATE` towards
experts with less than the mean load (DeepSeek-V3). So it balances without a gradient that works against the
language model. An auxiliary loss (Switch) through the mean probabilities and a z-loss on the logits support
it. No token is dropped; rows that are not valid (spare rows of the core's buffer) go to no expert and do not
count.

The result is the sum of a token's experts, weighted by its gates. There are four ways to compute it:

- Our ops (``kernels/``), on a GPU: rows are copied into one segment per expert, padded to 16 rows. Every size
  is static, so nothing waits for the device. ``grouped_mm`` multiplies all segments at once, in bfloat16 or
  fp8. One sum takes the rows of each token, the shared expert's and the residual stream. Tokens that are not
  valid get no row.
- torch: tokens are sorted by expert. There are exactly N*K rows and the last offset is N*K, so no row is
  garbage. A token that is not valid is a row of zeros for expert 0, with a gate of 0; such tokens are few. On
  a CPU this is cheaper than the twins of the ops, which pay for static sizes.
- torch, where a width is no multiple of 8: one product per expert. It waits for the device to learn sizes.
- float64, the reference: every expert on every token, because torch lacks a grouped product in float64. The
  products have one shape for any routing. So the last bit of a token's result does not depend on other
  tokens.

Shapes: N tokens, in any leading axes, D features, E experts, K experts per token, P expanded rows, F hidden
width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.expand_reduce import expand_to_fused, reduce_fused
from kernels.grouped_mm import grouped_mm
from kernels.grouped_mm_fp8 import Casts, cast_weights_fp8, grouped_mm_fp8, runs_on
from kernels.route import Routing, route, route_torch
from kernels.router_logits import cut_weights, router_logits
from kernels.switch import use_triton
from spider.model.interface import Fp8Parts
from spider.model.layers import Linear, SwiGLU, compute_dtype, swiglu
from spider.model.spider.config import MoEConfig, SpiderConfig

#: Step of the selection bias after each optimizer step (DeepSeek-V3's).
_BIAS_RATE = 1e-3
#: Rows that an expert's segment is padded to, as products in fp8 require.
_ALIGNMENT = 16

_Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class RouterStats(NamedTuple):
    """Statistics of one layer's router on one batch; only valid tokens count."""

    counts_E: Tensor
    """Tokens of each expert, int64."""
    aux: Tensor
    """``E * sum_e f_e mean(p_e)``, 1 when balanced."""
    z: Tensor
    """``mean(logsumexp(logits)^2)``."""


class MoE(nn.Module):
    """Router, experts and shared expert; see the module's docstring."""

    router_cut: Tensor
    balance_bias: Tensor
    load: Tensor

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Linear(dim, config.experts)
        self.experts = Experts(dim, config)
        self.shared = SwiGLU(dim, config.shared_hidden) if config.shared_hidden else None
        self.register_buffer("router_cut", torch.empty(0), persistent=False)  # filled by a call with `casts`
        self.register_buffer("balance_bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64))

    def init_weights(self) -> None:
        self.balance_bias.zero_()
        self.load.zero_()

    def forward(self, x: Tensor, valid: Tensor, residual: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """Mix the experts of every token (..., D), and add the ``residual``.

        Tokens that are not ``valid`` get only the shared expert.

        The load is returned and not accumulated here, because recomputation runs this twice per step.
        """
        x_ND = x.flatten(0, -2)
        valid_N = valid.flatten()
        E, K = self.config.experts, self.config.top_k
        with torch.autocast(x.device.type, enabled=False):
            cut_FD = self.router_cut if self.router_cut.numel() else None
            logits_NE = router_logits(x_ND, self.router.weight, cut_FD)
            by_ops = use_triton(logits_NE) or self.experts.fp8
            router = partial(route, alignment=_ALIGNMENT) if by_ops else route_torch
            routing = router(logits_NE, self.balance_bias, K, valid_N=valid_N)
            weight_N = valid_N.to(routing.scores_NE.dtype)
            total = weight_N.sum().clamp(min=1)
            mean_E = (routing.scores_NE * weight_N[:, None]).sum(0) / total
            aux = E * (routing.count_E / (total * K) * mean_E).sum()
            z = (routing.logsumexp_N.square() * weight_N).sum() / total
        shared_ND = None if self.shared is None else self.shared(x_ND)
        residual_ND = None if residual is None else residual.flatten(0, -2)
        y = self.experts(x_ND, routing, shared_ND, residual_ND).view_as(x)
        return y, RouterStats(routing.count_E.long(), aux, z)

    def casts(self) -> dict[str, Tensor]:
        """Return the weights of the router as products take them, a buffer for several calls; empty for bf16
        weights, which are one piece."""
        if self.router.weight.dtype != torch.float32:
            return {}
        return {"router_cut": cut_weights(self.router.weight)}

    @torch.no_grad()
    def rebalance(self, updated: Tensor | bool = True) -> None:
        """Move the selection bias against the load since the last call, summed over all processes, if the
        weights were ``updated``."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.load)
        load = self.load.to(self.balance_bias.dtype)
        self.balance_bias += _BIAS_RATE * torch.sign(load.mean() - load) * updated
        self.load.zero_()


class Experts(nn.Module):
    """E SwiGLU experts in two stacks, ``up`` (E, D, 2F) and ``down`` (E, F, D).

    With ``fp8``, which `spider.training.precision` sets, they multiply in fp8; inputs are then bfloat16.
    """

    STACKS = "up", "down"

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.fp8 = False
        self.grouped = dim % 8 == config.expert_hidden % 8 == 0  # blocks of 16 bytes
        self.top_k = config.top_k
        self.up = nn.Parameter(torch.empty(config.experts, dim, 2 * config.expert_hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.expert_hidden, dim))
        for name in self.STACKS:  # empty except during a call that gets `casts`
            for part in Casts._fields:
                self.register_buffer(f"{name}_{part}", torch.empty(0), persistent=False)

    def init_weights(self) -> None:
        nn.init.normal_(self.up, std=self.up.shape[1] ** -0.5)
        nn.init.zeros_(self.down)

    def forward(self, x_ND: Tensor, routing: Routing, *addends: Tensor | None) -> Tensor:
        """Return the weighted sum of each token's experts, (N, D), plus up to two addends if given."""
        dtype = compute_dtype(x_ND)
        x_ND = x_ND.to(dtype)
        if self.fp8:
            up_product = partial(grouped_mm_fp8, casts=self._casts("up"))
            down_product = partial(grouped_mm_fp8, casts=self._casts("down"))
            return _by_ops(x_ND, self.up, self.down, routing, up_product, down_product, *addends)
        up, down = self.up.to(dtype), self.down.to(dtype)
        if self.grouped and use_triton(x_ND):
            return _by_ops(x_ND, up, down, routing, grouped_mm, grouped_mm, *addends)
        chosen_NK = routing.chosen_NK.clamp(min=0)
        if dtype == torch.float64:
            n_N = torch.arange(len(x_ND), device=x_ND.device)
            y_NKD = (swiglu(x_ND @ up) @ down)[chosen_NK, n_N[:, None]]
        else:
            # Zeros for tokens without an expert: calibration (`compress.quantize`) sums over rows.
            has_expert_N1 = routing.chosen_NK[:, :1] >= 0
            y_NKD = self._sorted(x_ND * has_expert_N1, up, down, chosen_NK)
        y_ND = (routing.gates_NK[:, :, None].to(dtype) * y_NKD).sum(1)
        for addend_ND in addends:
            y_ND = y_ND if addend_ND is None else y_ND + addend_ND
        return y_ND

    def casts(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights in the products' dtype, and their fp8 casts if ``fp8``, as parameters and
        buffers for several calls."""
        made: dict[str, Tensor] = {}
        for name in self.STACKS:
            made[name] = weight = getattr(self, name).to(dtype)
            if self.fp8:
                casts = cast_weights_fp8(weight)._asdict()
                made |= {f"{name}_{part}": cast for part, cast in casts.items()}
        return made

    def _casts(self, name: str) -> Casts | None:
        casts = Casts(*(getattr(self, f"{name}_{part}") for part in Casts._fields))
        return casts if casts.q_EFD.numel() else None

    def _sorted(self, x_ND: Tensor, up: Tensor, down: Tensor, chosen_NK: Tensor) -> Tensor:
        """Return the output of each of a token's experts, (N, K, D), by sorting tokens."""
        order_P = chosen_NK.flatten().argsort(stable=True)
        rank_P = order_P.argsort()
        x_PD = x_ND.index_select(0, order_P // self.top_k)
        # A comparison and a sum, because ``bincount`` waits for the device.
        counts_E = (chosen_NK.flatten()[:, None] == torch.arange(len(up), device=x_ND.device)).sum(0)
        if not self.grouped:
            parts = zip(x_PD.split(counts_E.tolist()), up, down, strict=True)
            y_PD = torch.cat([swiglu(x @ u) @ d for x, u, d in parts])
        else:
            ends_E = counts_E.cumsum(0).to(torch.int32)
            y_PD = grouped_mm(swiglu(grouped_mm(x_PD, up, ends_E)), down, ends_E)
        return y_PD.index_select(0, rank_P).unflatten(0, (-1, self.top_k))


def _by_ops(
    x_ND: Tensor,
    up: Tensor,
    down: Tensor,
    routing: Routing,
    up_product: _Product,
    down_product: _Product,
    *addends: Tensor | None,
) -> Tensor:
    assert routing.maps is not None, "route_torch makes none without an alignment"
    token_to_pos_NK, pos_to_expert_P, end_E = routing.maps
    x_PD = expand_to_fused(x_ND, token_to_pos_NK, pos_to_expert_P)
    h_PF = swiglu(up_product(x_PD, up, end_E))
    y_PD = down_product(h_PF, down, end_E)
    return reduce_fused(y_PD, routing.gates_NK, token_to_pos_NK, pos_to_expert_P, *addends)


def fp8_parts(model: nn.Module, config: SpiderConfig) -> Fp8Parts | None:
    """Return the experts that can run in fp8: in a grouped product, with widths that are multiples of 16."""
    moe = config.moe
    if moe is None or config.hidden % 16 or moe.expert_hidden % 16:
        return None
    return Fp8Parts({name: one for name, one in model.named_modules() if isinstance(one, Experts)}, runs_on)
