"""Logits of a router from a bfloat16 state, as exact as by a float32 product, on tensor cores.

    logits[n] = W x[n] = (W1 + W2 + W3) x[n]

W1 is W without the lower 16 of its 32 bits, W2 is W - W1 without them, and so on. Each piece fits a bfloat16,
three pieces hold the 24 significant bits of a float32, and sums are in float32. At 2048 features the error
against float64 is 1.4e-7 of the norm; that of a float32 product is 3.4e-7. Bits are cleared and not rounded,
because a compiler may leave out a rounding to bfloat16 that is followed by a cast to float32.

The gradient of the logits is cut the same way. The gradient of W is float32, so it uses three pieces. That
of the state is bfloat16, so two pieces are enough, with two of W.

A float32 state takes the float32 product, because rounding it to bfloat16 would cost an error of 1.7e-3. So
does a CPU, where that product is faster.

Letters: N tokens, D features, E experts.
"""

from typing import Any

import torch
from torch import Tensor


def router_logits(x_ND: Tensor, w_ED: Tensor, cut_FD: Tensor | None = None) -> Tensor:
    """Return ``x_ND w_ED^T`` (N, E) in at least float32; differentiable once in both.

    ``cut_FD`` is the result of `cut_weights`, made once for several calls.
    """
    if x_ND.dtype == torch.bfloat16 and w_ED.dtype == torch.float32 and _is_on_gpu(x_ND):
        return _Product.apply(x_ND, w_ED, cut_weights(w_ED) if cut_FD is None else cut_FD)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return x_ND.to(wide) @ w_ED.to(wide).T


def cut_weights(w_ED: Tensor) -> Tensor:
    """Return the pieces of W as the products take them, (4 E, D) in bfloat16: W3, W2, W1, W1."""
    w1, w2, w3 = _pieces(w_ED.detach())
    return torch.cat([w3, w2, w1, w1])


def _is_on_gpu(x_ND: Tensor) -> bool:
    return x_ND.is_cuda


def _pieces(x: Tensor) -> list[Tensor]:
    """Cut a float32 tensor into three bfloat16 tensors whose sum it is, the largest first."""
    pieces = []
    for _ in range(3):
        piece = (x.view(torch.int32) & -(2**16)).view(torch.float32)
        pieces.append(piece.bfloat16())
        x = x - piece
    return pieces


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of bfloat16 matrices in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class _Product(torch.autograd.Function):
    """Its products are plain operators, so a compiler fuses what is around them."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, w_ED: Tensor, cut_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, cut_FD)
        E = len(w_ED)
        return _product(x_ND, cut_FD[: 3 * E].T).unflatten(1, (3, E)).sum(1)

    @staticmethod
    def backward(ctx: Any, dy_NE: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x_ND, cut_FD = ctx.saved_tensors
        E = dy_NE.shape[1]
        dy1, dy2, dy3 = _pieces(dy_NE)
        dy_NF = torch.cat([dy1, dy1, dy2, dy3], 1)
        dx_ND = dy_NF[:, : 3 * E] @ cut_FD[E:]  # dy1 W2 + dy1 W1 + dy2 W1
        dw_ED = _product(dy_NF[:, E:].T, x_ND).unflatten(0, (3, E)).sum(0)
        return dx_ND, dw_ED, None
