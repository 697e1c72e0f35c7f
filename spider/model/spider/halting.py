"""Adaptive computation time (Graves, 2016): how many loops each patch uses, and the state it hands on.

``p_n = sigmoid(w . RMS(h_n) / sqrt(D) + b)``; N is the first loop at which the p so far sum to at least
``1 - epsilon``, or the last one; the remainder is ``1 - sum_{n<N} p_n``; the output is
``sum_{n<N} p_n h_n + remainder * h_N``, so the weights of every patch sum to one. All loops are computed for
all patches (shapes never change, and a halted patch is still read by others); a halted patch only stops
adding to its output. The loss adds ``ponder_weight * mean(N + remainder)``.

A patch that halts at the first loop passes no gradient to p, so a unit that saturates early never recovers:
the norm and the 1/sqrt(D) keep a few optimizer steps from doing that.

Shapes: B batch, L patches, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from spider.model.layers import no_decay, rms_norm

#: First loop's halting probability about 0.27: a patch uses several loops until it has learned not to.
_INITIAL_BIAS = -1.0


class Halt(NamedTuple):
    """Running state of the accumulation."""

    output_BLD: Tensor
    spent_BL: Tensor
    """Sum of p over the loops so far, of patches still running."""
    running_BL: Tensor
    loops_BL: Tensor
    """N, loops used."""
    remainder_BL: Tensor


class Halting(nn.Module):
    def __init__(self, dim: int, epsilon: float, eps: float) -> None:
        super().__init__()
        self.epsilon, self.eps = epsilon, eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(1))  # FSDP shards no scalar

    def init_weights(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, _INITIAL_BIAS)
        no_decay(self.weight)
        no_decay(self.bias)

    def start(self, h_BLD: Tensor) -> Halt:
        zero_BL = torch.zeros_like(h_BLD[..., 0])
        return Halt(
            torch.zeros_like(h_BLD), zero_BL, torch.ones_like(zero_BL, dtype=torch.bool), zero_BL, zero_BL
        )

    def forward(self, state: Halt, h_BLD: Tensor, last: bool) -> Halt:
        """Add one loop's state to the output of the patches that are still running."""
        w_D = self.weight * self.weight.numel() ** -0.5
        p_BL = torch.sigmoid((rms_norm(h_BLD, self.eps) * w_D).sum(-1) + self.bias)
        stops_BL = state.running_BL & ((state.spent_BL + p_BL >= 1 - self.epsilon) | last)
        remainder_BL = torch.where(stops_BL, 1 - state.spent_BL, state.remainder_BL)
        weight_BL = torch.where(stops_BL, remainder_BL, torch.where(state.running_BL, p_BL, 0.0))
        return Halt(
            output_BLD=state.output_BLD + weight_BL[..., None] * h_BLD,
            spent_BL=state.spent_BL + torch.where(stops_BL, 0.0, p_BL),
            running_BL=state.running_BL & ~stops_BL,
            loops_BL=state.loops_BL + state.running_BL,
            remainder_BL=remainder_BL,
        )
