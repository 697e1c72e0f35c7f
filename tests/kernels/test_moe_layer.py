"""Compare a layer of experts by all ops with every expert on every token, also under torch.compile."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.expand_reduce import expand_to_fused, reduce_fused
from kernels.route import route

N, D, HIDDEN, E, K = 37, 32, 16, 5, 2


def layer(x_ND: Tensor, router_ED: Tensor, up_EDF: Tensor, down_EFD: Tensor, bias_E: Tensor) -> Tensor:
    routing = route(x_ND.float() @ router_ED.float().T, bias_E, K, alignment=16)
    *places, end_E = routing.maps
    x_PD = expand_to_fused(x_ND, *places)
    gate_PF, up_PF = F.grouped_mm(x_PD, up_EDF, offs=end_E).chunk(2, dim=-1)
    y_PD = F.grouped_mm(F.silu(gate_PF) * up_PF, down_EFD, offs=end_E)
    # The auxiliary loss and the z-loss give every output of the router a gradient.
    extra = (routing.scores_NE.mean(0) * routing.count_E).sum() + routing.logsumexp_N.square().mean()
    return reduce_fused(y_PD, routing.gates_NK, *places, x_ND.square(), x_ND) + extra.to(x_ND.dtype)


def dense(x_ND: Tensor, router_ED: Tensor, up_EDF: Tensor, down_EFD: Tensor, bias_E: Tensor) -> Tensor:
    logits_NE = x_ND @ router_ED.T
    scores_NE = logits_NE.softmax(1)
    chosen_NK = (scores_NE + bias_E).topk(K).indices
    gates_NK = scores_NE.gather(1, chosen_NK)
    gate_ENF, up_ENF = (x_ND @ up_EDF).chunk(2, dim=-1)
    y_END = (F.silu(gate_ENF) * up_ENF) @ down_EFD
    y_NKD = y_END[chosen_NK, torch.arange(N)[:, None]]
    extra = (scores_NE.mean(0) * torch.bincount(chosen_NK.flatten(), minlength=E)).sum()
    extra = extra + logits_NE.logsumexp(1).square().mean()
    return (
        (gates_NK[:, :, None] / gates_NK.sum(1)[:, None, None] * y_NKD).sum(1) + x_ND.square() + x_ND + extra
    )


def values(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return the arguments of a layer; the bias keeps the last expert empty."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (N, D), (E, D), (E, D, 2 * HIDDEN), (E, HIDDEN, D)
    tensors = [torch.randn(shape, generator=generator) * shape[-2] ** -0.5 for shape in shapes]
    bias_E = torch.tensor([0.1, 0.0, -0.1, 0.0, -2.0])
    return [t.to(dtype).requires_grad_() for t in tensors] + [bias_E]


def results(function, arguments: list[Tensor]) -> list[Tensor]:
    out = function(*arguments)
    ramp = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad((out * ramp).sum(), arguments[:4])]


def test_layer_and_its_gradients_are_those_of_every_expert_on_every_token():
    for got, want in zip(
        results(layer, values(torch.float32)), results(dense, values(torch.float32)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_layer_compiles_without_a_break():
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            got = results(compiled, values(torch.bfloat16, seed))
        for a, b in zip(got, results(layer, values(torch.bfloat16, seed)), strict=True):
            assert torch.equal(a, b)
