"""Test the experts: every path gives one result, gates are unbiased, counts exact, and the load balances."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from small import build
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from kernels import embedding
from spider.model.spider import chunking, engram
from spider.model.spider import moe as experts
from spider.model.spider.config import MoEConfig
from spider.model.spider.moe import MoE
from spider.training.compilation import compile_forward


def moe(**changes: object) -> MoE:
    torch.manual_seed(0)
    config = {"experts": 4, "top_k": 2, "expert_hidden": 8, "shared_hidden": 0} | changes
    module = MoE(16, MoEConfig.model_validate(config))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def valid(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool)


def by_hand(module: MoE, x_D: torch.Tensor) -> torch.Tensor:
    """Compute one token through its experts, one at a time."""
    p = (x_D @ module.router.weight.T).softmax(-1)
    chosen = (p + module.balance_bias).topk(module.config.top_k).indices
    total = torch.zeros_like(x_D)
    for e in chosen:
        gate, up = (x_D @ module.experts.up[e]).chunk(2)
        total = total + p[e] / p[chosen].sum() * (
            (torch.nn.functional.silu(gate) * up) @ module.experts.down[e]
        )
    return total


@pytest.mark.parametrize("implementation", ["grouped", "loop", "float64"])
def test_every_path_gives_the_result_written_out(implementation):
    module = moe()
    module.experts.grouped = implementation != "loop"
    x = torch.randn(2, 9, 16)
    if implementation == "float64":
        module, x = module.double(), x.double()
    module.balance_bias += torch.tensor([0.0, 0.5, 0.0, -0.5])
    y, _ = module(x, valid(x))
    torch.testing.assert_close(y[1, 4], by_hand(module, x[1, 4]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y[0, 0], by_hand(module, x[0, 0]), rtol=1e-4, atol=1e-5)


def test_grouped_and_loop_have_the_same_gradients_even_with_an_idle_expert():
    x = torch.randn(2, 8, 16)
    gradients = []
    for grouped in (True, False):
        module = moe()
        assert module.experts.grouped
        module.experts.grouped = grouped
        module.balance_bias[3] = -10.0
        entering = x.clone().requires_grad_()
        module(entering, valid(x))[0].square().sum().backward()
        gradients.append([entering.grad, *(p.grad for p in module.parameters())])
        assert (module.experts.up.grad[3] == 0).all()
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def ops(monkeypatch):
    """Select the path of a GPU; every op then runs its twin."""
    for module in (experts, engram, chunking):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


def test_ops_have_the_result_and_the_gradients_of_torch(request):
    x, mask = torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.bool)
    mask[1, 3:] = False
    results = []
    for way in ("torch", "ops"):
        if way == "ops":
            request.getfixturevalue("ops")
        module = moe(shared_hidden=8)
        module.balance_bias[3] = -10.0  # an expert without tokens
        entering, residual = x.clone().requires_grad_(), (x + 1).requires_grad_()
        y, stats = module(entering, mask, residual)
        (y[mask].square().sum() + stats.aux + stats.z).backward()
        inputs = entering.grad, residual.grad
        results.append([y[mask], stats.counts_E, *inputs, *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_losses_of_the_router_are_their_formulas_over_valid_tokens():
    """The first is Switch's loss: E times the sum of load share times mean probability."""
    module, x = moe(), torch.randn(2, 8, 16)
    mask = valid(x)
    mask[1, 3:] = False
    _, stats = module(x, mask)
    assert stats.counts_E.sum() == 2 * mask.sum()
    logits = x[mask] @ module.router.weight.T
    used_E = stats.counts_E / stats.counts_E.sum()
    torch.testing.assert_close(stats.aux, 4 * (used_E * logits.softmax(-1).mean(0)).sum())
    torch.testing.assert_close(stats.z, logits.logsumexp(-1).square().mean())


def test_no_gradient_of_the_model_adds_floats_in_the_order_of_threads(ops, monkeypatch):
    """Find the ops that Inductor turns into float atomics on a GPU: sums into indexed rows."""
    monkeypatch.setattr(embedding, "_is_on_gpu", lambda table: True)
    torch.compiler.reset()
    found: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        for node in graph.graph.nodes:
            name = str(node.target).removeprefix("aten.").partition(".")[0]
            adds = name in ("index_add", "scatter_add", "embedding_dense_backward")
            adds |= name in ("index_put", "_unsafe_index_put") and node.args[3:4] == (True,)
            if adds and node.meta["val"].is_floating_point():
                found.append(f"{name} {node.meta['val'].shape} {node.meta.get('stack_trace')}")
        return make_boxed_func(graph.forward)

    model = build(engram={"layers": [0], "byte_orders": [2]}, recurrence={"layers": 1}).train()
    partition = min_cut_rematerialization_partition
    decompositions = select_decomp_table()
    backend = aot_autograd(
        fw_compiler=look, bw_compiler=look, partition_fn=partition, decompositions=decompositions
    )
    x = torch.randint(97, 123, (2, 41))
    compile_forward(model, backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        model(x[:, :-1], x[:, 1:]).loss.backward()
    print(*found, sep="\n----\n")
    assert found == []


def test_the_routers_gradients_are_as_wide_compiled_as_they_are_eager():
    """Only the forward pass keeps the router out of autocast."""
    torch.compiler.reset()
    x, results = torch.randn(2, 8, 16), []
    for compiled in (False, True):
        module = moe(expert_hidden=16)
        if compiled:
            module.parts_to_compile = lambda module=module: [(module, "forward")]
            compile_forward(module, backend="aot_eager")
        entering = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, stats = module(entering, valid(x))
        (y.float().square().sum() + stats.aux + stats.z).backward()
        results.append([module.router.weight.grad, entering.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_bias_spreads_a_collapsed_load():
    module = moe()
    with torch.no_grad():
        module.router.weight[0] += 0.5  # nearly all tokens prefer one expert
    x = torch.randn(4, 64, 16) + 0.5
    busiest = []
    for _ in range(500):
        counts = module(x, valid(x))[1].counts_E
        busiest.append((counts.max() * len(counts) / counts.sum()).item())
        module.load += counts
        module.rebalance()
    assert busiest[0] > 1.7, "the load was meant to be collapsed"
    assert busiest[-1] < 1.4 and (module.load == 0).all()


def test_a_layer_by_ops_has_the_same_gradients_recomputed(ops):
    results = []
    for way in ("none", "selective"):
        recurrence = {"layers": 1, "loops": 1, "checkpointing": way}
        model = build(engram={"layers": [0]}, recurrence=recurrence, stream="narrow").train()
        x = torch.randint(97, 123, (2, 41), generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x[:, :-1], x[:, 1:]).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(kept, recomputed) for kept, recomputed in zip(*results, strict=True))
