"""Make the ops that ``kernel_speed.py`` measures: arguments at a shape, bytes they must move, and rivals.

Every op is called as its kernel, as its torch version as it is, and as that version compiled. An op that
moves rows of experts is also called as a Python loop over the experts. A backward is the part of autograd
behind an op's results, given their gradients; its forward is done once, before.

Bytes are those that every implementation must move: each argument read once and each result written once.
Padding rows count, rows of tokens that are not valid do not. P is the static number of rows at an alignment
of 16.

Letters: N tokens, D features, E experts, K experts per token, F hidden width of an expert, P fused rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from device_time import Way, tensors
from torch import Tensor, nn

from kernels import switch
from kernels.aux_fi import aux_fi, aux_fi_torch
from kernels.cast_fp8 import cast_columns_fp8, cast_columns_fp8_torch, cast_rows_fp8, cast_rows_fp8_torch
from kernels.engram_conv import engram_conv, engram_conv_torch
from kernels.engram_gate import engram_gate, engram_gate_torch
from kernels.engram_hash import engram_hash, engram_hash_torch
from kernels.expand_reduce import expand_to_fused, expand_to_fused_torch, reduce_fused, reduce_fused_torch
from kernels.get_fused_mapping import FusedMapping, get_fused_mapping, get_fused_mapping_torch
from kernels.grouped_mm_fp8 import grouped_mm_fp8
from kernels.normalize_weight import normalize_weight, normalize_weight_torch
from kernels.route import route, route_torch
from kernels.segment_sum import segment_sum, segment_sum_torch
from kernels.topk_gate import topk_gate, topk_gate_torch
from spider.model.spider.config import EngramConfig, MoEConfig
from spider.model.spider.engram import CONV_TAPS, multiplier, primes_from
from spider.model.spider.moe import MoE
from spider.tokens import BYTES

ALIGNMENT = 16
WINDOW = 256
"""Bytes of a window; a batch has N bytes."""

ROWS = torch.bfloat16

#: Largest distance of a layer's results. In a near tie a token may go to another expert. In fp8 two products
#: follow each other, each off by 4% at worst.
OFF, OFF_FP8 = 0.05, 0.15


class Shape(NamedTuple):
    N: int
    D: int
    E: int
    K: int
    F: int
    shared: int = 0
    """Width of the layer's shared expert (0: none)."""
    filled: int | None = None
    """Number of valid tokens (None: all)."""

    @property
    def real(self) -> int:
        """Return the number of tokens that go to experts."""
        return self.N if self.filled is None else self.filled

    def valid(self, device: torch.device) -> Tensor:
        """Draw which tokens are valid, (N,)."""
        return torch.rand(self.N, device=device).argsort() < self.real

    def __str__(self) -> str:
        tokens = f"N {self.N:,}" if self.real == self.N else f"N {self.N:,} ({self.real:,} valid)"
        return f"{tokens}, D {self.D:,}, E {self.E}, k {self.K}, F {self.F:,}"


class Op(NamedTuple):
    """An op with its arguments; those that require a gradient get one."""

    kernel: Callable[..., Any]
    twin: Callable[..., Any]
    arguments: tuple
    moved: int
    """Bytes, forward."""
    moved_backward: int | None = None
    """Bytes, backward (None: the op has no derivative)."""
    loop: Callable[..., Any] | None = None
    """The same by a Python loop over the experts, with the same arguments."""


def routed(s: Shape, device: torch.device) -> tuple[Tensor, Tensor, FusedMapping]:
    """Return logits, choices and their mapping.

    Logits lie on a coarse grid, so that they tie exactly or not at all and all implementations choose alike.
    """
    logits_NE = (torch.randn(s.N, s.E, device=device) * 64).round() / 64
    chosen_NK = topk_gate_torch(logits_NE, s.K).masked_fill(~s.valid(device)[:, None], -1)
    return logits_NE, chosen_NK, get_fused_mapping_torch(chosen_NK, s.E, ALIGNMENT)


def expand(s: Shape, device: torch.device) -> Op:
    _, chosen_NK, m = routed(s, device)
    P = len(m.pos_to_expert_P)

    def loop(x_ND: Tensor, *_: Tensor) -> list[Tensor]:
        return [x_ND[(chosen_NK == e).any(1)] for e in range(s.E)]

    x_ND = torch.randn(s.N, s.D, device=device, dtype=ROWS, requires_grad=True)
    return Op(
        expand_to_fused,
        expand_to_fused_torch,
        (x_ND, m.token_to_pos_NK, m.pos_to_expert_P),
        moved=2 * (s.real + P) * s.D + 4 * s.N * s.K + 4 * P,
        moved_backward=2 * (s.real * s.K + s.N) * s.D + 4 * s.N * s.K,
        loop=loop,
    )


