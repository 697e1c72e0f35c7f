import re

import pytest
import torch

from spider import files
from spider.errors import TrainingError
from spider.model import build_model
from spider.training import precision, warmup
from spider.training.allocator import keep_freed_memory
from spider.training.precision import decide
from spider.training.stage import train
from spider.training.warmup import warm_up


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(warmup, "_GEMM_SECONDS", 0.1)
    monkeypatch.setattr(warmup, "_STEP_SECONDS", 0.1)


def test_it_measures_every_distinct_product_of_the_shape_and_decides(tmp_path, make_spec, quick):
    spec = make_spec(precision="auto")
    record = warm_up(spec, tmp_path / "warmup.json")
    assert record == files.read_json(tmp_path / "warmup.json")
    assert set(record["step"]) == {"fp32", "bf16"}
    assert record["precision"] in record["step"] and "fp32" in record["reason"]
    assert record["fp8_emulated"] and record["fp8_layers"] == []
    assert record["step_shape"]["seq_len"] == 32 and record["compile"] is None
    assert all(s["peak_memory_mb"] > 0 and s["seconds"] > 0 for s in record["step"].values())

    shapes = {(g["m"], g["k"], g["n"]) for g in record["gemms"]}
    assert len(shapes) == len(record["gemms"])
    up = dict(build_model(spec.model).named_modules())["prelude.0.ffn.up"]
    assert (4 * 32, up.in_features, up.out_features) in shapes
    for product in record["gemms"]:
        narrow = any("ffn." in name or name.endswith(("attention.q", "kv_b")) for name in product["layers"])
        assert set(product["ms"]) == {"fp32", "bf16"} | ({"fp8"} if narrow else set())
        assert min(product["ms"].values()) > 0
        assert product["fastest"] in ("fp32", "bf16")  # emulated fp8 is never chosen
        assert product["uses"] >= len(product["layers"])
    experts = record["experts"]
    assert experts["layers"] == ["core.layers.0.ffn.experts"] and min(experts["ms"].values()) > 0
    assert set(experts["ms"]) == {"bf16", "fp8"} and experts["fastest"] == "bf16"


def test_it_says_what_each_choice_costs(tmp_path, make_spec, quick):
    said = {
        asked: warm_up(make_spec(precision=asked), tmp_path / "warmup.json")["reason"]
        for asked in ("auto", "bf16")
    }
    cost = r"\d+ ms, \d\.\d\d GB"
    step = "measured on cpu, a step of one micro-batch: "
    assert re.fullmatch(f"{step}fp32 {cost}; bf16 {cost}", said["auto"])
    assert re.fullmatch(f"asked for, {step}bf16 {cost}", said["bf16"])


def test_memory_is_counted_for_each_choice_by_itself():
    keep_freed_memory()
    warmup.forget_peak(torch.device("cpu"))
    before = warmup.peak_memory_mb(torch.device("cpu"))
    block = torch.ones(25_000_000)
    assert warmup.peak_memory_mb(torch.device("cpu")) > before + 90
    del block
    warmup.forget_peak(torch.device("cpu"))
    assert warmup.peak_memory_mb(torch.device("cpu")) < before + 50


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_fp8_is_timed_in_the_recipe_of_the_run(tmp_path, make_spec, quick, monkeypatch, recipe):
    timed = set()
    convert = precision.to_fp8

    def spy(model, asked, *args, **options):
        timed.add(asked)
        convert(model, asked, *args, **options)

    monkeypatch.setattr(warmup, "to_fp8", spy)
    record = warm_up(make_spec(precision="bf16", fp8_recipe=recipe), tmp_path / "warmup.json")
    assert timed == {recipe} and record["fp8_recipe"] == recipe


def test_layers_whose_every_product_wins_in_fp8_make_up_the_plan(make_spec):
    """Three layers, of which one may not and one computes a product that lost."""
    products = {(8, 16, 16): {"a": 1, "router": 1}, (8, 16, 32): {"b": 1}, (4, 16, 32): {"b": 1}}
    gemms = [
        {"m": m, "k": k, "n": n, "fastest": "bf16" if (m, k, n) == (4, 16, 32) else "fp8"}
        for m, k, n in products
    ]
    assert warmup._fp8_layers(products, frozenset("ab"), gemms) == ["a"]


def test_the_trainer_takes_what_the_warm_up_chose_and_keeps_it_on_resume(tmp_path, make_spec, shards, quick):
    spec, path = make_spec(precision="auto", max_steps=10), tmp_path / "warmup.json"
    record = warm_up(spec, path)
    files.write_json(path, {**record, "precision": "bf16"})

    class Stop(Exception):
        pass

    def crash(step):
        if step == 6:
            raise Stop

    with pytest.raises(Stop):
        train(spec, tmp_path / "a", shards, warmup=path, on_step=crash)
    files.write_json(path, {**record, "precision": "fp32"})
    assert train(spec, tmp_path / "a", shards, warmup=path).precision == "bf16"
    assert train(spec, tmp_path / "b", shards, warmup=path).precision == "fp32"


def test_only_a_clearly_faster_precision_displaces_the_exact_one(tmp_path, make_spec, quick, monkeypatch):
    for seconds, chosen in ((0.97, "fp32"), (0.5, "bf16")):
        monkeypatch.setattr(
            warmup,
            "_time_steps",
            lambda spec, precision, device, compiled, s=seconds: {
                "seconds": 1 if precision.kind == "fp32" else s,
                "peak_memory_mb": 1,
            },
        )
        record = warm_up(make_spec(precision="auto"), tmp_path / "warmup.json")
        assert decide("auto", "tensorwise", torch.device("cpu"), record).kind == chosen


def test_a_precision_or_kernels_that_the_device_lacks_stop_the_warm_up_too(tmp_path, make_spec):
    with pytest.raises(TrainingError, match="precision: fp8 cannot run on cpu"):
        warm_up(make_spec(precision="fp8"), tmp_path / "warmup.json")
    with pytest.raises(ValueError, match="kernels: triton cannot run here: there is no CUDA device"):
        warm_up(make_spec(kernels="triton"), tmp_path / "warmup.json")
    assert not (tmp_path / "warmup.json").exists()
