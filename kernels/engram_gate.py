"""Engram gate: scale the value that each position looked up by how well its key fits the state.

    r = 1 / sqrt(mean(h^2) + eps)           s = <key, r h weight> / sqrt(D)
    g = sigmoid(sign(s) sqrt(max(|s|, 1e-6)))                  out = g value

The gradients are

    c = <dout, value> g (1 - g) / (2 sqrt|s|) / sqrt(D),  zero where |s| < 1e-6

    dvalue = g dout         dkey = c r h weight         dweight = sum over n of c r h key

    dh = c (r key weight - r^2 s h / sqrt(D))

The floor keeps the slope of the square root finite where key and state are orthogonal. Sums are in float32.
NaN and inf stay in their own row, except in dweight, which sums over all rows. The backward pass recomputes s
and r, which needs no further memory traffic.

Layout: one program holds a whole row in registers, so wider rows take more warps. A thread has 16 features in
the forward pass and 8 in the backward pass, which spills with 16. Rows wider than 4096 may spill there
anyway. In the forward pass a program takes one row. In the backward pass it takes 8 rows, one after the
other, and accumulates its part of dweight. Then torch sums the parts, so the order of every sum is fixed,
unlike with atomic additions.
"""

from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.switch import check_shapes, jit, op, tile, tl

FLOOR = 1e-6
ROWS = 8
"""Rows of one program of the backward pass."""

FORWARD = 16
"""Features of a thread in the forward pass."""
BACKWARD = 8
"""Features of a thread in the backward pass."""