def reduce(s: Shape, device: torch.device) -> Op:
    _, chosen_NK, m = routed(s, device)
    P, starts = len(m.pos_to_expert_P), m.start_E.tolist()

    def loop(y_PD: Tensor, w_NK: Tensor, *_: Tensor) -> Tensor:
        out_ND = y_PD.new_zeros(s.N, s.D)
        for e, start in enumerate(starts):
            n, k = (chosen_NK == e).nonzero(as_tuple=True)
            rows = y_PD[start : start + len(n)] * w_NK[n, k, None].to(y_PD.dtype)
            out_ND.index_add_(0, n, rows)
        return out_ND

    y_PD = torch.randn(P, s.D, device=device, dtype=ROWS, requires_grad=True)
    w_NK = torch.rand(s.N, s.K, device=device, requires_grad=True)
    return Op(
        reduce_fused,
        reduce_fused_torch,
        (y_PD, w_NK, m.token_to_pos_NK, m.pos_to_expert_P),
        moved=2 * (s.real * s.K + s.N) * s.D + 8 * s.N * s.K,
        moved_backward=2 * (s.real * (s.K + 1) + P) * s.D + 12 * s.N * s.K + 4 * P,
        loop=loop,
    )


def mapping(s: Shape, device: torch.device) -> Op:
    _, chosen_NK, m = routed(s, device)

    def loop(chosen_NK: Tensor, *_: int) -> list[Tensor]:
        return [(chosen_NK == e).nonzero() for e in range(s.E)]

    moved = 20 * s.N * s.K + 12 * len(m.pos_to_expert_P)
    return Op(get_fused_mapping, get_fused_mapping_torch, (chosen_NK, s.E, ALIGNMENT), moved=moved, loop=loop)


def gate(s: Shape, device: torch.device) -> Op:
    scores_NE = routed(s, device)[0].softmax(1)
    return Op(topk_gate, topk_gate_torch, (scores_NE, s.K), moved=s.N * (4 * s.E + 8 * s.K))


def normalize(s: Shape, device: torch.device) -> Op:
    w_NK = torch.rand(s.N, s.K, device=device)
    return Op(normalize_weight, normalize_weight_torch, (w_NK,), moved=s.N * (8 * s.K + 4))


def load(s: Shape, device: torch.device) -> Op:
    return Op(aux_fi, aux_fi_torch, (routed(s, device)[1], s.E, s.K), moved=8 * s.N * s.K)


def router(s: Shape, device: torch.device) -> Op:
    """Return the router as the model uses it, with gradients from gates, scores and logsumexp."""
    logits_NE = routed(s, device)[0].requires_grad_()
    valid_N = None if s.filled is None else s.valid(device)
    return Op(
        route,
        route_torch,
        (logits_NE, torch.zeros(s.E, device=device), s.K, valid_N),
        moved=s.N * (8 * s.E + 12 * s.K + 4),
        moved_backward=s.N * (12 * s.E + 16 * s.K + 8),
    )


