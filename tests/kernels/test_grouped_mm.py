"""Test the experts' product on a device that leaves garbage in the gradient of experts without rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import grouped_mm as module
from kernels.grouped_mm import grouped_mm
from kernels.grouped_mm_fp8 import grouped_mm_fp8

#: The first and the third expert have no rows.
ENDS = torch.tensor([0, 32, 32, 48], dtype=torch.int32)
EMPTY = [0, 2]


@pytest.fixture
def garbage(monkeypatch):
    """Imitate torch's product on such a device."""
    real = F.grouped_mm

    def spoilt(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        def spoil(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient[EMPTY] = torch.nan
            return gradient

        if b.dim() == 2:
            return spoil(real(a, b, offs=offs))
        if b.requires_grad:
            (b := b * 1).register_hook(spoil)
        return real(a, b, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", spoilt)
    monkeypatch.setattr(module, "_is_wrong_where_empty", lambda device: True)


@pytest.mark.parametrize("product", [grouped_mm, grouped_mm_fp8])
def test_experts_without_rows_have_no_gradient_where_torch_gives_them_garbage(request, product):
    generator = torch.Generator().manual_seed(0)
    x_PD = torch.randn(48, 32, generator=generator).bfloat16().requires_grad_()
    w_EDF = torch.randn(4, 32, 16, generator=generator).bfloat16().requires_grad_()
    results = []
    for spoilt in (False, True):
        if spoilt:
            request.getfixturevalue("garbage")
        y_PF = product(x_PD, w_EDF, ENDS)
        results.append([y_PF, *torch.autograd.grad(y_PF.float().square().sum(), [x_PD, w_EDF])])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert (results[1][2][EMPTY] == 0).all() and (results[1][2][[1, 3]] != 0).any()
