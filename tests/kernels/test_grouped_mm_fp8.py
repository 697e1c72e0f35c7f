"""Compare the experts' fp8 product with that of exact operands; test the hardware's requirements."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kernels import grouped_mm_fp8 as module
from kernels.cast_fp8 import cast_columns_fp8, cast_rows_fp8
from kernels.grouped_mm_fp8 import grouped_mm_fp8

#: The second expert has no rows, and the last 16 rows belong to no expert.
ENDS = torch.tensor([32, 32, 80], dtype=torch.int32)
P, D, HIDDEN = 96, 64, 48


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, matrices and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    x_PD = torch.randn(P, D, generator=generator).bfloat16().requires_grad_()
    w_EDF = torch.randn(3, D, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return x_PD, w_EDF, torch.randn(P, HIDDEN, generator=generator).bfloat16()


def results(product, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x_PD, w_EDF, dy_PF = operands(dtype)
    y_PF = product(x_PD, w_EDF)
    dx_PD, dw_EDF = torch.autograd.grad(y_PF, [x_PD, w_EDF], dy_PF)
    return [y_PF[: ENDS[-1]].detach(), dx_PD[: ENDS[-1]], dw_EDF]


def exact(x_PD: Tensor, w_EDF: Tensor) -> Tensor:
    return F.grouped_mm(x_PD, w_EDF.bfloat16(), offs=ENDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errs_as_three_bits_of_mantissa_do_and_not_in_the_weight_gradient(dtype):
    """Rounding to e4m3 has an error of 2.6% on average, and of 3.7% for two such operands."""
    got, want = results(lambda x, w: grouped_mm_fp8(x, w, ENDS), dtype), results(exact, dtype)
    for a, b, bound in zip(got, want, (0.045, 0.045, 1e-6), strict=True):
        error = (a - b).float().norm() / b.float().norm()
        assert a.dtype == b.dtype and error < bound and (error > 0.02 or bound < 0.02)


def test_compiles_without_a_break_to_the_same_numbers():
    torch.compiler.reset()
    compiled = torch.compile(grouped_mm_fp8, backend="aot_eager", fullgraph=True)
    eager = results(lambda x, w: grouped_mm_fp8(x, w, ENDS))
    for a, b in zip(results(lambda x, w: compiled(x, w, ENDS)), eager, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fast", [True, False])
def test_the_hardware_gets_operands_that_torch_takes(monkeypatch, fast):
    """torch checks types, strides and alignment of a GPU's product on fake tensors too."""
    monkeypatch.setattr(module, "runs_on", lambda device: True)
    with FakeTensorMode():
        x_PD = torch.empty(P, D, dtype=torch.bfloat16, device="cuda")
        w_EDF = torch.empty(3, D, HIDDEN, device="cuda")
        ends_E = torch.empty(3, dtype=torch.int32, device="cuda")
        y_PF = module.multiply(*cast_rows_fp8(x_PD), *cast_columns_fp8(w_EDF), ends_E, fast)
        assert y_PF.shape == (P, HIDDEN) and y_PF.dtype == torch.bfloat16
        q, inverse = cast_rows_fp8(w_EDF.flatten(0, 1))
        transposed = q.view(3, D, HIDDEN), inverse.view(3, D)
        dx_PD = module.multiply(*cast_rows_fp8(y_PF), *transposed, ends_E, fast)
        assert dx_PD.shape == (P, D)
