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

Shapes: M rows of the core (patches of all windows), D features, R loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.layers import Linear, RMSNorm, Rope, SwiGLU, no_decay, rms_norm, streamed
from spider.model.spider.attention import LatentAttention, LayerCache
from spider.model.spider.config import MoEConfig, SpiderConfig
from spider.model.spider.engram import Engram, Retrieved
from spider.model.spider.moe import MoE, RouterStats
from spider.model.spider.recompute import narrowed, run
from spider.model.spider.windows import Windows


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
        x: Tensor,
        rope: Rope,
        windows: Windows | None = None,
        retrieved: Retrieved | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        """The stream, (B, T, D) or the rows (M, D) of ``windows``, and what the router did."""
        if self.engram is not None and retrieved is not None and windows is not None:
            x = x + self.engram(x, retrieved, windows.number_M, cache).to(x.dtype)
        x = x + self.attention(self.attention_norm(x), rope, windows, cache)
        if isinstance(self.ffn, MoE) and windows is not None:
            y, stats = self.ffn(self.ffn_norm(x), windows.valid_M)
            return x + y, stats
        return x + self.ffn(self.ffn_norm(x)), None


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

    def forward(self, h_MD: Tensor, e_MD: Tensor) -> Tensor:
        step_D = F.softplus(self.step)
        # Soon after 80 exp overflows, and inf times a step of 0 is no number.
        decay_D = torch.exp(-step_D * self.log_decay.clamp(max=80).exp())
        return decay_D * h_MD + step_D * self.gain * e_MD


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

    def of_loop(self, loop: int) -> Tensor:
        """The scale s_r, (1, rank)."""
        return self.scale[min(loop, len(self.scale) - 1)]

    def adapt(self, x_MD: Tensor, scale_1K: Tensor) -> Tensor:
        return self.up(self.down(x_MD) * scale_1K)