def engram_gate_torch(h_ND: Tensor, key_ND: Tensor, value_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute ``engram_gate`` in torch."""
    D = h_ND.shape[1]
    wide_ND = h_ND.to(_promoted(h_ND, weight_D))
    s_N1 = (key_ND * (F.rms_norm(wide_ND, (D,), eps=eps) * weight_D)).sum(-1, keepdim=True) * D**-0.5
    gate_N1 = torch.sigmoid(s_N1.sign() * s_N1.abs().clamp(min=FLOOR).sqrt())
    return (gate_N1 * value_ND).to(_promoted(h_ND, key_ND, value_ND))


def engram_gate_backward_torch(grad_ND: Tensor, *inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``engram_gate_backward`` by torch's derivative of the twin."""
    *tensors, eps = inputs
    return torch.func.vjp(partial(engram_gate_torch, eps=eps), *tensors)[1](grad_ND)


def _promoted(*tensors: Tensor) -> torch.dtype:
    return reduce(torch.promote_types, (x.dtype for x in tensors))


@jit
def _gate(h, key, weight, D, scale, eps, FLOOR: tl.constexpr):
    """Return ``r``, ``s``, ``sqrt(max(|s|, FLOOR))`` and the gate of one row."""
    r = 1 / tl.sqrt(tl.sum(h * h) / D + eps)
    s = tl.sum(key * weight * h) * r * scale
    # tl.maximum would turn NaN into the floor.
    root = tl.sqrt(tl.where(tl.abs(s) < FLOOR, FLOOR, tl.abs(s)))
    signed = tl.where(s > 0, root, tl.where(s < 0, -root, 0 * root))
    return r, s, root, 1 / (1 + tl.exp(-signed))


@jit
def _forward(h, key, value, weight, out, D, scale, eps, FLOOR: tl.constexpr, WIDE_D: tl.constexpr):
    d = tl.arange(0, WIDE_D)
    place, inside = tl.program_id(0).to(tl.int64) * D + d, d < D
    state = tl.load(h + place, mask=inside, other=0).to(tl.float32)
    k = tl.load(key + place, mask=inside, other=0).to(tl.float32)
    w = tl.load(weight + d, mask=inside, other=0).to(tl.float32)
    v = tl.load(value + place, mask=inside, other=0).to(tl.float32)
    _, _, _, gate = _gate(state, k, w, D, scale, eps, FLOOR)
    tl.store(out + place, (gate * v).to(out.dtype.element_ty), mask=inside)


@jit
def _backward(
    grad,
    h,
    key,
    value,
    weight,
    dh,
    dkey,
    dvalue,
    dweight,
    N,
    D,
    scale,
    eps,
    FLOOR: tl.constexpr,
    WIDE_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    d = tl.arange(0, WIDE_D)
    inside = d < D
    first = tl.program_id(0) * ROWS
    w = tl.load(weight + d, mask=inside, other=0).to(tl.float32)
    dw = tl.zeros((WIDE_D,), tl.float32)
    for n in range(first, min(first + ROWS, N)):
        place = tl.cast(n, tl.int64) * D + d
        state = tl.load(h + place, mask=inside, other=0).to(tl.float32)
        k = tl.load(key + place, mask=inside, other=0).to(tl.float32)
        v = tl.load(value + place, mask=inside, other=0).to(tl.float32)
        g = tl.load(grad + place, mask=inside, other=0).to(tl.float32)
        r, s, root, gate = _gate(state, k, w, D, scale, eps, FLOOR)
        slope = tl.where(tl.abs(s) < FLOOR, 0.0, gate * (1 - gate) / (2 * root))
        c = tl.sum(g * v) * slope * scale
        tl.store(dvalue + place, (gate * g).to(dvalue.dtype.element_ty), mask=inside)
        tl.store(dkey + place, (c * r * state * w).to(dkey.dtype.element_ty), mask=inside)
        step = c * (r * k * w - r * r * s * scale * state)
        tl.store(dh + place, step.to(dh.dtype.element_ty), mask=inside)
        dw += c * r * state * k
    tl.store(dweight + tl.program_id(0).to(tl.int64) * D + d, dw, mask=inside)


def sizes(D: int, each: int) -> dict[str, int]:
    """Return the constants of a program that holds a row, ``each`` features per thread, at most 1024
    threads."""
    wide = tile(D)
    return dict(WIDE_D=wide, num_warps=min(max(wide // (32 * each), 1), 32))


def _launch(out_ND: Tensor, *inputs) -> None:
    N, D = out_ND.shape
    *tensors, eps = inputs
    if N:
        _forward[N,](*tensors, out_ND, D, D**-0.5, eps, FLOOR=FLOOR, **sizes(D, FORWARD))


def _launch_backward(gradients: tuple[Tensor, Tensor, Tensor, Tensor], *inputs) -> None:
    *row_gradients, dweight_D = gradients
    *tensors, eps = inputs
    N, D = row_gradients[0].shape
    programs = -(-N // ROWS)
    parts_D = dweight_D.new_empty(programs, D, dtype=torch.float32)
    if N:
        constants = dict(FLOOR=FLOOR, ROWS=ROWS, **sizes(D, BACKWARD))
        _backward[programs,](*tensors, *row_gradients, parts_D, N, D, D**-0.5, eps, **constants)
    dweight_D.copy_(parts_D.sum(0))


@op("engram_gate", _launch, engram_gate_torch)
def engram_gate(h_ND: Tensor, key_ND: Tensor, value_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return ``g value`` (N, D). Its dtype is torch's promotion of those of state, key and value.

    It is differentiable once in all four tensors.

    Args:
        h_ND: states, not normalised.
        key_ND: normalised keys.
        weight_D: weight of the states' norm.
        eps: epsilon of the states' norm.

    Raises:
        ValueError: the shapes do not fit.
    """
    check_shapes("engram_gate", h_ND=h_ND, key_ND=key_ND, value_ND=value_ND, weight_D=weight_D)
    return value_ND.new_empty(value_ND.shape, dtype=_promoted(h_ND, key_ND, value_ND))


@op("engram_gate_backward", _launch_backward, engram_gate_backward_torch)
def engram_gate_backward(
    grad_ND: Tensor, h_ND: Tensor, key_ND: Tensor, value_ND: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``h_ND``, ``key_ND``, ``value_ND`` and ``weight_D``, in their dtypes."""
    dh_ND, dkey_ND, dvalue_ND = (x.new_empty(x.shape) for x in (h_ND, key_ND, value_ND))
    return dh_ND, dkey_ND, dvalue_ND, weight_D.new_empty(weight_D.shape)


def _remember(ctx, inputs, output) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _adjoint(ctx, grad_ND: Tensor):
    return *engram_gate_backward(grad_ND, *ctx.saved_tensors, ctx.eps), None


torch.library.register_autograd(engram_gate, _adjoint, setup_context=_remember)
