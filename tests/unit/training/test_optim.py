import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from kernels.embedding import embedding, embedding_sum
from spider.config import OptimizerConfig
from spider.model import build_model
from spider.model.interface import ParameterGroup
from spider.model.spider.config import PRESETS, SpiderConfig
from spider.training import optim
from spider.training.optim import Optimizer, build_optimizer, polar
from tests.unit.training.nets import Net


def muon_group(params, **changes):
    group = {"params": params, "muon": True, "peak_lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
    plain = {"beta2": None, "rows": False, "cautious": True, "decay": "decoupled", "compute": torch.float32}
    return {**group, **plain, **changes}


@pytest.mark.parametrize("shape", [(3, 64, 16), (2, 16, 80)])
def test_polar_brings_the_singular_values_near_one_and_keeps_the_singular_vectors(shape):
    torch.manual_seed(0)
    g = torch.randn(shape)
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    g = u @ torch.diag_embed(torch.logspace(0, -2, s.size(-1)).expand(s.shape)) @ v
    found = polar(g)
    assert torch.linalg.svdvals(found).sub(1).abs().max() < 0.15
    assert (found - u @ v).norm() / (u @ v).norm() < 0.1


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
@pytest.mark.parametrize("group", [{"weight_decay": 0.1}, {"beta2": 0.9}, {"rows": True}], ids=str)
def test_a_stack_of_experts_is_updated_like_single_matrices(shape, group):
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, *shape))  # (E, in, out)
    alone = [nn.Parameter(stack[i].detach().T.clone()) for i in range(3)]  # (out, in)
    a, b = (Optimizer([muon_group(params, **group)]) for params in ([stack], alone))
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for i, p in enumerate(alone):
            p.grad = stack.grad[i].T.clone()
        a.step()
        b.step()
    torch.testing.assert_close(stack, torch.stack([p.T for p in alone]), rtol=1e-4, atol=1e-5)


def test_adamw_group_equals_torchs_adamw():
    ours = nn.Parameter(torch.randn(16, 8))
    theirs = nn.Parameter(ours.detach().clone())
    config = OptimizerConfig(kind="adamw")
    a = build_optimizer(Net(w=ours), config, lr=1e-2)
    their_own = {"lr": 5e-3, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    b = torch.optim.AdamW([theirs], **their_own)
    a.set_lr(0.5)
    for _ in range(4):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs)


@pytest.fixture(scope="module")
def model():
    return build_model(SpiderConfig.model_validate({"preset": "tiny", **PRESETS["tiny"]}))


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw8bit"])
def test_every_parameter_of_the_model_is_in_one_group_and_no_vector_or_table_is_decayed(model, kind):
    groups, names = model.parameter_groups(), {id(p): n for n, p in model.named_parameters()}
    tables = {name for name, group in groups.items() if group.role == "table"}
    assert tables
    for own in ({}, {"groups": {"tables": {"weight_decay": 0.1}}}):
        optimizer = build_optimizer(model, OptimizerConfig(kind=kind, **own), lr=1e-3)
        dealt = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
        assert sorted(dealt) == sorted(names.values())
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = names[id(p)]
                vector = p.ndim < 2 or 1 in p.shape[-2:]
                assert group["muon"] == (kind == "muon" and not vector and name not in tables), name
                if name in tables:
                    assert group["weight_decay"] == (0.1 if own else 0)
                else:
                    assert (group["weight_decay"] == 0) == vector, name
    with pytest.raises(ValueError, match=r"cautious_decay\n.*does not use Muon"):
        OptimizerConfig(kind="adamw", cautious_decay=False)


