"""The recurrent core: one stack of layers that runs R times over the patches, and halts patch by patch.

With ``h_0 = e``, the patches that enter, loop r computes::

    x_r = RMS(h) + loop_embedding_r          y = blocks(x_r, e)          h <- A * h + Dt * (B * e) + y

    Dt = softplus(d)      A = exp(-Dt exp(a))

A is in (0, 1) for every a and d, and the blocks see a normalised state, so h cannot grow without bound over
loops (linear time-invariant injection, as in state-space models). ``blocks(x, e)`` runs the layers on the
stream ``x + e``. Each loop first adds ``((x W_down) * s_r) W_up`` to that stream: low-rank maps that all
loops share, with a scale s_r per loop (loops past the trained ones use the last scale). The loop embedding is
sinusoidal. It extrapolates to any R without parameters.

Halting is adaptive computation time (Graves, 2016). ``p_n = sigmoid(w . RMS(h_n) / sqrt(D) + b)``. A patch
halts at loop N, the first where the sum of p reaches 1 - `EPSILON`, or the last loop. The remainder is ``1
- sum_{n<N} p_n``. The output is ``sum_{n<N} p_n h_n + remainder * h_N``, so the weights of every patch sum to
one. All loops are computed for all patches, because shapes stay constant and others still read a halted
patch. A halted patch only stops adding to its output. The loss adds ``PONDER_WEIGHT * mean(N + remainder)``.
A patch that halts at the first loop passes no gradient to p, so a unit that saturates early never recovers.
The norm and the 1/sqrt(D) keep a few optimizer steps from that.

Compiled, `run_layer` is one graph for all layers of a kind. Every call would cast the weights that it
multiplies; the weights of the core's layers, which run several times, are cast once before the loops
(`narrowed`). Every loop gets aliases of its own, so that the loops' gradients of a weight are summed at once.

Shapes: M rows of the core (patches of all windows), D features, R loops, K rank of the low-rank maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from kernels.sum_tensors import sum_tensors
from spider.config.model import Recompute
from spider.model.layers import Linear, RMSNorm, Rope, SwiGLU, compute_dtype, recomputing, rms_norm, streamed
from spider.model.spider.attention import LatentAttention, LayerCache
from spider.model.spider.chunking import PatchLayout
from spider.model.spider.config import MoEConfig, SpiderConfig
from spider.model.spider.engram import Engram, Retrieved
from spider.model.spider.moe import Experts, MoE, RouterStats

#: A patch halts when its sum of p is within this of 1 (Graves's epsilon): p itself never reaches 1.
EPSILON = 0.01
#: Weight of the ponder loss, per loop.
PONDER_WEIGHT = 1e-3


class Layer(nn.Module):
    """``x += engram(x)`` if it has one; ``x += attention(RMS x)``; ``x += experts or SwiGLU(RMS x)``."""

    def __init__(
        self, config: SpiderConfig, moe: MoEConfig | None = None, engram_primes: list[int] | None = None
    ) -> None:
        super().__init__()
        D = config.hidden
        self.engram = Engram(D, config.engram, engram_primes) if engram_primes else None
        self.attention_norm = RMSNorm(D)
        self.attention = LatentAttention(D, config.attention)
        self.ffn_norm = RMSNorm(D)
        self.ffn: MoE | SwiGLU = MoE(D, moe) if moe else SwiGLU(D, config.ffn_hidden)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        windows: PatchLayout | None = None,
        retrieved: Retrieved | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        """Return the stream, (B, T, D) or the rows (M, D) of ``windows``, and the router's statistics."""
        if self.engram is not None and retrieved is not None and windows is not None:
            x = x + self.engram(x, retrieved, windows.number_M, cache).to(x.dtype)
        y = self.attention(self.attention_norm(x), rope, windows, cache)
        # With an axis more, because the compiler would add to rows within attention's last product, which
        # costs a copy of x. Plain sums it fuses into the next norm.
        x = (x[None] + y[None]).squeeze(0)
        if isinstance(self.ffn, MoE) and windows is not None:
            return self.ffn(self.ffn_norm(x), windows.valid_M, residual=x)
        return x + self.ffn(self.ffn_norm(x)), None


