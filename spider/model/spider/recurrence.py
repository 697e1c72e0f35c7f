"""The recurrent core: one stack of layers, run R times over the patches, and when a patch may stop.

With ``h_0 = e``, the patches that enter, loop r computes::

    x_r = RMS(h) + loop_embedding_r          y = blocks(x_r, e)          h <- A * h + Dt * (B * e) + y
    Dt = softplus(d)      A = exp(-Dt exp(a))

A is in (0, 1) whatever a and d, and the blocks see a normalised state, so h cannot grow without bound over
loops (linear time-invariant injection, as in state-space models). ``blocks(x, e)`` runs the layers on the
stream ``x + e``, to which each loop first adds ``((x W_down) * s_r) W_up``, low-rank maps shared by all
loops with a scale s_r a loop (loops past the trained ones use the last). The loop embedding is sinusoidal:
it extrapolates to any R and costs no parameter. Without injection ``h <- y``.

Halting is adaptive computation time (Graves, 2016). ``p_n = sigmoid(w . RMS(h_n) / sqrt(D) + b)``; N is the
first loop at which the p so far sum to at least ``1 - epsilon``, or the last one; the remainder is
``1 - sum_{n<N} p_n``; the output is ``sum_{n<N} p_n h_n + remainder * h_N``, so the weights of every patch
sum to one. All loops are computed for all patches (shapes never change, and a halted patch is still read
by others); a halted patch only stops adding to its output. The loss adds
``ponder_weight * mean(N + remainder)``. A patch that halts at the first loop passes no gradient to p, so a
unit that saturates early never recovers: the norm and the 1/sqrt(D) keep a few optimizer steps from that.

Gradients: loops before the last ``bptt`` run without. With ``checkpointing``, layers are recomputed in the
backward pass, wholly or in part (`spider.model.spider.recompute`).

Shapes: B batch, L patch slots, D features, R loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.layers import Linear, RMSNorm, SwiGLU, no_decay, rms_norm
from spider.model.spider.attention import LatentAttention, LayerCache, Rope
from spider.model.spider.config import MoEConfig, SpiderConfig
from spider.model.spider.engram import Engram, Memory
from spider.model.spider.moe import MoE, RouterStats
from spider.model.spider.recompute import run


class Layer(nn.Module):
    """``x += engram(x)`` where it has one; ``x += attention(RMS x)``; ``x += experts or SwiGLU(RMS x)``."""

    def __init__(
        self, config: SpiderConfig, moe: MoEConfig | None = None, engram_primes: list[int] | None = None
    ) -> None:
        super().__init__()
        D, eps = config.hidden, config.norm_eps
        self.engram = Engram(D, config.engram, engram_primes, eps) if engram_primes else None
        self.attention_norm = RMSNorm(D, eps)
        self.attention = LatentAttention(D, config.attention, eps)
        self.ffn_norm = RMSNorm(D, eps)
        self.ffn: MoE | SwiGLU = MoE(D, moe) if moe else SwiGLU(D, config.ffn_hidden)

    def forward(
        self,
        x_BLD: Tensor,
        rope: Rope,
        valid_BL: Tensor | None = None,
        memory: Memory | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        """The stream, and what the router did; experts need to know which slots are ``valid_BL``."""
        if self.engram is not None and memory is not None:
            x_BLD = x_BLD + self.engram(x_BLD, memory, cache)
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope, cache)
        if isinstance(self.ffn, MoE):
            y_BLD, stats = self.ffn(self.ffn_norm(x_BLD), valid_BL)
            return x_BLD + y_BLD, stats
        return x_BLD + self.ffn(self.ffn_norm(x_BLD)), None


class Injection(nn.Module):
    """``A * h + Dt * (B * e)``, one value of each a feature; at the start A = 1/2 and Dt B = ln 2."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.empty(dim))  # a
        self.step = nn.Parameter(torch.empty(dim))  # d
        self.gain = nn.Parameter(torch.empty(dim))  # B

    def init_weights(self) -> None:
        nn.init.zeros_(self.log_decay)
        nn.init.zeros_(self.step)
        nn.init.ones_(self.gain)
        no_decay(*self.parameters())

    def forward(self, h_BLD: Tensor, e_BLD: Tensor) -> Tensor:
        step_D = F.softplus(self.step)
        # Soon after 80 exp overflows, and inf times a step of 0 is no number.
        decay_D = torch.exp(-step_D * self.log_decay.clamp(max=80).exp())
        return decay_D * h_BLD + step_D * self.gain * e_BLD


