import subprocess
import sys

import pytest
import torch
from torch import nn

from spider.config import OptimizerConfig
from spider.model import build_model
from spider.model.spider.config import PRESETS, SpiderConfig
from spider.training import optim
from spider.training.optim import Optimizer, build_optimizer, polar

CLASSIC = ((3.4445, -4.7750, 2.0315),) * 5


def muon_group(params, **changes):
    group = {"params": params, "muon": True, "peak_lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
    return {**group, "compute": torch.float32, **changes}


@pytest.mark.parametrize("shape", [(4, 48, 48), (3, 64, 16), (2, 16, 80)])
def test_polar_brings_the_singular_values_near_one_and_keeps_the_singular_vectors(shape):
    torch.manual_seed(0)
    g = torch.randn(shape)
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    g = u @ torch.diag_embed(torch.logspace(0, -2, s.size(-1)).expand(s.shape)) @ v
    found = polar(g)
    assert torch.linalg.svdvals(found).sub(1).abs().max() < 0.15
    assert (found - u @ v).norm() / (u @ v).norm() < 0.1


def test_polar_of_a_zero_matrix_is_zero():
    assert torch.equal(polar(torch.zeros(2, 8, 4)), torch.zeros(2, 8, 4))


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64)])
def test_muon_follows_torchs_muon(shape, monkeypatch):
    monkeypatch.setattr(optim, "POLAR_EXPRESS", CLASSIC)
    monkeypatch.setattr(optim, "_SAFETY", 1.0)
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(shape)), None
    theirs = nn.Parameter(ours.detach().clone())
    a = Optimizer([muon_group([ours], compute=torch.bfloat16)])  # as the oracle
    b = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.95, weight_decay=0.0, ns_coefficients=CLASSIC[0], ns_steps=5
    )
    start = ours.detach().clone()
    for _ in range(5):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.0001 * moved


def test_a_stack_of_experts_is_updated_like_its_matrices_one_by_one():
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 24, 8))  # (E, in, out)
    alone = [nn.Parameter(stack[i].detach().T.clone()) for i in range(3)]  # (out, in)
    a, b = (
        Optimizer([muon_group([stack], weight_decay=0.1)]),
        Optimizer([muon_group(alone, weight_decay=0.1)]),
    )
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for i, p in enumerate(alone):
            p.grad = stack.grad[i].T.clone()
        a.step()
        b.step()
    torch.testing.assert_close(stack, torch.stack([p.T for p in alone]), rtol=1e-4, atol=1e-5)


def test_cautious_decay_shrinks_only_where_the_update_does():
    p = nn.Parameter(torch.tensor([[1.0, -1.0], [1.0, 1.0]]))
    optimizer = Optimizer([muon_group([p], weight_decay=0.5, peak_lr=0.1)])
    p.grad = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    before, update = p.detach().clone(), polar(p.grad[None])[0]
    optimizer.step()
    expected = before - 0.1 * update
    expected[0, 0] -= 0.1 * 0.5 * before[0, 0]
    torch.testing.assert_close(p.detach(), expected)


def test_adamw_group_equals_torchs_adamw():
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(16, 8))
    theirs = nn.Parameter(ours.detach().clone())
    config = OptimizerConfig(kind="adamw")
    a = build_optimizer(nn.ParameterDict({"w": ours}), config, lr=1e-2)
    b = torch.optim.AdamW(
        [theirs], lr=5e-3, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
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


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw8bit", "adamw4bit"])
def test_every_parameter_of_the_model_is_in_one_group_and_no_vector_or_table_is_decayed(model, kind):
    optimizer = build_optimizer(model, OptimizerConfig(kind=kind), lr=1e-3)
    names = {id(p): n for n, p in model.named_parameters()}
    dealt = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
    assert sorted(dealt) == sorted(names.values())
    tables = {id(p) for p in model.parameters() if getattr(p, "_is_embedding", False)}
    assert tables
    for group in optimizer.param_groups:
        assert not group["muon"] or kind == "muon"
        for p in group["params"]:
            spared = (
                p.ndim < 2 or 1 in p.shape[-2:] or id(p) in tables or getattr(p, "_no_weight_decay", False)
            )
            assert (group["weight_decay"] == 0) == bool(spared), names[id(p)]
            assert not (group["muon"] and spared), names[id(p)]
    assert any(g["muon"] for g in optimizer.param_groups) == (kind == "muon")


def test_muon_takes_the_expert_stacks(model):
    optimizer = build_optimizer(model, OptimizerConfig(kind="muon"), lr=1e-3)
    assert any(p.ndim == 3 for g in optimizer.param_groups if g["muon"] for p in g["params"])


def test_one_rate_governs_both_kinds_of_parameters(model):
    config = OptimizerConfig(kind="muon", muon_lr_ratio=3.75)
    for lr, of_matrices in [(8e-3, 0.03), (8e-4, 0.003)]:
        optimizer = build_optimizer(model, config, lr)
        optimizer.set_lr(0.5)
        found = {group["muon"]: group["lr"] for group in optimizer.param_groups}
        assert found == pytest.approx({True: 0.5 * of_matrices, False: 0.5 * lr})


def test_state_is_named_by_parameter():
    layer = nn.Linear(4, 3)
    optimizer = build_optimizer(layer, OptimizerConfig(kind="muon"), lr=1e-3)
    assert set(optimizer.tensors(layer)) == {
        "weight.momentum",
        "bias.exp_avg",
        "bias.exp_avg_sq",
        "bias.step",
    }


def test_what_is_not_compiled_does_not_import_the_compiler():
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
print("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
