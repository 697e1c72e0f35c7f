"""Engram gate: how much of a memory's value each position takes.

    r = 1 / sqrt(mean(h^2) + eps)           s = <key, r h weight> / sqrt(D)
    g = sigmoid(sign(s) sqrt(max(|s|, 1e-6)))                  out = g value

    c = <dout, value> g (1 - g) / (2 sqrt|s|) / sqrt(D),  zero where |s| < 1e-6
    dvalue = g dout         dkey = c r h weight         dweight = sum over n of c r h key
    dh = c (r key weight - r^2 s h / sqrt(D))

The floor keeps the square root's slope finite where key and state are orthogonal. Sums are in float32. NaN
and inf stay in their own row, but for dweight, which has a term of every row.

Bytes, forward: h, key and value once, the result once, 4 N D. Backward: those three and dout once, three
gradients once, 7 N D; s and r are made again, which needs no bytes more. In torch the forward is 12 launches
that move 10 N D, and the backward about 30.

Layout: a row lies in the registers of one program as a whole, so wider rows take more warps: a thread has 16
features in the forward, 8 in the backward, which spills with 16. Rows wider than 4096 may spill there all the
same. Forward: a program a row. Backward: a program takes 8 rows one after the other and adds up its part of
dweight; the parts, an eighth of a float32 row for each row, are summed by torch. So the order of every sum is
fixed, which atomic additions would not give.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.switch import jit, tile, tl, use_triton

FLOOR = 1e-6
ROWS = 8
"""Rows of one program of the backward."""

FORWARD, BACKWARD = 16, 8
"""Features of a thread."""


@torch.library.custom_op("spider::engram_gate", mutates_args=())
def engram_gate(h_ND: Tensor, key_ND: Tensor, value_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``g value`` (N, D) in the dtype to which torch promotes the four.

    ``h_ND``: the states, not normalised. ``key_ND``: normalised keys. ``weight_D``: of the states' norm, and
    ``eps`` its own. Differentiable once in all four. Raises ``ValueError`` for shapes that do not fit.
    """
    N, D = h_ND.shape if h_ND.dim() == 2 else (0, 0)
    if D < 1 or key_ND.shape != (N, D) or value_ND.shape != (N, D) or weight_D.shape != (D,):
        raise ValueError(
            f"engram_gate: h {tuple(h_ND.shape)}, key {tuple(key_ND.shape)} and value "
            f"{tuple(value_ND.shape)} must be one (N, D) with D > 0, and weight {tuple(weight_D.shape)} (D,)"
        )
    implementation = _launch if use_triton(h_ND) else engram_gate_torch
    return implementation(h_ND, key_ND, value_ND, weight_D, eps)


@engram_gate.register_fake
def _(h_ND, key_ND, value_ND, weight_D, eps):
    return value_ND.new_empty(value_ND.shape, dtype=_promoted(h_ND, key_ND, value_ND, weight_D))


def _promoted(*tensors: Tensor) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


