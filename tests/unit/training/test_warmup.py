import re

import pytest
import torch

from spider import files
from spider.cli.session import keep_freed_memory
from spider.config import StageSpec
from spider.errors import TrainingError
from spider.evaluation.evaluate import evaluate
from spider.evaluation.sample import sample
from spider.model import build_model
from spider.model.spider import moe
from spider.training import precision, warmup
from spider.training.precision import decide
from spider.training.stage import train
from spider.training.warmup import warm_up
from spider.training.warmup_record import Product, Step, Warmup


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(warmup, "_GEMM_SECONDS", 0.1)
    monkeypatch.setattr(warmup, "_STEP_SECONDS", 0.1)
    monkeypatch.setattr(warmup, "_FP8_LEAST", 16)


def test_the_warm_up_times_every_distinct_product_and_selects_a_precision(tmp_path, make_spec, quick):
    spec = make_spec(precision="auto")
    record = warm_up(spec, tmp_path / "warmup.json")
    assert record == Warmup.read(tmp_path / "warmup.json")
    assert set(record.step) == {"fp32", "bf16"}
    assert record.precision in record.step and "fp32" in record.reason
    assert record.fp8_layers == [] and record.parts is None
    assert record.compile is None
    assert all(s.peak_memory_mb > 0 and s.seconds > 0 for s in record.step.values())

    shapes = {(g.m, g.k, g.n) for g in record.gemms}
    assert len(shapes) == len(record.gemms)
    up = dict(build_model(spec.model).named_modules())["prelude.0.ffn.up"]
    assert (4 * 32, up.in_features, up.out_features) in shapes
    for product in record.gemms:
        assert set(product.ms) == {"fp32", "bf16"}  # a CPU does not support fp8
        assert min(product.ms.values()) > 0 and product.fastest in product.ms
        assert product.uses >= len(product.layers)


def test_the_products_of_a_run_are_the_same_in_every_process(make_spec):
    shapes = []
    for seed in (0, 23):
        torch.manual_seed(seed)
        shapes.append(sorted(warmup._products(make_spec(), torch.device("cpu"))))
    assert shapes[0] == shapes[1]


@pytest.fixture
def emulated(monkeypatch):
    """Emulate a device with fp8 and grouped fp8 products."""
    converted = []

    def swap(model, recipe, layers, **options):
        converted.append(recipe)
        precision_to_fp8(model, recipe, layers, **{**options, "emulate": True})

    precision_to_fp8 = precision.to_fp8
    for module in (precision, warmup):
        monkeypatch.setattr(module, "has_fp8", lambda device: True)
        monkeypatch.setattr(module, "to_fp8", swap)
    monkeypatch.setattr(moe, "runs_on", lambda device: True)
    return converted


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_products_and_experts_are_timed_in_the_runs_fp8_recipe(tmp_path, make_spec, quick, emulated, recipe):
    record = warm_up(make_spec(precision="bf16", fp8_recipe=recipe), tmp_path / "warmup.json")
    assert set(emulated) == {recipe} and record.fp8_recipe == recipe
    for product in record.gemms:
        narrow = any("ffn." in name or name.endswith(("attention.q", "kv_b")) for name in product.layers)
        assert set(product.ms) == {"fp32", "bf16"} | ({"fp8"} if narrow else set())
    assert record.parts.layers == ["core.layers.0.ffn.experts"] and min(record.parts.ms.values()) > 0
    assert set(record.parts.ms) == {"bf16", "fp8"}
    lost = {name for product in record.gemms if product.fastest != "fp8" for name in product.layers}
    assert not lost & set(record.fp8_layers)


def test_small_products_are_not_timed_in_fp8(tmp_path, make_spec, quick, emulated, monkeypatch):
    """Their casts cost more than fp8 gains, and timing costs a compilation."""
    monkeypatch.setattr(warmup, "_FP8_LEAST", 64)
    record = warm_up(make_spec(precision="bf16", fp8_recipe="rowwise"), tmp_path / "warmup.json")
    for product in record.gemms:
        assert ("fp8" in product.ms) <= (min(product.m, product.k, product.n) >= 64)
    assert not emulated


