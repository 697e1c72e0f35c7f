"""Test the whole model: gradients, sizes, determinism, precision, learning."""

from __future__ import annotations

import pytest
import torch
from small import SWITCHES, GivenLogits
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spider.model import build_model
from spider.model.spider.config import PRESETS, SpiderConfig
from spider.model.spider.moe import Experts


@pytest.mark.parametrize("switch", SWITCHES)
def test_training_gives_every_parameter_a_finite_gradient(make, tokens, switch):
    model = make(**SWITCHES[switch]).train()
    for seed in range(3):  # a rare expert may leave a weight out of one step
        torch.manual_seed(seed)
        model(tokens, tokens.roll(-1, 1)).loss.backward()
    for name, parameter in model.named_parameters():
        if "halting" in name and model.config.recurrence.loops == 1:
            continue  # with one loop its weight is 1 for every p
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("preset", "count"),
    [("spider-400m", 395_696_738), ("spider-150m", 149_691_234), ("tiny", 17_196_198), ("slim", 245_622)],
)
def test_parameters_of_the_smaller_presets(preset, count):
    with torch.device("meta"):
        model = build_model(SpiderConfig.model_validate(PRESETS[preset]))
    assert model.num_parameters() == count


def test_spider_1b_has_exactly_the_designed_parameters():
    with torch.device("meta"):
        model = build_model(SpiderConfig())
    assert model.num_parameters() == 996_257_890
    assert model.parameters_by_part() == {
        "embedding": 557_056,
        "dense_blocks": 116_147_456,
        "routed_experts": 603_979_776,
        "shared_experts": 37_748_736,
        "core_layers": 61_368_192,
        "engram": 175_325_056,
        "recurrence": 73_825,
        "boundary": 1_057_793,
    }


def test_built_on_meta_then_materialised_equals_built_directly(make, tokens):
    direct = make(busy=False, seed=3)
    with torch.device("meta"):
        late = build_model(direct.config)
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.reset_parameters()
    theirs = late.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in direct.state_dict().items())


def test_evaluation_draws_no_noise(make, tokens):
    model = make().eval()
    state = torch.get_rng_state()
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    assert torch.equal(state, torch.get_rng_state())
    model.train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)


def test_no_reduction_gives_the_cross_entropy_of_each_label(make, tokens):
    model = make().eval()
    labels = tokens.roll(-1, 1)
    labels[:, :7] = -100
    with torch.no_grad():
        each = model(tokens, labels, reduction="none")
        expected = -model(tokens).logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    assert (each.loss[:, :7] == 0).all()
    torch.testing.assert_close(each.loss[:, 7:], expected[:, 7:])
    torch.testing.assert_close(each.metrics["cross_entropy"], expected[:, 7:].mean())
    assert model(tokens, torch.full_like(labels, -100)).loss.isfinite()


@pytest.mark.parametrize(
    ("checkpointing", "n_loops", "narrow"),
    [(True, 4, False), ("selective", 1, False), ("selective", 4, True), ("full", 4, True)],
)
def test_recomputation_changes_neither_gradients_nor_load(make, tokens, checkpointing, n_loops, narrow):
    plain = make(recurrence={"checkpointing": "none"}).train()
    recomputed = make(recurrence={"checkpointing": checkpointing}).train()
    assert not plain.config.recurrence.checkpointing
    for model in (plain, recomputed):
        torch.manual_seed(9)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = model(tokens, tokens.roll(-1, 1), n_loops=n_loops).loss
        loss.backward()
    # The loops' gradients of a weight are summed at once, in float32, except where all is recomputed.
    most = 2**-6 if narrow else 0
    for (name, a), b in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= most * a.grad.norm(), name
    for a, b in zip(plain.core.layers, recomputed.core.layers, strict=True):
        assert torch.equal(a.ffn.load, b.ffn.load)


@pytest.mark.parametrize("switch", ["everything", "no_patches", "dense"])
def test_flops_per_token_agree_with_the_flop_counter(make, switch):
    # The counter ignores grouped_mm and the CPU's fused attention, so the paths of plain products are
    # counted.
    model = make(**SWITCHES[switch]).eval()
    for module in model.modules():
        if isinstance(module, Experts):
            module.grouped = False
    x = torch.randint(0, 256, (2, 128))
    if model.chunker.boundary_predictor is not None:  # make a text that is cut at the wanted rate
        given = model.chunker.boundary_predictor = GivenLogits()
        given.logits_BT = torch.full((2, 128), -1.0)
        given.logits_BT[:, 3::4] = 1.0
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(x)
    assert model.flops_per_token(128) == pytest.approx(3 * counter.get_total_flops() / x.numel(), rel=0.02)


def test_trace_tells_cuts_loops_and_loads(make, tokens):
    with torch.no_grad():
        out = make().eval()(tokens, n_loops=3, trace=True)
        assert make().eval()(tokens).trace is None
        bare = make(**SWITCHES["bare"]).eval()(tokens, trace=True).trace
    trace, valid = out.trace, out.trace.patches.layout.valid_M
    assert trace.counts_NRE.shape == (2, 3, 4)
    assert (trace.counts_NRE.sum(2) == 2 * valid.sum()).all()
    assert (trace.loops_M * valid).sum() / valid.sum() == out.metrics["halt_depth"]
    assert bare.counts_NRE is None
    assert bare.patches.filled_M.all()