@torch.library.custom_op("spider::engram_gate_backward", mutates_args=())
def engram_gate_backward(
    grad_ND: Tensor, h_ND: Tensor, key_ND: Tensor, value_ND: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``h_ND``, ``key_ND``, ``value_ND`` and ``weight_D``, in their dtypes."""
    implementation = _launch_backward if use_triton(h_ND) else engram_gate_backward_torch
    return implementation(grad_ND, h_ND, key_ND, value_ND, weight_D, eps)


@engram_gate_backward.register_fake
def _(grad_ND, h_ND, key_ND, value_ND, weight_D, eps):
    return tuple(x.new_empty(x.shape) for x in (h_ND, key_ND, value_ND, weight_D))


def _remember(ctx, inputs, output) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _adjoint(ctx, grad_ND: Tensor):
    return *engram_gate_backward(grad_ND, *ctx.saved_tensors, ctx.eps), None


engram_gate.register_autograd(_adjoint, setup_context=_remember)


def engram_gate_torch(h_ND: Tensor, key_ND: Tensor, value_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same in torch."""
    D = h_ND.shape[1]
    s_N1 = (key_ND * (F.rms_norm(h_ND, (D,), eps=eps) * weight_D)).sum(-1, keepdim=True) * D**-0.5
    gate_N1 = torch.sigmoid(s_N1.sign() * s_N1.abs().clamp(min=FLOOR).sqrt())
    return (gate_N1 * value_ND).to(_promoted(h_ND, key_ND, value_ND, weight_D))


def engram_gate_backward_torch(
    grad_ND: Tensor, h_ND: Tensor, key_ND: Tensor, value_ND: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in torch."""
    inputs, D = (h_ND, key_ND, value_ND, weight_D), h_ND.shape[1]
    wide = torch.promote_types(_promoted(*inputs), torch.float32)
    grad_ND, h_ND, key_ND, value_ND, weight_D = (x.to(wide) for x in (grad_ND, *inputs))
    r_N1 = (h_ND.square().mean(1, keepdim=True) + eps).rsqrt()
    s_N1 = (key_ND * weight_D * h_ND).sum(1, keepdim=True) * r_N1 * D**-0.5
    root_N1 = s_N1.abs().clamp(min=FLOOR).sqrt()
    gate_N1 = torch.sigmoid(s_N1.sign() * root_N1)
    slope_N1 = (gate_N1 * (1 - gate_N1) / (2 * root_N1)).masked_fill(s_N1.abs() < FLOOR, 0)
    c_N1 = (grad_ND * value_ND).sum(1, keepdim=True) * slope_N1 * D**-0.5
    gradients = (
        c_N1 * (r_N1 * key_ND * weight_D - r_N1.square() * s_N1 * D**-0.5 * h_ND),
        c_N1 * r_N1 * h_ND * weight_D,
        gate_N1 * grad_ND,
        (c_N1 * r_N1 * h_ND * key_ND).sum(0),
    )
    dh_ND, dkey_ND, dvalue_ND, dweight_D = (g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True))
    return dh_ND, dkey_ND, dvalue_ND, dweight_D


@jit
def _gate(h, key, weight, D, scale, eps, FLOOR: tl.constexpr):
    """``r``, ``s``, ``max(|s|, FLOOR)`` under the root, and the gate, of one row."""
    r = 1 / tl.sqrt(tl.sum(h * h) / D + eps)
    s = tl.sum(key * weight * h) * r * scale
    # Not a maximum, which would make NaN the floor.
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
    """Of a program that holds a whole row, so many features ``each`` thread; 1024 threads are the most."""
    wide = tile(D, 2 * D)
    return dict(WIDE_D=wide, num_warps=min(max(wide // (32 * each), 1), 32))


def _launch(h_ND: Tensor, key_ND: Tensor, value_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    (N, D), inputs = h_ND.shape, (h_ND, key_ND, value_ND, weight_D)
    out_ND = value_ND.new_empty(N, D, dtype=_promoted(*inputs))
    if N:
        pointers = (x.contiguous() for x in inputs)
        _forward[N,](*pointers, out_ND, D, D**-0.5, eps, FLOOR=FLOOR, **sizes(D, FORWARD))
    return out_ND


def _launch_backward(
    grad_ND: Tensor, h_ND: Tensor, key_ND: Tensor, value_ND: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, D = h_ND.shape
    programs = -(-N // ROWS)
    dh_ND, dkey_ND, dvalue_ND = (x.new_empty(N, D) for x in (h_ND, key_ND, value_ND))
    parts_D = h_ND.new_empty(programs, D, dtype=torch.float32)
    if N:
        pointers = (x.contiguous() for x in (grad_ND, h_ND, key_ND, value_ND, weight_D))
        gradients = dh_ND, dkey_ND, dvalue_ND, parts_D
        numbers = N, D, D**-0.5, eps
        _backward[programs,](*pointers, *gradients, *numbers, FLOOR=FLOOR, ROWS=ROWS, **sizes(D, BACKWARD))
    return dh_ND, dkey_ND, dvalue_ND, parts_D.sum(0).to(weight_D.dtype)
