"""The looped core: stability, what each loop adds, truncated gradients, halting's ends."""

from __future__ import annotations

import pytest
import torch

from spider.model.attention import rope_table
from spider.model.recurrence import Injection, loop_embedding


def enter(model, length: int = 9):
    """Random patches and what the core needs besides."""
    torch.manual_seed(1)
    e = torch.randn(2, length, model.config.hidden, dtype=next(model.parameters()).dtype)
    valid = torch.ones(2, length, dtype=torch.bool)
    memories = [None] * len(model.core.layers)
    return e, memories, rope_table(length, model.config.attention.rope_dim, 1e4, e.device), valid


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_a_thousand_loops_stay_bounded_whatever_the_weights(make, scale):
    model = make(recurrence={"layers": 1, "halting": False}, engram={"layers": []}).double().eval()
    with torch.no_grad():
        for parameter in model.core.parameters():
            parameter *= scale
        model.core.injection.log_decay.uniform_(-3, 30)
        model.core.injection.step.uniform_(-3, 30)
        inputs = enter(model)
        early = model.core(*inputs, n_loops=100).z_BLD.abs().max()
        late = model.core(*inputs, n_loops=1000).z_BLD.abs().max()
    assert late.isfinite()
    assert late < 10 * early


def test_injection_equals_its_equation_and_its_decay_is_inside_zero_and_one():
    injection = Injection(5)
    for parameter in injection.parameters():
        torch.nn.init.normal_(parameter)
    h, e = torch.randn(5), torch.randn(5)
    step = torch.log1p(injection.step.exp())
    decay = torch.exp(-step * injection.log_decay.exp())
    assert ((decay > 0) & (decay < 1)).all()
    torch.testing.assert_close(injection(h, e), decay * h + step * injection.gain * e)


def test_loop_embeddings_differ_and_need_no_parameter():
    rows = torch.stack([loop_embedding(r, 64, torch.device("cpu")) for r in range(40)])
    distance = torch.cdist(rows, rows) + 10 * torch.eye(40)
    assert distance.min() > 0.1


def test_bptt_truncates_gradients_but_not_values(make, tokens):
    full = make(recurrence={"loops": 4}).train()
    cut = make(recurrence={"loops": 4, "bptt": 1}).train()
    losses = []
    for model in (full, cut):
        torch.manual_seed(2)
        losses.append(model(tokens, tokens.roll(-1, 1)).metrics["cross_entropy"])
        torch.manual_seed(2)
        model(tokens, tokens.roll(-1, 1)).loss.backward()
    assert losses[0] == losses[1]
    assert (cut.core.lora.scale.grad[:3] == 0).all()
    assert (full.core.lora.scale.grad[:3] != 0).any()


def test_halting_at_the_first_loop_equals_a_one_loop_model(make, tokens):
    model = make().eval()
    with torch.no_grad():
        model.core.halting.weight.zero_()
        model.core.halting.bias.fill_(20.0)
        assert torch.equal(model(tokens, n_loops=3).logits, model(tokens, n_loops=1).logits)
        assert model(tokens, n_loops=3).metrics["halt_depth"] == 1


def test_each_loop_has_a_voice_of_its_own(make, tokens):
    model = make().eval()
    with torch.no_grad():
        before = model(tokens).logits
        model.core.lora.scale[1] *= 3
        assert not torch.equal(before, model(tokens).logits)
