"""The small parts that families share: norms, linear maps, SwiGLU, RoPE, causal attention, the loss.

Initialisation. Constructors leave weights unset. A model's ``reset_parameters`` visits every module in order
and calls its ``init_weights``. A model can therefore be built on the meta device, materialised with
``to_empty`` and then initialised, and one seed gives one model. A linear map starts at ``N(0, 1/fan_in)``. A
map that writes into the residual stream starts at zero: every block is the identity at first, so depth costs
nothing at step one.

Shapes: ``...D`` any leading axes and D features, F hidden width of a feed-forward; B windows, T tokens of a
window, V vocabulary size; H heads of d features.

Recomputation (`recomputing`) takes less memory for more time. The backward pass computes again what a layer
would keep for it:

    none        Keep all activations.
    selective   Keep the outputs of matrix products and of attention. Recompute norms, rotations, gates and
                what tables hold, which move bytes and multiply little.
    full        Keep only the layer's input.

A layer draws no random numbers and changes no buffer, so recomputation repeats it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from spider.config.model import Recompute
from spider.tokens import IGNORED

#: Term below the root of every RMS norm: small against the mean square of any stream that is in use.
NORM_EPS = 1e-6
#: Scores of all heads and windows up to which `causal_attention` multiplies all positions at once.
_SMALL_SCORES = 1 << 20


def rms_norm(x: Tensor) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + NORM_EPS)`` over the last axis."""
    if _by_hand(x) and x.dtype in (torch.float32, torch.float64):
        return cast(Tensor, _Normed.apply(x))
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)


def _by_hand(x: Tensor) -> bool:
    """Tell whether an operation on ``x`` computes its gradient by fewer passes over memory than autograd's:
    in code for a CPU that is not compiled."""
    return x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _Normed(torch.autograd.Function):
    """``n = x / r`` with the root mean square r; ``dx = (dn - n mean(dn n)) / r``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        n, reciprocal = torch.ops.aten._fused_rms_norm(x, (x.shape[-1],), None, NORM_EPS)
        ctx.save_for_backward(n, reciprocal)
        return n

    @staticmethod
    def backward(ctx: Any, dn: Tensor) -> Tensor:  # type: ignore[override]
        n, reciprocal = ctx.saved_tensors
        return torch.addcmul(dn, n, (dn * n).mean(-1, keepdim=True), value=-1).mul_(reciprocal)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of ``x``: autocast's if it is on, else that of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def streamed(x: Tensor, width: Literal["wide", "narrow"]) -> Tensor:
    """Cast the input of a stack of layers to the width of their residual stream."""
    return x.to(compute_dtype(x)) if width == "narrow" else x


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropies in nats, (B, T) with 0 where a label is `IGNORED`, and the mean of the
    others."""
    arguments = wide(logits_BTV).flatten(0, 1), labels_BT.flatten()
    nats_N = _CrossEntropy.apply(*arguments) if _by_hand(logits_BTV) else _cross_entropy(*arguments)
    nats_BT = nats_N.view_as(labels_BT)
    return nats_BT, nats_BT.sum() / (labels_BT != IGNORED).sum().clamp(min=1)


