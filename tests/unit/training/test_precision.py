import pytest
import torch
from torch import nn

from spider.model import build_model
from spider.training.errors import TrainingError
from spider.training.precision import Precision, decide, eligible, to_fp8

CPU = torch.device("cpu")


def test_fp8_where_it_cannot_run_is_an_error_that_names_device_and_remedy():
    with pytest.raises(
        TrainingError, match=r"precision: fp8 cannot run on cpu .* set precision: auto or bf16"
    ):
        decide("fp8", CPU, None)


@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_what_is_asked_for_is_taken(asked):
    measured = {"device": "cpu", "precision": "fp32", "reason": "r", "fp8_layers": []}
    assert decide(asked, CPU, measured) == Precision(asked, "asked for")


@pytest.mark.parametrize("faster", ["fp32", "bf16"])
def test_auto_follows_the_warm_up_of_the_same_device(faster):
    measured = {"device": "cpu", "precision": faster, "reason": "measured so", "fp8_layers": []}
    assert decide("auto", CPU, measured) == Precision(faster, "measured so")


@pytest.mark.parametrize(
    "measured", [None, {"device": "NVIDIA H100", "precision": "fp8", "fp8_layers": ["a"]}]
)
def test_auto_without_a_measurement_of_this_device_is_fp32_on_a_cpu(measured):
    chosen = decide("auto", CPU, measured)
    assert chosen.kind == "fp32" and "not measured" in chosen.reason


@pytest.fixture
def model(make_spec):
    torch.manual_seed(0)
    return build_model(make_spec().model)


def test_emulated_fp8_is_close_to_bf16_forward_and_backward(model):
    """One layer: relative error of output and both gradients; e4m3 has 3 bits of mantissa, e5m2 has 2."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 48, bias=False))
    x, dy = torch.randn(32, 64), torch.randn(32, 48)
    found = []
    for fp8 in (False, True):
        copy = nn.Sequential(nn.Linear(64, 48, bias=False))
        copy.load_state_dict(layer.state_dict())
        if fp8:
            to_fp8(copy, emulate=True)
        x_in = x.clone().requires_grad_()
        with Precision("bf16", "").autocast(CPU):
            y = copy(x_in)
        y.backward(dy.to(y.dtype))
        found.append((y.float(), x_in.grad, copy[0].weight.grad))
    for exact, rounded in zip(*found, strict=True):
        error = (exact - rounded).norm() / exact.norm()
        assert 1e-3 < error < 0.08  # above zero: it did round


def test_fp8_converts_the_big_projections_and_leaves_what_decides(model):
    names_before = [name for name, _ in model.named_parameters()]
    Precision("fp8", "").prepare(model, emulate=True)
    converted = {n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert any("attention" in n for n in converted) and any("ffn" in n for n in converted)
    for name in linear - converted:
        assert any(part in name for part in ("boundary", "router", "halting", "engram", "lora")), name
    for part in ("boundary", "router", "halting", "engram", "embed"):
        assert not any(part in name for name in converted)
    assert [name for name, _ in model.named_parameters()] == names_before


def test_only_the_layers_of_the_plan_are_converted(model):
    chosen = next(n for n, m in model.named_modules() if eligible(m, n))
    Precision("fp8", "", frozenset([chosen])).prepare(model, emulate=True)
    assert [n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"] == [chosen]


def test_a_whole_step_in_emulated_fp8_is_close_to_bf16(model, make_spec):
    tokens_BT = torch.randint(0, 256, (2, 32))
    losses = []
    for kind in ("bf16", "fp8"):
        Precision(kind, "").prepare(model, emulate=True)
        torch.manual_seed(0)
        with Precision(kind, "").autocast(CPU):
            loss = model(tokens_BT, tokens_BT.roll(-1, 1)).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
