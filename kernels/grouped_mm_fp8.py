"""Grouped matrix product in fp8: each expert's rows times its own matrix, two of its three products in fp8.

    y[p] = x[p] w[e(p)]          dx[p] = dy[p] w[e(p)]^T          dw[e] = sum over p of x[p]^T dy[p]

The first two multiply e4m3 by e4m3, with one scale per row of the left and per column of the right operand
(``cast_fp8``). The hardware requires that scales are constant along the summed axis.

The weight gradient stays in bfloat16. In fp8 both operands would need another cast, with scales along the
other axis and separate for each expert. At F = 512 that takes longer than the fp8 product saves
(docs/kernels.md), and the rounding errors would accumulate in the optimizer's moments.

The scales of activations are computed at every call. So are those of the weights unless their casts are
passed (`cast_weights_fp8`): a model that uses its weights in several loops casts them once, for all its
forward and backward passes.

On a GPU of compute capability 9.0 or 10.0 the product is torch's ``_scaled_grouped_mm``. Elsewhere the
operands are cast to fp8 and multiplied in bfloat16, which holds them exactly: same numbers, no speed-up.

Letters: P rows, contiguous for each expert; D features in, F out, E experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cast_fp8 import cast_columns_fp8, cast_rows_fp8
from kernels.grouped_mm import weight_gradient


class Casts(NamedTuple):
    """The casts of a stack of weights, and their inverse scales."""

    q_EFD: Tensor
    inverse_EF: Tensor
    q_EDF: Tensor
    inverse_ED: Tensor


def cast_weights_fp8(w_EDF: Tensor) -> Casts:
    """Return the casts of ``w_EDF`` by columns, for y, and by rows, for dx, without a derivative."""
    w_EDF = w_EDF.detach()
    # The columns of w^T are the rows of w, which are already contiguous.
    q_RF, inverse_R = cast_rows_fp8(w_EDF.flatten(0, 1))
    q_EFD, inverse_EF = cast_columns_fp8(w_EDF)
    return Casts(q_EFD, inverse_EF, q_RF.view(w_EDF.shape), inverse_R.view(w_EDF.shape[:2]))


def grouped_mm_fp8(x_PD: Tensor, w_EDF: Tensor, end_E: Tensor, casts: Casts | None = None) -> Tensor:
    """Return ``y`` (P, F) in bfloat16; rows from the last end on are garbage, in ``y`` and in the gradient of
    x.

    It is differentiable once in x and w.

    Args:
        x_PD: bfloat16.
        w_EDF: float32 or bfloat16.
        end_E: int32, ends of each expert's rows, multiples of 16.
        casts: result of ``cast_weights_fp8(w_EDF)``, if it is already computed.

    Raises:
        ValueError: the shapes do not fit, or D or F is not a multiple of 16.
    """
    shapes = x_PD.dim() == 2 and w_EDF.dim() == 3 and w_EDF.shape[1] == x_PD.shape[1]
    if not shapes or end_E.shape != w_EDF.shape[:1] or w_EDF.shape[1] % 16 or w_EDF.shape[2] % 16:
        raise ValueError(
            f"grouped_mm_fp8: x {tuple(x_PD.shape)} must be (P, D), w {tuple(w_EDF.shape)} (E, D, F) and the "
            f"ends {tuple(end_E.shape)} (E,), with D and F multiples of 16"
        )
    q_PD, inverse_P = cast_rows_fp8(x_PD.detach())
    return _grouped_mm(x_PD, w_EDF, q_PD, inverse_P, *(casts or cast_weights_fp8(w_EDF)), end_E)


def runs_on(device: torch.device) -> bool:
    """Tell whether the device has grouped products in fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def multiply(
    a_PK: Tensor, inverse_P: Tensor, b_ENK: Tensor, inverse_EN: Tensor, end_E: Tensor, fast: bool
) -> Tensor:
    """Return each expert's rows of ``a`` times the transpose of its own ``b``, (P, N).

    ``fast`` accumulates in fewer bits than float32, which is too inexact for gradients.
    """
    b_EKN = b_ENK.transpose(1, 2)
    if runs_on(a_PK.device):
        return torch._scaled_grouped_mm(
            a_PK, b_EKN, inverse_P, inverse_EN, end_E, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    wide_PK = a_PK.bfloat16() * inverse_P.bfloat16()[:, None]
    return F.grouped_mm(wide_PK, b_EKN.bfloat16() * inverse_EN.bfloat16()[:, None], offs=end_E)


_product = torch.library.custom_op("spider::grouped_product_fp8", multiply, mutates_args=())
"""`multiply` as a custom op, so that the device is checked when it runs and not when it is traced."""


@_product.register_fake
def _(a_PK, inverse_P, b_ENK, inverse_EN, end_E, fast):
    return a_PK.new_empty(len(a_PK), b_ENK.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("spider::grouped_mm_fp8", mutates_args=())
def _grouped_mm(
    x_PD: Tensor,
    w_EDF: Tensor,
    q_PD: Tensor,
    inverse_P: Tensor,
    q_EFD: Tensor,
    inverse_EF: Tensor,
    q_EDF: Tensor,
    inverse_ED: Tensor,
    end_E: Tensor,
) -> Tensor:
    """Multiply the casts of x and w; gradients go to x and w.

    The casts are separate ops, so ``torch.compile`` can merge them. This is a custom op because selective
    recomputation in torch 2.11 does not see inside a ``torch.autograd.Function``.
    """
    return multiply(q_PD, inverse_P, q_EFD, inverse_EF, end_E, fast=True)


@_grouped_mm.register_fake
def _(x_PD, w_EDF, q_PD, inverse_P, q_EFD, inverse_EF, q_EDF, inverse_ED, end_E):
    return x_PD.new_empty(len(x_PD), w_EDF.shape[2], dtype=torch.bfloat16)


def _remember(ctx, inputs, output) -> None:
    x_PD, w_EDF, *_, q_EDF, inverse_ED, end_E = inputs
    ctx.dtype = w_EDF.dtype
    ctx.save_for_backward(x_PD, q_EDF, inverse_ED, end_E)


def _adjoint(ctx, dy_PF: Tensor):
    x_PD, q_EDF, inverse_ED, end_E = ctx.saved_tensors
    dy_PF = dy_PF.contiguous()
    dx_PD = _product(*cast_rows_fp8(dy_PF), q_EDF, inverse_ED, end_E, fast=False)
    dw_EDF = weight_gradient(x_PD, dy_PF, end_E)
    return dx_PD, dw_EDF.to(ctx.dtype), None, None, None, None, None, None, None


_grouped_mm.register_autograd(_adjoint, setup_context=_remember)