def _cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="none")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        log_NV = logits_NV.log_softmax(-1)
        ctx.save_for_backward(log_NV, labels_N)
        return F.nll_loss(log_NV, labels_N, ignore_index=IGNORED, reduction="none")

    @staticmethod
    def backward(ctx: Any, d_N: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        log_NV, labels_N = ctx.saved_tensors
        d_N1 = d_N.masked_fill(labels_N == IGNORED, 0)[:, None]
        d_NV = log_NV.exp().mul_(d_N1)
        return d_NV.scatter_add_(1, labels_N.clamp(min=0)[:, None], -d_N1), None


def capped(x: Tensor, cap: float) -> Tensor:
    """Return ``cap tanh(x / cap)``."""
    return cast(Tensor, _Capped.apply(x, cap)) if _by_hand(x) else cap * (x / cap).tanh()


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        bent = (x / cap).tanh_()
        ctx.save_for_backward(bent)
        return cap * bent

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.ops.aten.tanh_backward(dy, *ctx.saved_tensors), None


def swiglu(x: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, where the last axis of ``x`` is ``[gate; up]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class Rope(NamedTuple):
    """Cosines and sines of the angles of T positions, each (T, d_rope / 2)."""

    cos: Tensor
    sin: Tensor

    def part(self, start: int, end: int) -> Rope:
        """Return the angles of positions start..end-1."""
        return Rope(self.cos[start:end], self.sin[start:end])

    def at(self, number_M: Tensor) -> Rope:
        """Return the angles of M rows at these positions, (M, 1, d_rope / 2), to broadcast over heads."""
        return Rope(self.cos[number_M, None], self.sin[number_M, None])


def rope_table(
    length: int, dim: int, base: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> Rope:
    """Return cosine and sine of the angles ``t * base^(-2i/dim)`` of positions 0..length-1.

    They are as wide as ``dtype`` and at least float32, also under autocast. In bfloat16, which has 8
    significant bits, neighbouring positions would have the same angle from position 257 on.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    frequency = base ** (-torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)
    angle = torch.arange(length, device=device, dtype=dtype)[:, None] * frequency
    return Rope(angle.cos(), angle.sin())


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs ``(x_i, x_{i + dim/2})`` of the last axis; ``x`` is (..., T, d_rope)."""
    cos, sin = rope.cos.to(x.dtype), rope.sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``softmax(q k^T / sqrt(d)) v`` over each position and earlier ones; all are (B, H, T, d).

    It is SDPA except for short windows in bf16 on a CPU, where explicit products are faster, forward and
    backward.
    """
    B, H, T, d = q.shape
    short = T <= 512  # explicit products keep T^2 weights
    if not (q.device.type == "cpu" and q.dtype == torch.bfloat16 and short):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    later_TT = torch.full((T, T), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    q, k, v = (x.reshape(B * H, T, -1) for x in (q, k, v))

    def attended(start: int, end: int) -> Tensor:
        rows, seen = slice(start, end), slice(end)
        score = torch.baddbmm(later_TT[rows, seen], q[:, rows], k[:, seen].mT, alpha=d**-0.5)
        return torch.bmm(score.softmax(-1), v[:, seen])

    # The first half of the positions sees none of the second. Blocks of 32 keep the order of all sums.
    middle = T // 64 * 32
    if B * H * T * T > _SMALL_SCORES and middle and not torch.compiler.is_compiling():
        return torch.cat([attended(0, middle), attended(middle, T)], 1).view(B, H, T, -1)
    return attended(0, T).view(B, H, T, -1)


def has_offsets(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether `attention_by_offsets` runs: flash attention, in two bytes on a GPU."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and narrow and torch.cuda.get_device_capability(device)[0] >= 8


def attention_by_offsets(
    q_MHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, offset_S: Tensor, longest: int, window: int | None = None
) -> Tensor:
    """Return `causal_attention` within each of S - 1 contiguous sequences of rows, (M, H, V).

    Args:
        offset_S: int32, beginning of each sequence, and the end.
        longest: length of the longest sequence, or an upper bound.
        window: number of earlier rows that a row sees (None: all of its sequence).
    """
    from torch.nn.attention.varlen import varlen_attn  # which imports the compiler

    seen = (-1 if window is None else window, 0)
    out_MHV = varlen_attn(q_MHK, k_MHK, v_MHK, offset_S, offset_S, longest, longest, window_size=seen)
    assert isinstance(out_MHV, Tensor), "without return_aux there is one result"
    return out_MHV


class RMSNorm(nn.Module):
    """RMS norm with one weight per feature, computed in at least float32 and rounded to its input's dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def init_weights(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (rms_norm(wide(x)) * self.weight).to(x.dtype)


class Linear(nn.Linear):
    """Linear map whose weights start at ``N(0, std^2)`` (default 1/sqrt(fan_in)) and whose bias starts at
    ``bias`` (None: no bias)."""

    def __init__(
        self, fan_in: int, fan_out: int, *, std: float | None = None, bias: float | None = None
    ) -> None:
        self.std = fan_in**-0.5 if std is None else std
        self.bias_start = bias
        super().__init__(fan_in, fan_out, bias=bias is not None)

    def reset_parameters(self) -> None:
        """Draw no numbers: torch calls this in the constructor, and `init_weights` sets the weights."""

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias_start is not None:
            nn.init.constant_(self.bias, self.bias_start)


class SwiGLU(nn.Module):
    """``W_down (silu(W_gate x) * W_up x)``; gate and up are one matrix and one product."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(dim, 2 * hidden)
        self.down = Linear(hidden, dim, std=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.up(x)))


#: Operators whose outputs selective recomputation keeps.
_COSTLY = {
    "aten::mm",
    "aten::mm.dtype",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "spider::grouped_mm_fp8",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
}


def recomputing(layer: nn.Module, recompute: Recompute, call: Callable[..., Any], *inputs: Any) -> Any:
    """Return ``call(*inputs)``, which runs a layer; in training, keep only the activations that ``recompute``
    leaves."""
    if recompute == "none" or not (layer.training and torch.is_grad_enabled()):
        return call(*inputs)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        if not torch.compiler.is_compiling():
            # A weight that an earlier call cast is cast again in the backward pass, which counts the casts.
            torch.clear_autocast_cache()
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(call, *inputs, **options)


def _policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
