"""E small SwiGLU experts of which each token uses K: who computes what, and how it comes back together.

Whatever the way, no token is dropped and the result is the sum of a token's experts, weighted by its gates:

- by our ops (``kernels/``), on a GPU: rows are copied into one segment an expert, padded to 16 rows, so that
  every size is known beforehand and nothing waits for the device; ``grouped_mm`` multiplies all segments at
  once, in bfloat16 or in fp8; the rows of a token are summed. Tokens that are not valid get no row.
- by torch: tokens are sorted by expert. Exactly N*K rows are made and the last offset is N*K, so no row is
  garbage; a token that is not valid counts as its expert 0's, with a gate of 0. On a CPU this is cheaper
  than the ops' twins, which pay for static sizes.
- ``loop``: the same rows, one product an expert. It waits for the device, to know where to cut.
- float64, which has no grouped kernel and serves proofs: every expert on every token. Its products have one
  shape whatever the routing, so a token's result does not depend, in its last bit, on how many others chose
  the same expert.

Shapes: N tokens, D features, E experts, K experts a token, P expanded rows, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.expand_to_fused import expand_to_fused
from kernels.get_fused_mapping import get_fused_mapping
from kernels.grouped_mm_fp8 import grouped_mm_fp8, runs_on
from kernels.reduce_fused import reduce_fused
from kernels.route import Routing, route_torch
from kernels.switch import use_triton
from spider.model.interface import Fp8Parts
from spider.model.layers import compute_dtype, swiglu
from spider.model.spider.config import MoEConfig, SpiderConfig

_Product = Callable[[Tensor, Tensor, Tensor], Tensor]

_ALIGNMENT = 16
"""Rows to which a segment is padded: what products in fp8 ask for."""


class Experts(nn.Module):
    """E SwiGLU experts in two stacks, ``up`` (E, D, 2F) and ``down`` (E, F, D).

    Attributes:
        fp8: multiply in fp8 (`spider.training.precision` decides); inputs are then bfloat16.
    """

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.fp8 = False
        self.implementation, self.top_k = config.implementation, config.top_k
        self.up = nn.Parameter(torch.empty(config.experts, dim, 2 * config.expert_hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.expert_hidden, dim))

    def init_weights(self) -> None:
        nn.init.normal_(self.up, std=self.up.shape[1] ** -0.5)
        nn.init.zeros_(self.down)

    def forward(self, x_ND: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of each token's experts, (N, D)."""
        dtype = compute_dtype(x_ND)
        x_ND = x_ND.to(dtype)
        if self.fp8:
            return self._by_ops(x_ND, self.up, self.down, routing, grouped_mm_fp8)
        up, down = self.up.to(dtype), self.down.to(dtype)
        if dtype != torch.float64 and self.implementation == "grouped" and use_triton(x_ND):
            return self._by_ops(x_ND, up, down, routing, _grouped_mm)
        chosen_NK = routing.chosen_NK.clamp(min=0)
        if dtype == torch.float64:
            n_N = torch.arange(len(x_ND), device=x_ND.device)
            y_NKD = (swiglu(x_ND @ up) @ down)[chosen_NK, n_N[:, None]]
        else:
            y_NKD = self._sorted(x_ND, up, down, chosen_NK)
        return (routing.gates_NK[:, :, None].to(dtype) * y_NKD).sum(1)

    def _by_ops(self, x_ND: Tensor, up: Tensor, down: Tensor, routing: Routing, product: _Product) -> Tensor:
        mapping = get_fused_mapping(routing.chosen_NK, len(up), _ALIGNMENT)
        places = mapping.token_to_pos_NK, mapping.pos_to_expert_P
        h_PF = swiglu(product(expand_to_fused(x_ND, *places), up, mapping.end_E))
        y_PD = product(h_PF, down, mapping.end_E)
        return reduce_fused(y_PD, routing.gates_NK, *places)

    def _sorted(self, x_ND: Tensor, up: Tensor, down: Tensor, chosen_NK: Tensor) -> Tensor:
        """What each of a token's experts makes of it, (N, K, D)."""
        K = chosen_NK.shape[1]
        order_P = chosen_NK.flatten().argsort(stable=True)
        place_P = order_P.argsort()
        x_PD, counts_E = x_ND.index_select(0, order_P // K), _count(chosen_NK, len(up))
        if self.implementation == "loop":
            parts = zip(x_PD.split(counts_E.tolist()), up, down, strict=True)
            y_PD = torch.cat([swiglu(x @ u) @ d for x, u, d in parts])
        else:
            ends_E = counts_E.cumsum(0).to(torch.int32)
            y_PD = _grouped_mm(swiglu(_grouped_mm(x_PD, up, ends_E)), down, ends_E)
        return y_PD.index_select(0, place_P).unflatten(0, (-1, K))


def _grouped_mm(x_PD: Tensor, w_EDF: Tensor, end_E: Tensor) -> Tensor:
    return F.grouped_mm(x_PD, w_EDF, offs=end_E)


def _count(chosen_NK: Tensor, experts: int) -> Tensor:
    """Choices of each expert, int64; a comparison and a sum, because ``bincount`` waits for the device."""
    return (chosen_NK.flatten()[:, None] == torch.arange(experts, device=chosen_NK.device)).sum(0)


class _Routed(Experts):
    """Experts whose tokens have chosen, at random: the load of a balanced router."""

    def __init__(self, dim: int, config: MoEConfig, tokens: int, device: torch.device) -> None:
        super().__init__(dim, config)
        self.to(device).init_weights()
        logits_NE = torch.randn(tokens, config.experts, device=device)
        self.routing = route_torch(logits_NE, None, config.top_k)

    def forward(self, x_ND: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x_ND, self.routing)


def fp8_parts(model: nn.Module, config: SpiderConfig, slots: Callable[[int], int]) -> Fp8Parts | None:
    """The experts that can run in fp8: in one grouped product, with widths that are multiples of 16.

    Args:
        slots: patch slots of a window of so many bytes.
    """
    moe = config.moe
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        and module.implementation == "grouped"
        and not (module.up.shape[1] % 16 or module.down.shape[1] % 16)
    }
    if moe is None or not layers:
        return None

    def example(windows: int, length: int, device: torch.device) -> tuple[nn.Module, Tensor]:
        tokens = windows * slots(length)
        return _Routed(config.hidden, moe, tokens, device), torch.randn(tokens, config.hidden, device=device)

    return Fp8Parts(layers, runs_on, example)