def hashes(s: Shape, device: torch.device) -> Op:
    """Return the hashes of N bytes for the tables of the default configuration."""
    config = EngramConfig()
    ids_BT = torch.randint(0, 256, (max(s.N // WINDOW, 1), min(s.N, WINDOW)), device=device)
    primes = primes_from(config.table_size, len(config.orders) * config.heads)
    multipliers = [multiplier(i) for i in range(max(config.orders))]
    arguments = ids_BT, config.orders, multipliers, primes, BYTES.bos, BYTES.pad
    return Op(engram_hash, engram_hash_torch, arguments, moved=ids_BT.numel() * (8 + 8 * len(primes)))


def memory_gate(s: Shape, device: torch.device) -> Op:
    """Return the gate with values in bfloat16 and the rest in float32, as under autocast."""
    h_ND, key_ND = (torch.randn(s.N, s.D, device=device, requires_grad=True) for _ in range(2))
    value_ND = torch.randn(s.N, s.D, device=device, dtype=ROWS, requires_grad=True)
    weight_D = torch.rand(s.D, device=device, requires_grad=True)
    arguments = h_ND, key_ND, value_ND, weight_D, 1e-5
    return Op(engram_gate, engram_gate_torch, arguments, 14 * s.N * s.D, 24 * s.N * s.D)


def memory_conv(s: Shape, device: torch.device) -> Op:
    """Return the convolution of windows of 64 rows in bfloat16, as in a narrow stream.

    The backward has two kernels; the bytes that the first leaves for the second do not count as moved.
    """
    v_ND = torch.randn(s.N, s.D, device=device, dtype=ROWS, requires_grad=True)
    number_N = torch.arange(s.N, device=device) % 64
    taps_KD = torch.rand(CONV_TAPS, s.D, device=device, requires_grad=True)
    weight_D = torch.rand(s.D, device=device, requires_grad=True)
    arguments = v_ND, number_N, taps_KD, weight_D, 1e-5
    return Op(engram_conv, engram_conv_torch, arguments, 4 * s.N * s.D, 6 * s.N * s.D)


def patch_sums(s: Shape, device: torch.device) -> Op:
    """Return the sums of N bytes in patches of four, in float32 like the residual stream."""
    x_ND = torch.randn(s.N, s.D, device=device, requires_grad=True)
    patch_N = torch.arange(s.N, device=device) // 4
    edge = torch.arange(s.N // 4 + 1, device=device) * 4
    moved = 4 * (s.N + s.N // 4) * s.D
    return Op(segment_sum, segment_sum_torch, (x_ND, patch_N, edge), moved, moved)


def cast_rows(s: Shape, device: torch.device) -> Op:
    """Return the cast of the fused rows."""
    x_PD = torch.randn(s.N * s.K, s.D, device=device, dtype=ROWS)
    return Op(cast_rows_fp8, cast_rows_fp8_torch, (x_PD,), moved=s.N * s.K * (3 * s.D + 4))


def cast_columns(s: Shape, device: torch.device) -> Op:
    """Return the cast of the experts' first weights from float32."""
    w_EDF = torch.randn(s.E, s.D, 2 * s.F, device=device)
    return Op(cast_columns_fp8, cast_columns_fp8_torch, (w_EDF,), moved=s.E * 2 * s.F * (5 * s.D + 4))


OPS: dict[str, Callable[[Shape, torch.device], Op]] = {
    "expand": expand,
    "reduce": reduce,
    "route": router,
    "mapping": mapping,
    "topk_gate": gate,
    "normalize": normalize,
    "aux_fi": load,
    "engram_hash": hashes,
    "engram_gate": memory_gate,
    "engram_conv": memory_conv,
    "segment_sum": patch_sums,
    "cast_rows_fp8": cast_rows,
    "cast_columns_fp8": cast_columns,
}


def has_backward(name: str) -> bool:
    """Return whether an op has a derivative."""
    return name in ("expand", "reduce", "route", "engram_gate", "engram_conv", "segment_sum")


def forward_ways(op: Op, compiled: Callable[..., Any]) -> dict[str, Way]:
    """Return the ways to call an op; ``compiled`` compiles a function."""
    arguments = [a.detach() if isinstance(a, Tensor) else a for a in op.arguments]
    ways = {
        "twin": Way(lambda: op.twin(*arguments), gives="twin"),
        "kernel": Way(lambda: op.kernel(*arguments), kernels="auto", gives="twin", moved=op.moved),
    }
    if op.loop:
        ways["loop"] = Way(lambda: op.loop(*arguments))
    fused = compiled(op.twin)
    return ways | {"compiled": Way(lambda: fused(*arguments), gives="twin"), "copy": copy_of(op.moved, op)}


def backward_ways(op: Op, compiled: Callable[..., Any]) -> dict[str, Way]:
    """Return the ways to call the backward of an op."""
    assert op.moved_backward is not None
    ways = {
        "twin": Way(_backward(op.twin, op.arguments), gives="twin"),
        "kernel": Way(
            _backward(op.kernel, op.arguments), kernels="auto", gives="twin", moved=op.moved_backward
        ),
    }
    if op.loop:
        ways["loop"] = Way(_backward(op.loop, op.arguments))
    fused = _backward(compiled(op.twin), op.arguments)
    return ways | {"compiled": Way(fused, gives="twin"), "copy": copy_of(op.moved_backward, op)}


def _backward(function: Callable[..., Any], arguments: tuple) -> Callable[[], Any]:
    """Return the backward alone; its forward runs in the first call, so on the stream of that call."""
    inputs = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    forward: list[tuple[list[Tensor], list[Tensor]]] = []

    def call() -> Any:
        if not forward:
            outputs = [y for y in tensors(function(*arguments)) if y.requires_grad]
            generator = torch.Generator(inputs[0].device).manual_seed(0)
            gradients = [
                torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype) for y in outputs
            ]
            forward.append((outputs, gradients))
        return torch.autograd.grad(forward[0][0], inputs, forward[0][1], retain_graph=True)

    return call


def copy_of(moved: int, op: Op) -> Way:
    """Return a copy on the device that reads half of so many bytes and writes the other half."""
    device = next(a.device for a in op.arguments if isinstance(a, Tensor))
    source = torch.randint(0, 255, (moved // 2,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return Way(lambda: target.copy_(source), moved=moved)


def layer_ways(s: Shape, device: torch.device, compiled: Callable[..., Any]) -> dict[str, Way]:
    """Return forward and backward of the model's layer in bfloat16, with the gradients of both losses."""
    config = MoEConfig(experts=s.E, top_k=s.K, expert_hidden=s.F, shared_hidden=s.shared)
    grouped = _moe(config, s.D, device)
    loop = _moe(config.model_copy(update={"implementation": "loop"}), s.D, device)
    loop.load_state_dict(grouped.state_dict())
    fp8 = copy.deepcopy(grouped)
    fp8.experts.fp8 = True
    x_BLD = torch.randn(1, s.N, s.D, device=device, dtype=ROWS, requires_grad=True)
    valid_BL = s.valid(device)[None]
    gradients = [
        torch.randn_like(x_BLD),
        torch.tensor(0.01, device=device),
        torch.tensor(1e-3, device=device),
    ]

    def step(moe: nn.Module, run: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> list[Tensor]:
            y_BLD, stats = run(x_BLD, valid_BL)
            inputs = [x_BLD, *moe.parameters()]
            return [y_BLD, *torch.autograd.grad([y_BLD, stats.aux, stats.z], inputs, gradients)]

        return call

    ways: dict[str, tuple[nn.Module, switch.Mode, float]] = {
        "torch": (grouped, "torch", OFF),
        "kernels": (grouped, "auto", OFF),
        "kernels fp8": (fp8, "auto", OFF_FP8),
    }
    timed = {"loop": Way(step(loop, loop))}
    for name, (moe, mode, off) in ways.items():
        timed[name] = Way(step(moe, moe), mode, "loop", off)
        timed[f"{name} compiled"] = Way(step(moe, compiled(moe)), mode, "loop", off)
    return timed


def _moe(config: MoEConfig, dim: int, device: torch.device) -> MoE:
    moe = MoE(dim, config).to(device)
    moe.init_weights()
    with torch.no_grad():
        for weight in moe.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5)
            weight.data = weight.data.to(ROWS)
    return moe


def expert_ways(s: Shape, device: torch.device, compiled: Callable[..., Any]) -> dict[str, Way]:
    """Return forward and backward of the expert products alone, from fused rows to fused rows."""
    mapped = routed(s, device)[2]
    end_E, P = mapped.end_E, int(mapped.end_E[-1])
    # The model has as many rows. Products skip the rows behind the last end, casts do not.
    x_PD = torch.randn(len(mapped.pos_to_expert_P), s.D, device=device, dtype=ROWS, requires_grad=True)
    up = (torch.randn(s.E, s.D, 2 * s.F, device=device, dtype=ROWS) * s.D**-0.5).requires_grad_()
    down = (torch.randn(s.E, s.F, s.D, device=device, dtype=ROWS) * s.F**-0.5).requires_grad_()
    dy_PD = torch.randn_like(x_PD)

    def bf16(x_PD: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate_PF, linear_PF = F.grouped_mm(x_PD, up, offs=end_E).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate_PF) * linear_PF, down, offs=end_E)

    def fp8(x_PD: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate_PF, linear_PF = grouped_mm_fp8(x_PD, up, end_E).chunk(2, dim=-1)
        return grouped_mm_fp8(F.silu(gate_PF) * linear_PF, down, end_E)

    def step(products: Callable[..., Tensor]) -> Callable[[], Any]:
        def call() -> list[Tensor]:
            y_PD = products(x_PD, up, down)
            dx_PD, *weights = torch.autograd.grad(y_PD, [x_PD, up, down], dy_PD)
            return [y_PD[:P], dx_PD[:P], *weights]

        return call

    return {
        "bf16": Way(step(bf16), "auto"),
        "bf16 compiled": Way(step(compiled(bf16)), "auto", "bf16", OFF),
        "fp8": Way(step(fp8), "auto", "bf16", OFF_FP8),
        "fp8 compiled": Way(step(compiled(fp8)), "auto", "bf16", OFF_FP8),
    }
