from functools import partialmethod

import pytest
import torch
from torch import nn

from spider import load_model
from spider.checkpoints.records import Warmup
from spider.common.files import read_json
from spider.config import EvaluationConfig
from spider.evaluation.evaluate import evaluate
from spider.model import build_model
from spider.model.interface import Model
from spider.training import precision
from spider.training.compilation import compile_forward
from spider.training.precision import Precision, decide, eligible, fp8_layers, to_fp8
from spider.training.stage import train
from tests.unit.training.disturb import Stop, crash_at

CPU = torch.device("cpu")
#: Looped layers without what is around them.
PLAIN = {"boundary": {"kind": "none"}, "engram": {"layers": []}}


def measured(**said) -> Warmup:
    """Return a warm-up with the fields that `decide` reads."""
    rest = {"step": {}, "compile": None, "seconds": 0}
    known = {"format": 1, "run": "r", "device": "cpu", "threads": 1, "versions": {}, "reason": "measured so"}
    return Warmup.model_validate({**known, **rest, "fp8_layers": [], **said})


@pytest.mark.parametrize(
    ("asked", "warmup", "chosen"),
    [
        ("bf16", {"precision": "fp32"}, Precision("bf16", "configured")),
        ("fp8", {"precision": "fp8", "fp8_layers": ["a"]}, Precision("fp8", "configured")),
        ("auto", {"precision": "bf16"}, Precision("bf16", "measured so")),
        (
            "auto",
            {"precision": "fp8", "fp8_layers": ["a"]},
            Precision("fp8", "measured so", frozenset("a")),
        ),
        ("auto", None, Precision("fp32", "not measured: no warm-up on this device")),
        (
            "auto",
            {"device": "NVIDIA H100", "precision": "fp8", "fp8_layers": ["a"]},
            Precision("fp32", "not measured: no warm-up on this device"),
        ),
    ],
)
def test_what_is_configured_counts_then_a_warm_up_of_this_device(monkeypatch, asked, warmup, chosen):
    monkeypatch.setattr(precision, "has_fp8", lambda device: True)
    assert decide(asked, CPU, warmup and measured(**warmup)) == chosen


@pytest.fixture
def model(make_spec):
    torch.manual_seed(0)
    return build_model(make_spec().model)


def test_fp8_reaches_the_experts_of_the_measured_layers_if_the_device_supports_it(make_spec, caplog):
    caplog.set_level("INFO")
    model = build_model(make_spec(model={"recurrence": {"layers": 2, "loops": 1}}).model)
    experts = [layer.ffn.experts for layer in model.core.layers]
    plan = Precision("fp8", "measured", frozenset(["core.layers.1.ffn.experts"]))
    plan.prepare(model)
    assert not any(e.fp8 for e in experts)
    assert "1 parts of the model stay in bf16, cpu does not support their fp8" in caplog.text
    plan.prepare(model, emulate=True)
    assert [e.fp8 for e in experts] == [i == 1 for i in range(len(experts))]


def products(fp8, x_MK, dy_MN, weight_NK, *, emulate=True):
    """Return output, input gradient and weight gradient of a layer, in fp32 or in fp8."""
    holder = nn.Sequential(nn.Linear(*weight_NK.T.shape, bias=False))
    holder[0].weight.data.copy_(weight_NK)
    if fp8:
        to_fp8(holder, ["0"], emulate=emulate)
    x_MK = x_MK.clone().requires_grad_()
    y_MN = holder(x_MK)
    y_MN.backward(dy_MN)
    return y_MN.detach(), x_MK.grad, holder[0].weight.grad


def operands(seed=0, rows=40):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((rows, 64), (rows, 48), (48, 64))
    return [torch.randn(shape, generator=draw) for shape in shapes]


#: Relative error of output, input gradient and weight gradient. Rounding to 3 bits of mantissa (e4m3) errs by
#: 2.6% of a value on average, two such operands by 3.7%; 2 bits (e5m2) by twice that.
BOUNDS = (0.045, 0.07, 0.07)


def test_emulated_fp8_is_close_to_fp32_forward_and_backward():
    exact, rounded = products(False, *operands()), products(True, *operands())
    for a, b, bound in zip(exact, rounded, BOUNDS, strict=True):
        error = (a - b).norm() / a.norm()
        assert 0.02 < error < bound  # it did round


@pytest.mark.parametrize("rows", [32, 33])
def test_fp8_products_have_valid_shapes_for_any_number_of_rows(monkeypatch, rows):
    """Run the path without emulation on a stand-in for the device that checks shapes as the device does."""
    multiplied = []

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, **others):
        assert not (a.shape[1] % 16 or b.shape[0] % 16 or b.shape[1] % 16), (a.shape, b.shape)
        multiplied.append((a.dtype, b.dtype))
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    x_MK, dy_MN, weight_NK = operands(rows=rows)
    emulated = products(True, x_MK, dy_MN, weight_NK)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    real = products(True, x_MK, dy_MN, weight_NK, emulate=False)
    for a, b in zip(emulated, real, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-8, atol=1e-4)  # row scales come out in bf16
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert multiplied == [(e4m3, e4m3), (e5m2, e4m3), (e5m2, e4m3)]


