"""Test the router's product in pieces: it is at least as close to float64 as float32 is, where it is used."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import router_logits as module
from kernels.router_logits import cut_weights, router_logits
from tests.kernels.twins import Pair


def results(product, x_ND: Tensor, w_ED: Tensor, dy_NE: Tensor) -> list[Tensor]:
    """Return the logits and the gradient of the weights."""
    w_ED = w_ED.detach().requires_grad_()
    y_NE = product(x_ND, w_ED)
    return [y_NE.detach(), torch.autograd.grad(y_NE, w_ED, dy_NE)[0]]


def routers(N: int, D: int, E: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_ND, w_ED, dy_NE = (torch.randn(shape, generator=generator) for shape in ((N, D), (E, D), (N, E)))
    return x_ND.bfloat16(), w_ED, dy_NE


EIGHTS = st.integers(1, 5).map(lambda n: 8 * n)
#: tests/gpu runs these with bfloat16 products and sums in float32.
ROUTER_LOGITS = Pair(
    partial(results, lambda x_ND, w_ED: module._Product.apply(x_ND, w_ED, cut_weights(w_ED))),
    partial(results, lambda x_ND, w_ED: x_ND.float() @ w_ED.T),
    st.builds(routers, EIGHTS, EIGHTS, EIGHTS, st.integers(0, 99)),
    [routers(3000, 2048, 32)],
    rtol=1e-5,
    atol=1e-3,
)


@pytest.fixture
def on_gpu(monkeypatch):
    """Select the path of a GPU."""
    monkeypatch.setattr(module, "_is_on_gpu", lambda x: True)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (100, 2048), (32, 2048), (100, 32)
    x_ND, w_ED, dy_NE = (torch.randn(shape, generator=generator) for shape in shapes)
    return x_ND.bfloat16().requires_grad_(), (w_ED * 2048**-0.5).requires_grad_(), dy_NE


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def test_logits_and_gradients_are_those_of_float64_to_the_last_bits_of_float32(on_gpu):
    x_ND, w_ED, dy_NE = operands()
    y_NE = router_logits(x_ND, w_ED)
    assert "_Product" in y_NE.grad_fn.name() and y_NE.dtype == torch.float32
    dx_ND, dw_ED = torch.autograd.grad(y_NE, [x_ND, w_ED], dy_NE)
    x64, w64, dy64 = x_ND.double(), w_ED.double(), dy_NE.double()
    assert off(y_NE, x64 @ w64.T) < 1e-6 and off(dw_ED, dy64.T @ x64) < 1e-6
    assert off(dx_ND, dy64 @ w64) < 2**-8 and dx_ND.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_that_would_have_to_be_rounded_is_multiplied_as_it_is(on_gpu, dtype):
    x_ND, w_ED, _ = operands()
    x_ND = x_ND.to(dtype) / 3
    assert torch.equal(router_logits(x_ND, w_ED), x_ND @ w_ED.to(dtype).T)


def test_three_pieces_are_exactly_the_weights():
    scale = 10.0 ** torch.arange(-20, 20).repeat(25)
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * scale
    assert torch.equal(sum(piece.double() for piece in module._pieces(w)), w.double())


def test_it_compiles_without_a_break_and_with_pieces_made_before_to_the_same_numbers(on_gpu):
    torch.compiler.reset()
    x_ND, w_ED, dy_NE = operands()
    found = []
    for run in (
        router_logits,
        torch.compile(router_logits, backend="aot_eager", fullgraph=True),
        partial(router_logits, cut_FD=cut_weights(w_ED)),
    ):
        y_NE = run(x_ND, w_ED)
        found.append([y_NE.detach(), *torch.autograd.grad(y_NE, [x_ND, w_ED], dy_NE)])
    for eager, compiled, cut in zip(*found, strict=True):
        assert torch.equal(eager, compiled) and torch.equal(eager, cut)