def narrowed(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the layer's weights that products with ``x`` cast, already cast, by name; empty without
    autocast.

    A router's weights stay wide; their pieces are added. Engram's are cast in place, since they multiply only
    once per forward pass.
    """
    dtype = compute_dtype(x)
    if dtype == x.dtype:
        return {}
    cast: dict[str, Tensor] = {}
    for name, module in layer.named_modules():
        if isinstance(module, Experts):
            cast |= {f"{name}.{weight}": value for weight, value in module.casts(dtype).items()}
        elif isinstance(module, MoE):
            cast |= {f"{name}.{buffer}": value for buffer, value in module.casts().items()}
        elif isinstance(module, nn.Linear) and name.startswith(("attention.", "ffn.shared.")):
            weight = module.weight.to(dtype)
            cast_once = getattr(module, "cast_once", None)  # `spider.training.precision` sets it for fp8
            cast[f"{name}.weight"] = weight if cast_once is None else cast_once(weight)
    return cast


class _Aliases(torch.autograd.Function):
    """Tensors in the memory of ``value``, which is ``source`` in another dtype or itself."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.dtype = source.dtype
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        # The last loop's first, as its gradient is the first to be known.
        known = [grad for grad in reversed(grads) if grad is not None]
        return sum_tensors(known, ctx.dtype) if known else None, None, None


def run_layer(
    layer: nn.Module, recompute: Recompute, weights: dict[str, Tensor], x: Tensor, *inputs: Any
) -> Any:
    """Return ``layer(x, *inputs)`` with ``weights`` in place of its own; in training, keep only the
    activations that ``recompute`` leaves."""
    call = partial(_call_with, layer, weights) if weights else layer
    return recomputing(layer, recompute, call, x, *inputs)


def _call_with(layer: nn.Module, weights: dict[str, Tensor], *inputs: Any) -> Any:
    # tie_weights would look at every parameter, and the compiler makes a graph for each of their sizes.
    return functional_call(layer, weights, inputs, tie_weights=False)


class Injection(nn.Module):
    """``A * h + Dt * (B * e)`` with one value of each per feature; at first A = 1/2 and Dt B = ln 2."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.empty(dim))  # a
        self.step = nn.Parameter(torch.empty(dim))  # d
        self.gain = nn.Parameter(torch.empty(dim))  # B

    def init_weights(self) -> None:
        nn.init.zeros_(self.log_decay)
        nn.init.zeros_(self.step)
        nn.init.ones_(self.gain)

    def forward(self, h_MD: Tensor, e_MD: Tensor) -> Tensor:
        step_D = F.softplus(self.step)
        # exp overflows soon after 80, and inf times a step of 0 is NaN.
        decay_D = torch.exp(-step_D * self.log_decay.clamp(max=80).exp())
        return decay_D * h_MD + step_D * self.gain * e_MD


class LoopLoRA(nn.Module):
    """``((x W_down) * s_r) W_up``; zero at first."""

    def __init__(self, dim: int, rank: int, loops: int) -> None:
        super().__init__()
        self.down = Linear(dim, rank)
        self.up = Linear(rank, dim, std=0.0)
        self.scale = nn.Parameter(torch.empty(loops, 1, rank))

    def init_weights(self) -> None:
        nn.init.ones_(self.scale)

    def loop_scale(self, loop: int) -> Tensor:
        """Return s_r, (1, K)."""
        return self.scale[min(loop, len(self.scale) - 1)]

    def adapt(self, x_MD: Tensor, scale_1K: Tensor) -> Tensor:
        return self.up(self.down(x_MD) * scale_1K)


def loop_embedding(loops: int, dim: int, device: torch.device) -> Tensor:
    """Return (R, D): sines and cosines of each loop's number on the first eighth of the features, else 0."""
    half = max(1, dim // 16)
    rate = 10_000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.arange(loops, device=device)[:, None] * rate
    return F.pad(torch.cat([angle.sin(), angle.cos()], dim=1), (0, dim - 2 * half))


class Halt(NamedTuple):
    """Running state of adaptive computation time."""

    output_MD: Tensor
    spent_M: Tensor
    """Sum of p over the loops so far, for patches that still run."""
    running_M: Tensor
    loops_M: Tensor
    """N, loops used."""
    remainder_M: Tensor


class Halting(nn.Module):
    """Halting probability of each patch, and the weighted sum of its states."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(1))  # FSDP cannot shard a scalar

    def init_weights(self) -> None:
        nn.init.zeros_(self.weight)
        # The first p is about 0.27, so a patch uses several loops until training changes that.
        nn.init.constant_(self.bias, -1.0)

    def start(self, h_MD: Tensor) -> Halt:
        h_M = h_MD[..., 0]
        return Halt(
            output_MD=torch.zeros_like(h_MD),
            spent_M=torch.zeros_like(h_M),
            running_M=torch.ones_like(h_M, dtype=torch.bool),
            loops_M=torch.zeros_like(h_M),
            remainder_M=torch.zeros_like(h_M),
        )

    def forward(self, state: Halt, h_MD: Tensor, last: Tensor) -> Halt:
        """Add the state of one loop to the output of the patches that still run."""
        w_D = self.weight * self.weight.numel() ** -0.5
        p_M = torch.sigmoid((rms_norm(h_MD) * w_D).sum(-1) + self.bias)
        stops_M = state.running_M & ((state.spent_M + p_M >= 1 - EPSILON) | last)
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
    halt: Halt
    stats: list[list[RouterStats]]
    """Statistics by loop, then by layer; inner lists are empty without MoE."""


class RecurrentCore(nn.Module):
    """The loops over the layers; see the module's docstring."""

    def __init__(self, config: SpiderConfig, engram_primes: dict[int, list[int]]) -> None:
        super().__init__()
        self.config = r = config.recurrence
        self.stream = config.stream
        D = config.hidden
        layers = nn.ModuleList(Layer(config, config.moe, engram_primes.get(i)) for i in range(r.layers))
        self.layers = cast(Sequence[Layer], layers)
        self.injection = Injection(D)
        self.lora = LoopLoRA(D, r.lora_rank, r.loops) if r.lora_rank else None
        self.halting = Halting(D)
        self.run_layer = run_layer

    def retrieve(self, tokens_BT: Tensor, close_M: Tensor, filled_M: Tensor) -> list[Retrieved | None]:
        """Return what each layer's Engram reads for this batch, None for layers without one; see
        `Engram.read`."""
        return [
            None if layer.engram is None else layer.engram.read(tokens_BT, close_M, filled_M)
            for layer in self.layers
        ]

    def forward(
        self,
        e_MD: Tensor,
        retrieved: list[Retrieved | None],
        rope: Rope,
        windows: PatchLayout,
        n_loops: int,
        caches: list[list[LayerCache]] | None = None,
    ) -> CoreOutput:
        """Run the loops on the rows of ``windows``.

        With ``caches``, one per loop and layer, the rows continue streams and follow their cached patches.
        ``rope`` then has the angles of each row.
        """
        c = self.config
        device = e_MD.device
        stats: list[list[RouterStats]] = []
        halt = self.halting.start(e_MD)
        loop_RD = loop_embedding(n_loops, e_MD.shape[-1], device).to(e_MD.dtype)
        last_R = torch.arange(n_loops, device=device) == n_loops - 1
        weights_LR = [self._weights(layer, e_MD, n_loops) for layer in self.layers]
        retrieved_LR = [self._retrieved(read, n_loops) for read in retrieved]
        begin_R, end_R = self._aliases(e_MD, n_loops), self._aliases(e_MD, n_loops)
        h_MD = e_MD
        for r in range(n_loops):
            scale_1K = None if self.lora is None else self.lora.loop_scale(r)
            y_MD = self.begin(h_MD, begin_R[r], loop_RD[r], scale_1K)
            loop_stats: list[RouterStats] = []
            for i, layer in enumerate(self.layers):
                cache = caches and caches[r][i]
                inputs = y_MD, rope, windows, retrieved_LR[i][r], cache
                y_MD, s = self.run_layer(layer, c.of_core, weights_LR[i][r], *inputs)
                if s is not None:
                    loop_stats.append(s)
            h_MD = self.end(h_MD, end_R[r], y_MD)
            stats.append(loop_stats)
            halt = self.halting(halt, h_MD, last_R[r])
        return CoreOutput(halt.output_MD, halt, stats)

    def _aliases(self, x: Tensor, loops: int, narrow: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return what each loop reads in place of ``x``, or of ``narrow``, which is ``x`` in another dtype.

        Under autocast the gradients of all loops are kept until the first loop's is known, and are summed in
        one pass. Who recomputes everything lacks the memory for that, and adds each to one sum.
        """
        value = x if narrow is None else narrow
        differentiable = x.requires_grad and torch.is_grad_enabled()
        at_once = torch.is_autocast_enabled(x.device.type) and self.config.of_core != "full"
        if not (differentiable and at_once):
            return (value,) * loops
        return cast(tuple[Tensor, ...], _Aliases.apply(x, value.detach(), loops))

    def _weights(self, layer: Layer, x: Tensor, loops: int) -> list[dict[str, Tensor]]:
        """Return for each loop the tensors in place of the layer's own; empty without autocast."""
        narrow = narrowed(layer, x)
        own = [dict(narrow) for _ in range(loops)]
        for name, parameter in layer.named_parameters() if narrow else ():
            for weights, alias in zip(own, self._aliases(parameter, loops, narrow.get(name)), strict=True):
                weights[name] = alias
        return own

    def _retrieved(self, read: Retrieved | None, loops: int) -> list[Retrieved | None]:
        if read is None:
            return [None] * loops
        key_RMD, value_RMD = (self._aliases(part, loops) for part in read)
        return [Retrieved(*parts) for parts in zip(key_RMD, value_RMD, strict=True)]

    def begin(self, h_MD: Tensor, e_MD: Tensor, loop_D: Tensor, scale_1K: Tensor | None) -> Tensor:
        """Return the input of a loop's layers, given the loop's embedding and its scale of the low-rank
        maps."""
        x_MD = rms_norm(h_MD) + loop_D
        y_MD = x_MD + e_MD
        if self.lora is not None and scale_1K is not None:
            y_MD = y_MD + self.lora.adapt(x_MD, scale_1K)
        return streamed(y_MD, self.stream)

    def end(self, h_MD: Tensor, e_MD: Tensor, y_MD: Tensor) -> Tensor:
        """Return the state after a loop that began with h and whose layers returned y."""
        return self.injection(h_MD, e_MD) + y_MD

    def parts_to_compile(self) -> list[tuple[nn.Module, str]]:
        parts: list[tuple[nn.Module, str]] = [(self, "begin"), (self, "run_layer"), (self, "end")]
        parts.append((self.halting, "forward"))
        return parts + [(module, "quantize") for module in self.modules() if hasattr(module, "quantize")]