def test_experts_are_timed_with_the_expected_number_of_patches(make_spec):
    """Empty slots cost no product and would make the layer look slow."""
    changes = {"boundary": {"capacity": 0.5, "rate": 0.25}}
    model = build_model(make_spec(model=changes).model)
    own = model.fp8_parts()
    part, x_MK = own.example(8, 64, torch.device("cpu"))
    assert len(x_MK) == model.chunker.rows(8, 64)
    chosen_NK = part.routing.chosen_NK
    assert (chosen_NK[:, 0] >= 0).sum() == part.valid == 8 * (1 + 64 * 0.25)
    assert part(x_MK).shape == x_MK.shape


def test_a_record_of_another_format_is_refused(tmp_path):
    path = tmp_path / "warmup.json"
    record = {
        **{"format": 1, "run": "r", "device": "cpu", "threads": 1, "versions": {}, "precision": "fp32"},
        **{"reason": "measured", "fp8_recipe": "rowwise", "fp8_layers": []},
        **{"step": {}, "gemms": [], "parts": None},
        **{"compile": None, "seconds": 1.0},
    }
    files.write_json(path, record)
    assert Warmup.read(path).parts is None
    files.write_json(path, {**record, "format": 2})
    with pytest.raises(ValueError, match=r"warmup\.json: .* of a warm-up of format 2, .* warm up again"):
        Warmup.read(path)


def test_the_reason_states_the_cost_of_each_candidate(tmp_path, make_spec, quick):
    reasons = {
        asked: warm_up(make_spec(precision=asked), tmp_path / "warmup.json").reason
        for asked in ("auto", "bf16")
    }
    cost = r"\d+ ms, \d\.\d\d GB"
    step = "measured on cpu, a step of one micro-batch: "
    assert re.fullmatch(f"{step}fp32 {cost}; bf16 {cost}", reasons["auto"])
    assert re.fullmatch(f"configured, {step}bf16 {cost}", reasons["bf16"])


def test_peak_memory_is_measured_for_each_candidate_alone():
    keep_freed_memory()
    warmup.forget_peak(torch.device("cpu"))
    before = warmup.peak_memory_mb(torch.device("cpu"))
    block = torch.ones(25_000_000)
    assert warmup.peak_memory_mb(torch.device("cpu")) > before + 90
    del block
    warmup.forget_peak(torch.device("cpu"))
    assert warmup.peak_memory_mb(torch.device("cpu")) < before + 50


def test_the_plan_has_the_layers_whose_products_are_all_fastest_in_fp8(make_spec):
    """There are three layers: the router is not eligible, and one product of ``b`` is slower in fp8."""
    products = {(8, 16, 16): ["a", "router"], (8, 16, 32): ["b"], (4, 16, 32): ["b"]}
    gemms = [
        Product(m=m, k=k, n=n, uses=1, ms={}, fastest="bf16" if m == 4 else "fp8", layers=layers)
        for (m, k, n), layers in products.items()
    ]
    assert warmup._fp8_layers(frozenset("ab"), gemms) == ["a"]


def test_training_uses_the_warm_ups_precision_and_keeps_it_on_resume(tmp_path, make_spec, shards, quick):
    spec, path = make_spec(precision="auto", max_steps=10), tmp_path / "warmup.json"
    record = warm_up(spec, path)
    record.model_copy(update={"precision": "bf16"}).write(path)

    class Stop(Exception):
        pass

    def crash(step):
        if step == 6:
            raise Stop

    with pytest.raises(Stop):
        train(spec, tmp_path / "a", shards, warmup=path, on_step=crash)
    record.model_copy(update={"precision": "fp32"}).write(path)
    assert train(spec, tmp_path / "a", shards, warmup=path).precision == "bf16"
    assert train(spec, tmp_path / "b", shards, warmup=path).precision == "fp32"


