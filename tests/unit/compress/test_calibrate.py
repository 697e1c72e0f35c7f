"""Compare the sums of calibration with the inputs of each expert, on every kind of device."""

import numpy as np
import pytest
import torch

from kernels import grouped_mm
from spider.checkpoints.compress.calibrate import InputSums, input_sums
from spider.config.model import family_block
from spider.model import build_model
from spider.model.spider import moe as experts


@pytest.fixture
def model():
    torch.manual_seed(0)
    attention = {"heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 16, "kv_lora_rank": 16}
    block = {
        "family": "spider",
        "hidden": 32,
        "ffn_hidden": 32,
        "attention": attention,
        "boundary": {"kind": "none"},
        "engram": {"layers": []},
        "moe": {"experts": 4, "top_k": 2, "expert_hidden": 16, "shared_hidden": 0},
        "recurrence": {"layers": 1, "loops": 1},
    }
    model = build_model(family_block(block))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("masks", [False, True], ids=["gradients are right", "gradients are masked"])
@pytest.mark.parametrize("ops", [False, True], ids=["torch", "ops"])
def test_the_inputs_of_every_expert_are_summed_on_every_device(model, masks, ops, monkeypatch):
    """The gradient of an expert without rows is masked on compute capability 10. Calibration takes no
    gradient, so its sums are the same there as on any other device."""
    monkeypatch.setattr(grouped_mm, "_is_wrong_where_empty", lambda device: masks)
    monkeypatch.setattr(experts, "use_triton", lambda x: ops)
    text = torch.arange(200).reshape(2, 100).numpy().astype(np.uint16)
    layer = model.core.layers[0].ffn
    entered = []
    layer.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    sums = input_sums(model, text, None)
    x_ND = entered[0].flatten(0, -2)
    chosen_NK = (x_ND @ layer.router.weight.T).softmax(-1).add(layer.balance_bias).topk(2).indices
    for expert in range(4):
        rows = x_ND[(chosen_NK == expert).any(1)].double()
        found = sums["core.layers.0.ffn.experts.up", expert]
        torch.testing.assert_close(found, rows.T @ rows, rtol=1e-4, atol=1e-4)
        assert ("core.layers.0.ffn.experts.down", expert) in sums


def test_tokens_that_are_not_valid_enter_no_expert(model):
    layer = model.core.layers[0].ffn
    x_ND = torch.randn(50, 32)
    valid_N = torch.arange(50) % 3 > 0
    stacks = dict(layer.experts.named_parameters())
    with torch.no_grad(), InputSums(stacks) as watched:
        layer(x_ND, valid_N)
    with torch.no_grad(), InputSums(stacks) as alone:
        layer(x_ND[valid_N], valid_N[valid_N])
    assert watched.sums.keys() == alone.sums.keys()
    for key, sum_II in alone.sums.items():
        torch.testing.assert_close(watched.sums[key], sum_II, rtol=1e-4, atol=1e-4)
