"""Quantized AdamW: torchao's numbers, our names, exact checkpoints."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchao.optim import AdamW8bit

from spider import load_model
from spider.checkpoints.records import steps
from spider.config import OptimizerConfig
from spider.model.interface import Model
from spider.training.optim import build_optimizer, narrow_weights
from spider.training.stage import train
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.nets import matrix
from tests.unit.training.outcomes import outcome

BF16 = {"kind": "adamw8bit", "groups": {"matrices": {"weights": "bf16"}}}


class Net(Model):
    """A net of a matrix, a stack of matrices, a table with a prime number of rows, and a vector."""

    TABLES = r"table\.weight"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(32, 256))
        self.stack = nn.Parameter(torch.randn(4, 16, 256))
        self.table = nn.Embedding(157, 32)
        self.vector = nn.Parameter(torch.randn(100))


def give_gradients(*models, seed):
    torch.manual_seed(seed)
    for name, p in models[0].named_parameters():
        gradient = torch.randn(p.shape)
        for model in models:
            own = dict(model.named_parameters())[name]
            own.grad = gradient.to(own.dtype)


def test_adamw8bit_equals_torchaos_optimizer_at_the_scheduled_rate():
    ours, theirs = Net(), Net()
    config = OptimizerConfig(kind="adamw8bit", weight_decay=0.1)
    a = build_optimizer(ours, config, lr=1e-2)
    decayed = [theirs.matrix, theirs.stack]
    spared = [theirs.table.weight, theirs.vector]
    groups = [{"params": spared, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    b = AdamW8bit(groups, betas=config.betas, eps=config.eps)
    for step, factor in enumerate([0.5, 1.0, 0.25]):
        give_gradients(ours, theirs, seed=step)
        a.set_lr(factor)
        a.step()
        for group in b.param_groups:
            group["lr"].fill_(1e-2 * factor)
        with torch.compiler.set_stance("force_eager"):
            b.step()
    for name, p in theirs.named_parameters():
        if name != "table.weight":  # torchao keeps these moments in fp32
            assert torch.equal(p, ours.get_parameter(name)), name
    # A row of 32 values is one block.
    state = a.tensors(ours)
    assert state["table.weight.exp_avg.8bit.scale"].shape == (157, 1)


def test_a_scheduled_weight_decay_needs_no_recompilation(monkeypatch):
    traced, compiles = [], torch.compile

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, **how: compiles(f, **{**how, "backend": backend}))
    net = matrix(64, 64)
    moving = build_optimizer(net, OptimizerConfig(kind="adamw8bit", eps=1e9), 1e-2, compiled=True)
    for decay in (0.4, 0.3, 0.2):
        before = net.weight.detach().clone()
        moving.set_scheduled(weight_decay=decay)
        give_gradients(net, seed=0)
        moving.step()
        torch.testing.assert_close(net.weight.detach(), before * (1 - 1e-2 * decay))
    assert len(traced) == 1


def test_stochastic_rounding_keeps_small_updates_on_average():
    net = matrix(512, 256)
    nn.init.ones_(net.weight)
    config = OptimizerConfig(**BF16, weight_decay=0.0)
    narrow_weights(net, config)
    optimizer = build_optimizer(net, config, lr=2e-4)
    torch.manual_seed(0)
    for _ in range(5):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
    assert (torch.tensor(1.0) - 2e-4).bfloat16() == 1  # one update alone is rounded away
    assert net.weight.float().mean().item() == pytest.approx(1 - 5 * 2e-4, abs=5e-5)


def test_adamw8bit_ends_with_the_same_bytes_after_crashes_from_plain_tensors(tmp_path, make_spec, shards):
    spec = make_spec(optimizer=BF16, precision="bf16", max_steps=12)
    train(spec, tmp_path / "undisturbed", shards)
    for step in (6, 11):
        with pytest.raises(Stop):
            train(spec, tmp_path / "disturbed", shards, on_step=crash_at(step))
    train(spec, tmp_path / "disturbed", shards)
    assert outcome(tmp_path / "disturbed") == outcome(tmp_path / "undisturbed")
    files = steps(tmp_path / "disturbed/checkpoints")[-1].glob("*.safetensors")
    saved = {name: t for file in files for name, t in load_file(file).items()}
    narrow = {name for name, t in saved.items() if t.dtype == torch.bfloat16}
    assert narrow and all(name.startswith("model.") and saved[name].ndim > 1 for name in narrow)
    assert any(name.endswith(".exp_avg.8bit.codes") for name in saved)
    # A loaded model is fp32.
    model, _ = load_model(tmp_path / "disturbed")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