def test_fp8_converts_the_big_projections_and_leaves_deciding_layers_wide(model):
    names_before = [name for name, _ in model.named_parameters()]
    Precision("fp8", "").prepare(model, emulate=True)
    converted = {n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert any("attention" in n for n in converted) and any("ffn" in n for n in converted)
    for name in linear - converted:
        decides = any(part in name for part in ("boundary", "router", "halting", "engram", "lora"))
        assert decides or name.endswith("kv_a"), name  # 16 + 8 wide: no multiple of 16
    for part in ("boundary", "router", "halting", "engram", "embed"):
        assert not any(part in name for name in converted)
    assert [name for name, _ in model.named_parameters()] == names_before
    phrase = f"{len(converted)} of {len(linear)} linear layers, 1 of 1 other layers"
    assert fp8_layers(model) == phrase


@pytest.mark.parametrize(
    ("checkpointing", "backend"), [(False, None), ("selective", None), (True, "aot_eager")]
)
def test_weights_of_looped_layers_are_cast_once_for_all_passes_to_the_same_bits(
    make_spec, monkeypatch, checkpointing, backend
):
    """The twin casts in each loop, in each recomputation and in each backward pass."""
    torch.compiler.reset()
    spec = make_spec(model={**PLAIN, "recurrence": {"checkpointing": checkpointing}})
    tokens_BT = torch.randint(32, 127, (2, 32), generator=torch.Generator().manual_seed(0))
    casts, real = [], precision._quantize
    monkeypatch.setattr(precision, "_quantize", lambda weight: casts.append(weight.shape) or real(weight))
    results = []
    for once in (True, False):
        torch.manual_seed(0)
        model = build_model(spec.model).train()
        Precision("fp8", "").prepare(model, emulate=True)
        for module in model.core.modules():
            if not once and hasattr(module, "cast_once"):
                del module.cast_once, module.quantize
        if backend:
            compile_forward(model, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens_BT, tokens_BT.roll(-1, 1)).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for here, there in zip(*results, strict=True):
        assert here is there is None or torch.equal(here, there)
    layers = [m for m in model.core.layers.modules() if type(m).__name__ == "Float8Linear"]
    assert layers and (backend or len(casts) == len(layers))


@pytest.fixture
def emulated(monkeypatch):
    """Emulate a device with fp8."""
    monkeypatch.setattr(precision, "has_fp8", lambda device: True)
    monkeypatch.setattr(Precision, "prepare", partialmethod(Precision.prepare, emulate=True))


def test_a_resumed_stage_keeps_its_fp8_layers(tmp_path, shards, make_spec, emulated):
    spec = make_spec(precision="auto", max_steps=6, ckpt_every=3)
    warmup, began, later = tmp_path / "warmup.json", ["coda.0.ffn.up"], ["coda.0.ffn.down"]
    measured(precision="fp8", fp8_layers=began).write(warmup)
    with pytest.raises(Stop):
        train(spec, tmp_path / "a", shards, warmup=warmup, on_step=crash_at(4))
    whole = train(spec, tmp_path / "b", shards, warmup=warmup)
    measured(precision="fp8", fp8_layers=later).write(warmup)
    resumed = train(spec, tmp_path / "a", shards, warmup=warmup)
    assert resumed.weights == whole.weights
    manifest = read_json(tmp_path / "a" / resumed.checkpoint / "manifest.json")
    assert manifest["precision"] == {
        "kind": "fp8", "reason": "this stage began in it", "layers": began
    }  # fmt: skip
    assert train(spec, tmp_path / "c", shards, warmup=warmup).weights != whole.weights


def test_evaluation_of_weights_trained_in_fp8_is_in_bf16(tmp_path, shards, make_spec, emulated):
    trained = make_spec(precision="fp8", max_steps=2)
    folder = tmp_path / "r" / "a"
    train(trained, folder, shards)
    model, _ = load_model(folder / "train.json")
    assert {type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)} == {"Linear"}
    little = EvaluationConfig(data="toy", max_bytes=500, loops_bytes=0, sample_bytes=1)
    spec = trained.model_copy(update={"evaluation": little})
    scored = evaluate(folder / "train.json", spec, shards, folder)
    assert read_json(folder / "train.json")["precision"] == "fp8" and scored.precision == "bf16"


def test_layers_and_experts_of_odd_width_do_not_run_in_fp8(make_spec):
    class Layers(Model):
        def __init__(self):
            super().__init__()
            self.fits, self.odd_in, self.odd_out = nn.Linear(64, 48), nn.Linear(60, 48), nn.Linear(64, 40)

    assert eligible(Layers()) == {"fits"}
    with torch.device("meta"):
        assert build_model(make_spec(model={"moe": {"expert_hidden": 24}}).model).fp8_parts() is None