def test_warm_up_training_evaluation_and_sample_log_their_tf32_once(
    tmp_path, make_spec, shards, quick, caplog, tf32
):
    caplog.set_level("INFO")
    spec, receipt = make_spec(tf32=True, max_steps=1), tmp_path / "train.json"
    assert spec.shape != make_spec(max_steps=1).shape and spec.identity != make_spec(max_steps=1).identity
    for job in (
        lambda: warm_up(spec, tmp_path / "warmup.json"),
        lambda: train(spec, tmp_path, shards),
        lambda: evaluate(receipt, spec, shards, tmp_path),
        lambda: sample(receipt, spec, tmp_path),
    ):
        caplog.clear()
        torch.backends.cuda.matmul.allow_tf32 = False
        job()
        assert caplog.text.count("tf32: on") == 1 and torch.backends.cuda.matmul.allow_tf32


def test_only_a_clearly_faster_precision_replaces_the_exact_one(tmp_path, make_spec, quick, monkeypatch):
    for seconds, chosen in ((0.97, "fp32"), (0.5, "bf16")):
        monkeypatch.setattr(
            warmup,
            "_time_steps",
            lambda spec, precision, device, data, s=seconds: Step(
                first_seconds=1, seconds=1 if precision.kind == "fp32" else s, peak_memory_mb=1
            ),
        )
        record = warm_up(make_spec(precision="auto"), tmp_path / "warmup.json")
        assert decide("auto", "tensorwise", torch.device("cpu"), record).kind == chosen


def test_an_unsupported_precision_or_kernel_stops_the_warm_up(tmp_path, make_spec):
    with pytest.raises(TrainingError, match="precision: fp8 cannot run on cpu"):
        warm_up(make_spec(precision="fp8"), tmp_path / "warmup.json")
    with pytest.raises(ValueError, match="kernels: triton cannot run here: there is no CUDA device"):
        warm_up(make_spec(kernels="triton"), tmp_path / "warmup.json")
    assert not (tmp_path / "warmup.json").exists()


@pytest.mark.parametrize("asked", ["fp32", "auto"])
def test_a_gpu_without_bf16_warms_up_and_trains_uncompiled(
    tmp_path, make_spec, shards, quick, monkeypatch, asked
):
    """Grouped experts compile only in bf16, which this GPU lacks."""
    spec, on = make_spec(precision=asked, max_steps=2), StageSpec.compiled_on
    monkeypatch.setattr(StageSpec, "compiled_on", lambda self, device, kind: on(self, "cuda", kind))
    monkeypatch.setattr(warmup, "_candidates", lambda *_: ["fp32"])
    record = warm_up(spec, tmp_path / "warmup.json")
    assert record.precision == "fp32" and record.compile is None and set(record.step) == {"fp32"}
    assert train(spec, tmp_path / "a", shards, warmup=tmp_path / "warmup.json").precision == "fp32"


def test_compile_with_a_precision_that_cannot_be_compiled_is_refused(tmp_path, make_spec, shards, quick):
    spec = make_spec(precision="auto", compile=True)
    with pytest.raises(TrainingError, match=r"precision: auto selects fp32 on cpu, and compile: .* bf16"):
        train(spec, tmp_path / "a", shards)
    assert warmup._candidates(spec, torch.device("cpu"), []) == ["bf16"]


def test_a_gpu_compiles_by_default_if_the_precision_allows_it(make_spec):
    spec = make_spec(precision="auto")
    assert [spec.compiled_on("cuda", kind) for kind in ("fp32", "bf16", "fp8")] == [False, True, True]
    assert make_spec(model={"moe": {"implementation": "loop"}}).compiled_on("cuda", "fp32")
    assert not spec.compiled_on("cpu", "bf16") and make_spec(precision="bf16", compile=True).compiled_on(
        "cpu", "bf16"
    )
