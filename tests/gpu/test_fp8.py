"""fp8 on a GPU: casts round as torch does, and products equal those of the same operands in bfloat16."""

from __future__ import annotations

import pytest
import torch

from kernels import grouped_mm_fp8 as module
from kernels.cast_fp8 import cast_columns_fp8, cast_columns_fp8_torch, cast_rows_fp8, cast_rows_fp8_torch
from kernels.grouped_mm_fp8 import cast_weights_fp8, grouped_mm_fp8
from spider.processes.parallel import compile_forward
from spider.training.precision import Precision, to_fp8
from tests.unit.model.small import build

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


def test_given_casts_change_no_bit_of_a_product_or_gradient():
    torch.manual_seed(0)
    ends_E = torch.tensor([1024, 2048], dtype=torch.int32, device="cuda")
    x_PD = torch.randn(2048, 256, device="cuda").bfloat16().requires_grad_()
    w_EDF = torch.randn(2, 256, 512, device="cuda").bfloat16().requires_grad_()
    dy_PF = torch.randn(2048, 512, device="cuda").bfloat16()
    results = []
    for casts in (None, cast_weights_fp8(w_EDF)):
        y_PF = grouped_mm_fp8(x_PD, w_EDF, ends_E, casts)
        results.append([y_PF.detach(), *torch.autograd.grad(y_PF, [x_PD, w_EDF], dy_PF)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("checkpointing", [False, "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_of_looped_layers_are_cast_once_to_the_same_numbers(compiled, checkpointing):
    """The twin casts in each loop and in each backward pass. Its other kernels are fused otherwise."""
    torch.compiler.reset()
    tokens_BT = torch.randint(97, 123, (4, 128), generator=torch.Generator().manual_seed(0)).cuda()
    results = []
    for once in (True, False):
        model = build(
            hidden=64,
            attention={"nope_dim": 32, "rope_dim": 32, "v_dim": 64, "kv_lora_rank": 32},
            recurrence={"loops": 3, "checkpointing": checkpointing},
        )
        model = model.cuda().train()
        Precision("fp8", "", recipe="tensorwise").prepare(model)
        for layer in () if once else model.core.modules():
            if hasattr(layer, "cast_once"):
                del layer.cast_once, layer.quantize
        if compiled:
            compile_forward(model)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens_BT, tokens_BT.roll(-1, 1)).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for here, there in zip(*results, strict=True):
        if compiled:
            assert (here - there).norm() <= 2e-2 * there.norm() + 1e-6
        else:
            assert torch.equal(here, there)


def test_a_graph_with_casts_reads_the_weights_of_an_update():
    """Casts are part of the graph of a micro-batch, so a replay casts the weights that it finds."""
    holder = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False, device="cuda"))
    to_fp8(holder, "tensorwise", ["0"])
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
