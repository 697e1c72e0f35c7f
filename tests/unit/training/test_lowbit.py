"""Quantized AdamW: torchao's numbers, our names, exact checkpoints."""

import signal

import pytest
import torch
from torch import nn
from torchao.optim import AdamW8bit

from spider import load_model
from spider.checkpoints.save import save
from spider.config import OptimizerConfig
from spider.model.interface import Model, model_tensors
from spider.training.optim import build_optimizer, narrow_weights
from spider.training.stage import train
from tests.unit import records
from tests.unit.training.disturb import Stop, crash_at, read_until
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
    net, other = matrix(64, 64), matrix(64, 64)
    other.load_state_dict(net.state_dict())
    moving = build_optimizer(net, OptimizerConfig(kind="adamw8bit"), 1e-2, compiled=True)
    for i in range(4):
        moving.set_scheduled(weight_decay=0.4 - 0.1 * i)
        fixed = build_optimizer(other, OptimizerConfig(kind="adamw8bit", weight_decay=0.4 - 0.1 * i), 1e-2)
        for name, t in fixed.tensors(other).items():
            t.copy_(moving.tensors(net)[name])
        give_gradients(net, other, seed=i)
        moving.step()
        fixed.step()
        assert torch.equal(net.weight, other.weight)
    assert len(traced) == 1


def test_only_matrices_become_bf16_and_parameters_keep_their_identity():
    net = Net()
    before = dict(net.named_parameters())
    narrow_weights(net, OptimizerConfig(**BF16))
    assert all(p is before[name] for name, p in net.named_parameters())
    narrow = {name for name, p in net.named_parameters() if p.dtype == torch.bfloat16}
    assert narrow == {"matrix", "stack"}


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


@pytest.mark.parametrize("config", [{"kind": "adamw8bit"}, BF16])
def test_a_checkpoint_stores_the_state_as_plain_tensors_and_restores_it_bit_equal(tmp_path, config):
    net = Net()
    config = OptimizerConfig(**config)
    narrow_weights(net, config)
    optimizer = build_optimizer(net, config, lr=1e-2)
    give_gradients(net, seed=0)
    optimizer.step()

    def tensors(model, optimizer):
        state = {f"optimizer.{name}": t for name, t in optimizer.tensors(model).items()}
        return {**model_tensors(model), **state}

    saved = tensors(net, optimizer)
    assert {type(t) for t in saved.values()} == {torch.Tensor}
    assert "optimizer.matrix.exp_avg.8bit.codes" in saved and "optimizer.vector.exp_avg" in saved
    good = save(tmp_path, saved, records.saved())

    other = Net()
    narrow_weights(other, config)
    fresh = build_optimizer(other, config, lr=1e-2)
    loaded = tensors(other, fresh)
    assert good.holds_optimizer(loaded)
    good.load_into(loaded)
    for seed in (1, 2):
        for model, its in ((net, optimizer), (other, fresh)):
            give_gradients(model, seed=seed)
            its.step()
    after, again = tensors(net, optimizer), tensors(other, fresh)
    assert all(torch.equal(after[name], again[name]) for name in saved)


def test_adamw8bit_ends_with_the_same_bytes_after_a_kill_and_a_crash(tmp_path, make_spec, shards, start):
    spec = make_spec(optimizer=BF16, precision="bf16", max_steps=12)
    train(spec, tmp_path / "undisturbed", shards)
    process = start(spec, tmp_path / "disturbed")
    read_until(process, 6)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(Stop):
        train(spec, tmp_path / "disturbed", shards, on_step=crash_at(11))
    train(spec, tmp_path / "disturbed", shards)
    assert outcome(tmp_path / "disturbed") == outcome(tmp_path / "undisturbed")
    # A loaded model is fp32.
    model, _ = load_model(tmp_path / "disturbed")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
