"""The small parts that families share: norms, linear maps, SwiGLU, RoPE, causal attention, the loss, and how
weights begin.

Initialisation. Construction leaves weights unset; a model's ``reset_parameters`` visits every module in order
and calls its ``init_weights``. So a model may be built on the meta device, materialised with ``to_empty``
and then initialised, and one seed gives one model. A linear map starts at ``N(0, 1/fan_in)``; a map that
writes into the residual stream starts at zero, which makes every block the identity at first and lets depth
cost nothing at step one.

Marks. ``_no_weight_decay`` on a parameter says that it must not decay (norms, biases, LTI vectors);
``_is_embedding`` that it is a table of rows, to be trained with AdamW and not as a matrix; ``_lr_scale`` that
it learns at so many times its group's rate. ``init_weights`` sets them again because ``to_empty`` makes new
parameters.

Shapes: ``...D`` any leading axes and D features, F hidden width of a feed-forward; B windows, T ids of them,
V ids of the vocabulary; H heads of d features.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.tokens import IGNORED


def no_decay(*parameters: Tensor) -> None:
    """Mark parameters that weight decay must leave alone."""
    for parameter in parameters:
        parameter._no_weight_decay = True  # type: ignore[attr-defined]


def embedding_like(parameter: Tensor) -> None:
    """Mark a table whose rows are looked up, not multiplied; decay would shrink rows that are never read."""
    parameter._is_embedding = True  # type: ignore[attr-defined]
    no_decay(parameter)


def scaled_lr(parameter: Tensor, scale: float) -> None:
    """Mark a parameter that learns at so many times its group's rate."""
    parameter._lr_scale = scale  # type: ignore[attr-defined]


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, without a weight."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product of ``x`` runs: autocast's where it is on, else ``x``'s own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def streamed(x: Tensor, width: Literal["wide", "narrow"]) -> Tensor:
    """What enters a stack of layers, as wide as their residual stream is to be."""
    return x.to(compute_dtype(x)) if width == "narrow" else x


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropies in nats, (B, T) with 0 where a label is `IGNORED`, and their mean over the others."""
    nats_BT = F.cross_entropy(
        wide(logits_BTV).flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(labels_BT)
    return nats_BT, nats_BT.sum() / (labels_BT != IGNORED).sum().clamp(min=1)


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[gate; up]`` in the last axis."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class Rope(NamedTuple):
    """Cosine and sine of every position's angles, each (T, d_rope / 2)."""

    cos: Tensor
    sin: Tensor

    def part(self, start: int, end: int) -> Rope:
        """The angles of positions start..end-1."""
        return Rope(self.cos[start:end], self.sin[start:end])

    def at(self, number_M: Tensor) -> Rope:
        """The angles of rows that have these positions, (M, 1, d_rope / 2), for all of a row's heads."""
        return Rope(self.cos[number_M, None], self.sin[number_M, None])


def rope_table(
    length: int, dim: int, base: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> Rope:
    """Return cosine and sine of the angles ``t * base^(-2i/dim)`` of positions 0..length-1.

    They are as wide as ``dtype``, and at least float32, also under autocast. bfloat16 has 8 significant bits:
    from position 257 on, neighbouring positions would have the same angle.
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
    """``softmax(q k^T / sqrt(d)) v`` over this and earlier positions; all (B, H, T, d).

    SDPA, except for short windows in bf16 on a CPU: there its kernel is slower, forward and backward, than
    the products written out.
    """
    B, H, T, d = q.shape
    keeps_weights = T <= 512  # longer windows have too many of them
    if not (q.device.type == "cpu" and q.dtype == torch.bfloat16 and keeps_weights):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    later_TT = torch.full((T, T), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    q, k, v = (x.reshape(B * H, T, -1) for x in (q, k, v))
    weight = torch.baddbmm(later_TT, q, k.mT, alpha=d**-0.5).softmax(-1)
    return torch.bmm(weight, v).view(B, H, T, -1)


class RMSNorm(nn.Module):
    """Root-mean-square norm with one weight a feature; at least in float32, rounded to its input's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def init_weights(self) -> None:
        nn.init.ones_(self.weight)
        no_decay(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (rms_norm(wide(x), self.eps) * self.weight).to(x.dtype)


class Linear(nn.Linear):
    """A linear map whose weights start at ``N(0, std^2)`` (default 1/sqrt(fan_in)), its bias, if any, at
    ``bias``."""

    def __init__(
        self, fan_in: int, fan_out: int, *, std: float | None = None, bias: float | None = None
    ) -> None:
        self.std = fan_in**-0.5 if std is None else std
        self.bias_start = bias
        super().__init__(fan_in, fan_out, bias=bias is not None)

    def reset_parameters(self) -> None:
        """Draws nothing: torch calls this while constructing, `init_weights` does the work."""

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias_start is not None:
            nn.init.constant_(self.bias, self.bias_start)
            no_decay(self.bias)


class SwiGLU(nn.Module):
    """``W_down (silu(W_gate x) * W_up x)``; gate and up are one matrix, one product."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(dim, 2 * hidden)
        self.down = Linear(hidden, dim, std=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.up(x)))
