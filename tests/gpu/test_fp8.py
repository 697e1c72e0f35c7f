"""fp8 on a GPU: casts round as torch does, and products equal those of the same operands in bfloat16."""

from __future__ import annotations

import pytest
import torch

from kernels import grouped_mm_fp8 as module
from kernels.cast_fp8 import cast_columns_fp8, cast_columns_fp8_torch, cast_rows_fp8, cast_rows_fp8_torch
from kernels.grouped_mm_fp8 import grouped_mm_fp8
from spider.training.precision import to_fp8

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and module.runs_on(torch.device("cuda"))),
    reason="NO GPU with grouped fp8 products: nothing of this file was tested",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cast", "twin", "shape"),
    [
        (cast_rows_fp8, cast_rows_fp8_torch, (1000, 2048)),
        (cast_rows_fp8, cast_rows_fp8_torch, (33, 500)),
        (cast_columns_fp8, cast_columns_fp8_torch, (3, 1000, 300)),
    ],
)
def test_casts_round_as_torch_does(cast, twin, shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=dtype) * torch.logspace(-6, 6, shape[-1], device="cuda").to(
        dtype
    )
    for got, want in zip(cast(x), twin(x), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_fp8_product_equals_bfloat16_of_the_same_operands(monkeypatch):
    torch.manual_seed(0)
    ends_E = torch.tensor([1024, 1024, 1040, 2048], dtype=torch.int32, device="cuda")
    x_PD = torch.randn(2064, 256, device="cuda").bfloat16().requires_grad_()
    w_EDF = torch.randn(4, 256, 512, device="cuda").requires_grad_()
    dy_PF = torch.randn(2064, 512, device="cuda").bfloat16()

    def results() -> list[torch.Tensor]:
        y_PF = grouped_mm_fp8(x_PD, w_EDF, ends_E)
        dx_PD, dw_EDF = torch.autograd.grad(y_PF, [x_PD, w_EDF], dy_PF)
        return [y_PF[:2048].detach(), dx_PD[:2048], dw_EDF]

    by_hardware = results()
    monkeypatch.setattr(module, "runs_on", lambda device: False)
    for got, want in zip(by_hardware, results(), strict=True):
        # The hardware's fast sums keep about 14 bits.
        assert (got - want).float().norm() <= 2**-8 * want.float().norm()


def test_a_graph_with_casts_reads_the_weights_of_an_update():
    """Casts are part of the graph of a micro-batch, so a replay casts the weights that it finds."""
    holder = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False, device="cuda"))
    to_fp8(holder, ["0"])
    (linear,) = holder
    x_MK = torch.randn(32, 64, device="cuda").bfloat16()

    def product() -> torch.Tensor:
        cast = linear.cast_once(linear.weight.bfloat16())
        with torch.no_grad():
            return torch.func.functional_call(linear, {"weight": cast}, (x_MK,))

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        product()
    with torch.cuda.graph(graph, stream=stream):
        y_MN = product()
    for _ in range(2):
        linear.weight.data.normal_()
        graph.replay()
        assert torch.equal(y_MN, product())