def loop_embedding(loops: int, dim: int, device: torch.device) -> Tensor:
    """Sines and cosines of each loop's number on the first eighth of the features, zero elsewhere; (R, D)."""
    half = max(1, dim // 16)
    rate = 10_000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.arange(loops, device=device)[:, None] * rate
    return F.pad(torch.cat([angle.sin(), angle.cos()], dim=1), (0, dim - 2 * half))


class Halt(NamedTuple):
    """Running state of the accumulation."""

    output_MD: Tensor
    spent_M: Tensor
    """Sum of p over the loops so far, of patches still running."""
    running_M: Tensor
    loops_M: Tensor
    """N, loops used."""
    remainder_M: Tensor


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

    def start(self, h_MD: Tensor) -> Halt:
        spent_M, loops_M, remainder_M = (torch.zeros_like(h_MD[..., 0]) for _ in range(3))
        running_M = torch.ones_like(loops_M, dtype=torch.bool)
        return Halt(torch.zeros_like(h_MD), spent_M, running_M, loops_M, remainder_M)

    def forward(self, state: Halt, h_MD: Tensor, last: Tensor) -> Halt:
        """Add one loop's state to the output of the patches that are still running."""
        w_D = self.weight * self.weight.numel() ** -0.5
        p_M = torch.sigmoid((rms_norm(h_MD, self.eps) * w_D).sum(-1) + self.bias)
        stops_M = state.running_M & ((state.spent_M + p_M >= 1 - self.epsilon) | last)
        remainder_M = torch.where(stops_M, 1 - state.spent_M, state.remainder_M)
        weight_M = torch.where(stops_M, remainder_M, torch.where(state.running_M, p_M, 0.0))
        return Halt(
            output_MD=state.output_MD + weight_M[..., None] * h_MD,
            spent_M=state.spent_M + torch.where(stops_M, 0.0, p_M),
            running_M=state.running_M & ~stops_M,
            loops_M=state.loops_M + state.running_M,
            remainder_M=remainder_M,
        )


class CoreOutput(NamedTuple):
    z_MD: Tensor
    halt: Halt | None
    stats: list[list[RouterStats]]
    """Per loop that had a gradient (in evaluation, all), per layer; empty lists without MoE."""


class RecurrentCore(nn.Module):
    def __init__(self, config: SpiderConfig, engram_primes: dict[int, list[int]]) -> None:
        super().__init__()
        self.config = r = config.recurrence
        self.stream = config.stream
        D, self.eps = config.hidden, config.norm_eps
        layers = nn.ModuleList(Layer(config, config.moe, engram_primes.get(i)) for i in range(r.layers))
        self.layers = cast(Sequence[Layer], layers)
        self.injection = Injection(D) if r.injection else None
        self.lora = LoopLoRA(D, r.lora_rank, r.loops) if r.lora_rank else None
        self.halting = Halting(D, r.halt_epsilon, self.eps) if r.halting else None
        self.run = run

    def retrieve(self, tokens_BT: Tensor, close_M: Tensor, filled_M: Tensor) -> list[Retrieved | None]:
        """What each layer's Engram holds for this batch (None for layers without one); see `Engram.read`."""
        read = tokens_BT, close_M, filled_M
        return [layer.engram.read(*read) if layer.engram else None for layer in self.layers]

    def forward(
        self,
        e_MD: Tensor,
        retrieved: list[Retrieved | None],
        rope: Rope,
        windows: Windows,
        n_loops: int,
        caches: list[list[LayerCache]] | None = None,
    ) -> CoreOutput:
        """Run the loops on the rows of ``windows``; with ``caches``, one a loop and layer, they are one
        stream's and follow the patches that those hold."""
        c, D, device = self.config, e_MD.shape[-1], e_MD.device
        without_gradient = max(0, n_loops - c.bptt) if self.training and c.bptt else 0
        stats: list[list[RouterStats]] = []
        halt = self.halting.start(e_MD) if self.halting is not None else None
        loop_RD = loop_embedding(n_loops, D, device).to(e_MD.dtype) if c.loop_embedding else None
        last_R = torch.arange(n_loops, device=device) == n_loops - 1
        weights = [narrowed(layer, e_MD) for layer in self.layers]
        h_MD = e_MD
        for r in range(n_loops):
            with torch.set_grad_enabled(torch.is_grad_enabled() and r >= without_gradient):
                loop_D = None if loop_RD is None else loop_RD[r]
                y_MD = self.begin(h_MD, e_MD, loop_D, None if self.lora is None else self.lora.of_loop(r))
                seen = []
                for i, (layer, read) in enumerate(zip(self.layers, retrieved, strict=True)):
                    given = rope, windows, read, caches and caches[r][i]
                    y_MD, s = self.run(layer, c.of_core, weights[i], y_MD, *given)
                    seen += [s] if s is not None else []
                h_MD = self.end(h_MD, e_MD, y_MD)
            if r >= without_gradient:
                stats.append(seen)
            if self.halting is not None and halt is not None:
                halt = self.halting(halt, h_MD, last_R[r])
        return CoreOutput(h_MD if halt is None else halt.output_MD, halt, stats)

    def begin(self, h_MD: Tensor, e_MD: Tensor, loop_D: Tensor | None, scale_1K: Tensor | None) -> Tensor:
        """What a loop's layers read: of the loop its embedding, and its scale of the low-rank maps."""
        x_MD = rms_norm(h_MD, self.eps)
        if loop_D is not None:
            x_MD = x_MD + loop_D
        y_MD = x_MD + e_MD
        if self.lora is not None and scale_1K is not None:
            y_MD = y_MD + self.lora.adapt(x_MD, scale_1K)
        return streamed(y_MD, self.stream)

    def end(self, h_MD: Tensor, e_MD: Tensor, y_MD: Tensor) -> Tensor:
        """The state after a loop that began with h, of what its layers made."""
        return y_MD if self.injection is None else self.injection(h_MD, e_MD) + y_MD

    def parts_to_compile(self) -> list[tuple[nn.Module, str]]:
        halting: list[tuple[nn.Module, str]] = [] if self.halting is None else [(self.halting, "forward")]
        return [(self, "begin"), (self, "run"), (self, "end"), *halting]