def test_training_without_compile_does_not_import_the_compiler():
    code = """
import sys, torch
from spider.config import OptimizerConfig
from spider.model import build_model
from spider.model.spider.config import PRESETS, SpiderConfig
from spider.training.optim import build_optimizer
import spider.evaluation.evaluate, spider.training.stage, spider.training.warmup

model = build_model(SpiderConfig.model_validate(PRESETS["tiny"]))
optimizer = build_optimizer(model, OptimizerConfig(), 1e-3)
tokens = torch.randint(0, 256, (2, 17))
model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
optimizer.step()
with torch.device("meta"):
    build_model(SpiderConfig.model_validate(PRESETS["tiny"]))
print("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def normuon(w, grads, *, lr, decay, mu=0.95, beta2=0.9, cautious=True):
    """Compute NorMuon in NumPy for a matrix (out, in): by rows if it is tall or square, else by columns."""
    w, momentum = w.astype(np.float64), np.zeros(w.shape)
    rows, cols = w.shape
    axis = 1 if rows >= cols else 0
    second = np.zeros((rows, 1) if axis else (1, cols))
    for g in grads:
        momentum = mu * momentum + (1 - mu) * g
        u = polar(torch.from_numpy((1 - mu) * g + mu * momentum)[None])[0].numpy()
        second = beta2 * second + (1 - beta2) * (u**2).mean(axis, keepdims=True)
        evened = u / np.sqrt(second)
        evened *= np.linalg.norm(u) / np.linalg.norm(evened)
        decayed = w * (evened * w > 0) if cautious else w
        w = w - lr * decay * decayed - lr * max(1, rows / cols) ** 0.5 * evened
    return w, second


@pytest.mark.parametrize(("shape", "cautious"), [((24, 24), False), ((40, 16), True), ((16, 40), True)])
def test_normuon_equals_the_papers_equations_in_numpy(shape, cautious):
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=shape), rng.normal(size=(6, *shape)) * np.logspace(0, -2, shape[1])
    expected, second = normuon(start, grads, lr=0.02, decay=0.1, cautious=cautious)
    p, twin = (nn.Parameter(torch.tensor(start, dtype=torch.float32)) for _ in range(2))
    optimizer = Optimizer([muon_group([p, twin], weight_decay=0.1, beta2=0.9, cautious=cautious)])
    for g in grads:
        p.grad = torch.tensor(g, dtype=torch.float32)
        twin.grad = -p.grad
        optimizer.step()
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(optimizer.state[p]["second_moment"].numpy(), second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_rows_normalises_rows_before_the_polar_factor(shape, monkeypatch):
    entered, plain = [], optim.polar
    monkeypatch.setattr(optim, "polar", lambda g: entered.append(g.clone()) or plain(g))
    p = nn.Parameter(torch.randn(*shape))
    p.grad = torch.randn(*shape) * torch.logspace(0, -6, shape[0])[:, None]
    Optimizer([muon_group([p], rows=True)]).step()
    (g_1rc,) = entered
    torch.testing.assert_close(g_1rc[0].norm(dim=1), torch.ones(shape[0]))


@pytest.mark.parametrize(("group", "rows"), [({"rows": True}, 1), ({"beta2": 0.9}, 0)])
def test_rows_without_a_gradient_do_not_move(group, rows):
    p = nn.Parameter(torch.ones(8, 4))
    p.grad = torch.zeros(8, 4)
    p.grad[:rows] = 1.0
    Optimizer([muon_group([p], **group)]).step()
    assert torch.equal(p[rows:], torch.ones(8 - rows, 4)) and (p[:rows] < 1).all()


@pytest.mark.parametrize("lookup", [embedding, embedding_sum])
def test_a_table_gets_the_update_of_its_full_gradient_from_the_rows_of_a_batch(lookup):
    torch.manual_seed(0)
    rows = nn.Parameter(torch.randn(300, 64))
    full = nn.Parameter(rows.detach().clone())
    config = OptimizerConfig(kind="adamw", weight_decay=0.1)
    a, b = (build_optimizer(Net(w=one), config, lr=1e-2) for one in (rows, full))
    full.by_rows = False
    for step in range(4):
        # Few of the rows, an id twice, and two micro-batches.
        for ids in torch.randint(0, 40, (2, 8, 3)) + 17 * step:
            for table in (rows, full):
                lookup(ids, table).sin().sum().backward()
        assert rows.grad.is_sparse and not full.grad.is_sparse
        norms = [torch.nn.utils.get_total_norm(one.gradients()) for one in (a, b)]
        torch.testing.assert_close(*norms)
        finite = torch.tensor(step != 2)
        for optimizer in (a, b):
            optimizer.step(finite, torch.tensor(0.5))
            optimizer.zero_grad()
        torch.testing.assert_close(rows, full, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(list(a.state[rows].values()), list(b.state[full].values()))


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw8bit"])
def test_what_is_scheduled_applies_to_the_step_and_a_decay_to_matrices_only(kind):
    net = Net(weight=nn.Parameter(torch.ones(4, 4)), bias=nn.Parameter(torch.ones(4)))
    optimizer = build_optimizer(net, OptimizerConfig(kind=kind, weight_decay=0.1, eps=1.0), lr=1e-2)
    optimizer.set_scheduled(weight_decay=0.5, muon_momentum=0.0)
    net.weight.grad, net.bias.grad = torch.full((4, 4), 1.0 if kind == "muon" else 1e-6), torch.zeros(4)
    rate = 1e-2 * (4 if kind == "muon" else 1)
    optimizer.step()
    # The update without the decay; AdamW's is 1e-6 of its rate.
    update = polar(torch.ones(1, 4, 4))[0] if kind == "muon" else torch.zeros(4, 4)
    torch.testing.assert_close(net.weight, torch.ones(4, 4) * (1 - rate * 0.5) - rate * update)
    torch.testing.assert_close(net.bias, torch.ones(4))
    if kind == "muon":
        torch.testing.assert_close(optimizer.state[net.weight]["momentum"], net.weight.grad)


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw8bit"])
def test_a_learning_rate_scale_changes_only_its_own_parameter(kind):
    class Rated(Net):
        def parameter_groups(self):
            roles = {"a": ("matrix", 2.5), "b": ("table", 75.0), "c": ("matrix", 1.0)}
            return {name: ParameterGroup(role, rate=rate) for name, (role, rate) in roles.items()}

    net = Rated(**{name: nn.Parameter(torch.randn(8, 8) / 8**0.5) for name in "abc"})
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = build_optimizer(net, OptimizerConfig(kind=kind, weight_decay=0), lr=1e-4)
    optimizer.set_lr(0.5)
    for p in net.parameters():
        p.grad = torch.eye(8)
    optimizer.step()
    moved = {name: (p - before[name]).norm().item() for name, p in net.named_parameters()}
    assert moved["a"] == pytest.approx(2.5 * moved["c"], rel=1e-3)
    rates = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
    base = 0.5e-4 * (4.0 if kind == "muon" else 1)
    assert [rates[id(p)] for p in net.parameters()] == pytest.approx([2.5 * base, 75 * 0.5e-4, base])


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw8bit"])
def test_l2_decay_is_a_part_of_the_gradient(kind):
    decayed, plain = (Net(w=nn.Parameter(torch.linspace(-1, 2, 64).view(8, 8))) for _ in range(2))
    l2 = {"matrices": {"decay": "l2", "weight_decay": 0.25}}
    a = build_optimizer(decayed, OptimizerConfig(kind=kind, groups=l2), lr=1e-2)
    b = build_optimizer(plain, OptimizerConfig(kind=kind, weight_decay=0), lr=1e-2)
    for seed in range(3):
        decayed.w.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        plain.w.grad = decayed.w.grad + 0.25 * plain.w.detach()
        a.set_scheduled(weight_decay=7.0)  # a group's own decay has no schedule
        a.step()
        b.step()
    torch.testing.assert_close(decayed.w, plain.w)