class LoopLoRA(nn.Module):
    """``((x W_down) * s_r) W_up``; starts at zero."""

    def __init__(self, dim: int, rank: int, loops: int) -> None:
        super().__init__()
        self.down = Linear(dim, rank)
        self.up = Linear(rank, dim, std=0.0)
        self.scale = nn.Parameter(torch.empty(loops, 1, rank))

    def init_weights(self) -> None:
        nn.init.ones_(self.scale)
        no_decay(self.scale)

    def forward(self, x_BLD: Tensor, loop: int) -> Tensor:
        return self.up(self.down(x_BLD) * self.scale[min(loop, len(self.scale) - 1)])


def loop_embedding(loop: int, dim: int, device: torch.device) -> Tensor:
    """Sines and cosines of the loop's number on the first eighth of the features, zero elsewhere; (D,)."""
    half = max(1, dim // 16)
    angle = loop * 10_000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    return F.pad(torch.cat([angle.sin(), angle.cos()]), (0, dim - 2 * half))


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
        # The first p is about 0.27: a patch uses several loops until it has learned not to.
        nn.init.constant_(self.bias, -1.0)
        no_decay(self.weight, self.bias)

    def start(self, h_BLD: Tensor) -> Halt:
        zero_BL = torch.zeros_like(h_BLD[..., 0])
        running_BL = torch.ones_like(zero_BL, dtype=torch.bool)
        return Halt(torch.zeros_like(h_BLD), zero_BL, running_BL, zero_BL, zero_BL)

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


class CoreOutput(NamedTuple):
    z_BLD: Tensor
    halt: Halt | None
    stats: list[list[RouterStats]]
    """Per loop that had a gradient (in evaluation, all), per layer; empty lists without MoE."""


class RecurrentCore(nn.Module):
    def __init__(self, config: SpiderConfig, engram_primes: dict[int, list[int]]) -> None:
        super().__init__()
        self.config = r = config.recurrence
        D, self.eps = config.hidden, config.norm_eps
        layers = nn.ModuleList(Layer(config, config.moe, engram_primes.get(i)) for i in range(r.layers))
        self.layers = cast(Sequence[Layer], layers)
        self.injection = Injection(D) if r.injection else None
        self.lora = LoopLoRA(D, r.lora_rank, r.loops) if r.lora_rank else None
        self.halting = Halting(D, r.halt_epsilon, self.eps) if r.halting else None

    def read_memories(self, tokens_BT: Tensor, close_BL: Tensor, filled_BL: Tensor) -> list[Memory | None]:
        """What each layer's Engram holds for this batch (None for layers without one); see `Engram.read`."""
        read = tokens_BT, close_BL, filled_BL
        return [layer.engram.read(*read) if layer.engram else None for layer in self.layers]

    def forward(
        self,
        e_BLD: Tensor,
        memories: list[Memory | None],
        rope: Rope,
        valid_BL: Tensor,
        n_loops: int,
        caches: list[list[LayerCache]] | None = None,
    ) -> CoreOutput:
        """Run the loops; with ``caches``, one a loop and layer, the patches follow those they hold."""
        c = self.config
        without_gradient = max(0, n_loops - c.bptt) if self.training and c.bptt else 0
        stats: list[list[RouterStats]] = []
        halt = self.halting.start(e_BLD) if self.halting is not None else None
        h_BLD = e_BLD
        for r in range(n_loops):
            with torch.set_grad_enabled(torch.is_grad_enabled() and r >= without_gradient):
                x_BLD = rms_norm(h_BLD, self.eps)
                if c.loop_embedding:
                    x_BLD = x_BLD + loop_embedding(r, x_BLD.shape[-1], x_BLD.device).to(x_BLD.dtype)
                y_BLD = x_BLD + e_BLD
                if self.lora is not None:
                    y_BLD = y_BLD + self.lora(x_BLD, r)
                seen = []
                for i, (layer, memory) in enumerate(zip(self.layers, memories, strict=True)):
                    given = y_BLD, rope, valid_BL, memory, caches and caches[r][i]
                    y_BLD, s = run(layer, c.of_core, *given)
                    seen += [s] if s is not None else []
                h_BLD = y_BLD if self.injection is None else self.injection(h_BLD, e_BLD) + y_BLD
            if r >= without_gradient:
                stats.append(seen)
            if self.halting is not None and halt is not None:
                halt = self.halting(halt, h_BLD, last=r == n_loops - 1)
        return CoreOutput(h_BLD if halt is None else halt.output_BLD, halt, stats)
