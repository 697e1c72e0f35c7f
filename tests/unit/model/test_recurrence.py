"""Test the looped core: stability, the effect of each loop, truncated gradients, halting."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spider.model.layers import rms_norm, rope_table
from spider.model.spider.chunking import equal_windows
from spider.model.spider.recurrence import Injection, _Aliases


def enter(model, length: int = 9):
    """Return random patches and the other inputs of the core, Engram's included."""
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    e = torch.randn(2 * length, model.config.hidden, dtype=dtype)
    windows = equal_windows(2, length, e.device)
    tokens, close = torch.randint(0, 256, (2, length)), torch.arange(2 * length)
    indexes = model.core.retrieve(tokens, close, windows.valid_M)
    return e, indexes, rope_table(length, model.config.attention.rope_dim, 1e4, e.device), windows


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_hundreds_of_loops_stay_bounded_whatever_the_weights(make, scale):
    """The output of the blocks does not grow, and each feature of the state stays within the bound of a
    linear time-invariant system, ``|h_R| <= |h_0| + (Dt |B e| + max |y|) min(R, 1 / (1 - A))``.
    """
    R = 300
    model = make(engram={"layers": [0, 1]})
    core = model.eval().core
    added, states = [], []
    core.layers[-1].register_forward_hook(lambda layer, inputs, output: added.append(output[0].abs()))
    core.halting.register_forward_pre_hook(lambda halting, inputs: states.append(inputs[1].abs()))
    with torch.no_grad():
        for parameter in core.parameters():
            parameter *= scale
        # Features with every pair of extremes:
        pairs = torch.cartesian_prod(torch.tensor([-80.0, 0.0, 80.0]), torch.tensor([-80.0, 0.0, 80.0]))
        log_decay, step = pairs.repeat(4, 1)[: model.config.hidden].unbind(1)
        core.injection.log_decay.copy_(log_decay)
        core.injection.step.copy_(step)
        e, *others = enter(model, 5)
        z = core(e, *others, n_loops=R).z_MD
    y, h = torch.stack(added), torch.stack(states).amax(0)
    assert z.isfinite().all()
    assert y[100:].max() < 10 * y[:100].max()
    step = F.softplus(step)
    decay = torch.exp(-step * log_decay.exp())
    assert decay.unique().numel() > 2 and decay.min() == 0 and decay.max() == 1
    enters = step * (core.injection.gain * e).abs() + y.amax(0)
    assert (h <= 1.001 * (e.abs() + enters * (1 / (1 - decay)).clamp(max=R))).all()


def test_injection_equals_its_equation_and_its_decay_is_inside_zero_and_one():
    injection = Injection(5)
    for parameter in injection.parameters():
        torch.nn.init.normal_(parameter)
    h, e = torch.randn(5), torch.randn(5)
    step = torch.log1p(injection.step.exp())
    decay = torch.exp(-step * injection.log_decay.exp())
    assert ((decay > 0) & (decay < 1)).all()
    torch.testing.assert_close(injection(h, e), decay * h + step * injection.gain * e)


def test_injection_survives_a_decay_that_exp_cannot_hold():
    injection = Injection(2)
    injection.init_weights()
    with torch.no_grad():
        injection.log_decay.fill_(95.0)
        injection.step.copy_(torch.tensor([-110.0, 0.0]))
    out = injection(torch.ones(2), torch.ones(2))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in injection.parameters())


def test_a_patch_that_halts_at_the_first_loop_is_that_of_a_one_loop_model(make, tokens):
    model = make().double().eval()
    halting, first = model.core.halting, []
    halting.register_forward_pre_hook(lambda module, inputs: first.append(inputs[1]))
    with torch.no_grad():
        one = model(tokens, n_loops=1, trace=True)
        # Patches that point one way halt at once, the others continue.
        halting.weight.copy_(100 * first[0][0])
        score = (rms_norm(first[0]) * halting.weight).sum(-1) * halting.weight.numel() ** -0.5
        halting.bias.copy_(5 - score[one.trace.patches.layout.valid_M].median())
        many = model(tokens, n_loops=3, trace=True)
        e, *others = enter(model, 40)
        z = [model.core(e, *others, n_loops=r) for r in (1, 3)]
    at_once = z[1].halt.loops_M == 1
    assert 0.1 < at_once.double().mean() < 0.9
    assert torch.equal(z[0].z_MD[at_once], z[1].z_MD[at_once])
    assert not (z[0].z_MD == z[1].z_MD)[~at_once].all(-1).any()

    # In the whole model this holds for the bytes that read only such patches.
    loops_BT = many.trace.loops_M[many.trace.patches.row_BT]
    only_BT = loops_BT.cummax(1).values == 1
    assert 0 < only_BT.sum() < only_BT.numel()
    assert torch.equal(one.logits[only_BT], many.logits[only_BT])
    assert not torch.equal(one.logits, many.logits)


def test_gradients_of_all_loops_are_summed_in_float32_and_rounded_once():
    weight = torch.randn(5, 7, requires_grad=True)
    narrow = weight.detach().bfloat16()
    loops = _Aliases.apply(weight, narrow, 4)
    assert all(torch.equal(alias, narrow) and alias.data_ptr() == narrow.data_ptr() for alias in loops)
    scale_3 = torch.tensor([1.0, 2**-9, -(2**-9)]).bfloat16()
    sum((alias * scale).sum().float() for alias, scale in zip(loops, scale_3, strict=False)).backward()
    # In bfloat16, 1 + 2^-9 is 1. The fourth loop has no gradient.
    assert torch.equal(weight.grad, torch.full((5, 7), 1.0))
    (loops[3].float() * 0).sum().backward()
    assert torch.equal(weight.grad, torch.full((5, 7), 1.0))
