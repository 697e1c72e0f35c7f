"""Grouped matrix product in fp8: each expert's rows times its own matrix, two of three products narrow.

    y[p] = x[p] w[e(p)]          dx[p] = dy[p] w[e(p)]^T          dw[e] = sum over p of x[p]^T dy[p]

The first two multiply e4m3 by e4m3 with a scale a row of the left and a column of the right operand
(``cast_fp8``); what is summed along shares a scale on each side, as the hardware
wants. The weight gradient stays in bfloat16. In fp8 it would need both operands cast once more, with scales
along the other axis and apart for each expert, which at F = 512 takes longer than the narrow product saves
(docs/kernels.md); and its rounding errors would add up in the optimizer's moments.

The scales of activations are found anew at every call. Those of the weights as well, unless their cast is
given: a model that uses its weights in several loops casts them once.

On a GPU of compute capability 9.0 or 10.0 the product is torch's own ``_scaled_grouped_mm``. Anywhere else
the operands are cast to fp8 all the same and multiplied in bfloat16, which holds them exactly: right numbers,
no gain.

Letters: P rows, of which each expert's are contiguous; D features in, F out, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cast_fp8 import cast_columns_fp8, cast_rows_fp8
from kernels.grouped_mm import weight_gradient


def grouped_mm_fp8(
    x_PD: Tensor, w_EDF: Tensor, end_E: Tensor, cast: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """``y`` (P, F) in bfloat16; rows from the last end on are garbage, in ``y`` and in the gradient of x.

    ``x_PD``: bfloat16. ``w_EDF``: float32 or bfloat16. ``end_E``: int32, where each expert's rows end, which
    are multiples of 16. ``cast``: what ``cast_columns_fp8`` made of w. Differentiable once in x and w. Raises
    ``ValueError`` where the shapes do not fit, or D or F is no multiple of 16.
    """
    shapes = x_PD.dim() == 2 and w_EDF.dim() == 3 and w_EDF.shape[1] == x_PD.shape[1]
    if not shapes or end_E.shape != w_EDF.shape[:1] or w_EDF.shape[1] % 16 or w_EDF.shape[2] % 16:
        raise ValueError(
            f"grouped_mm_fp8: x {tuple(x_PD.shape)} must be (P, D), w {tuple(w_EDF.shape)} (E, D, F) and the "
            f"ends {tuple(end_E.shape)} (E,), with D and F multiples of 16"
        )
    rows, columns = cast_rows_fp8(x_PD.detach()), cast or cast_columns_fp8(w_EDF.detach())
    return _grouped_mm(x_PD, w_EDF, *rows, *columns, end_E)


def runs_on(device: torch.device) -> bool:
    """Whether the device multiplies groups in fp8 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def multiply(
    a_PK: Tensor, inverse_P: Tensor, b_ENK: Tensor, inverse_EN: Tensor, end_E: Tensor, fast: bool
) -> Tensor:
    """Each expert's rows of ``a`` times the transpose of its own ``b``, (P, N); both with inverse scales.

    ``fast`` sums in fewer bits than float32 has, which gradients do not bear.
    """
    b_EKN = b_ENK.transpose(1, 2)
    if runs_on(a_PK.device):
        how: dict[str, Any] = dict(out_dtype=torch.bfloat16, use_fast_accum=fast)
        return torch._scaled_grouped_mm(a_PK, b_EKN, inverse_P, inverse_EN, end_E, **how)
    wide_PK = a_PK.bfloat16() * inverse_P.bfloat16()[:, None]
    return F.grouped_mm(wide_PK, b_EKN.bfloat16() * inverse_EN.bfloat16()[:, None], offs=end_E)


_product = torch.library.custom_op("spider::grouped_product_fp8", multiply, mutates_args=())
"""`multiply` as one op, which asks for the device when it runs and not when it is traced."""


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
    end_E: Tensor,
) -> Tensor:
    """The product of what was cast, with the gradients of what it was cast from. The casts are ops of their
    own, for ``torch.compile`` to merge; and this is one, because recomputation in torch 2.11 loses sight of
    what is inside a ``torch.autograd.Function``."""
    return multiply(q_PD, inverse_P, q_EFD, inverse_EF, end_E, fast=True)


@_grouped_mm.register_fake
def _(x_PD, w_EDF, q_PD, inverse_P, q_EFD, inverse_EF, end_E):
    return x_PD.new_empty(len(x_PD), w_EDF.shape[2], dtype=torch.bfloat16)


def _remember(ctx, inputs, output) -> None:
    x_PD, w_EDF, *_, end_E = inputs
    ctx.save_for_backward(x_PD, w_EDF, end_E)


def _adjoint(ctx, dy_PF: Tensor):
    x_PD, w_EDF, end_E = ctx.saved_tensors
    dy_PF = dy_PF.contiguous()
    # The columns of w^T are the rows of w, already side by side.
    q, inverse = cast_rows_fp8(w_EDF.flatten(0, 1))
    transposed = q.view(w_EDF.shape), inverse.view(w_EDF.shape[:2])
    dx_PD = _product(*cast_rows_fp8(dy_PF), *transposed, end_E, fast=False)
    dw_EDF = weight_gradient(x_PD, dy_PF, end_E)
    return dx_PD, dw_EDF.to(w_EDF.dtype), None, None, None, None, None


_grouped_mm.register_autograd(_adjoint, setup_context=_remember)
