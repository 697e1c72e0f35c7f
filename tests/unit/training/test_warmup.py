import pytest
import torch

from spider import files
from spider.model import build_model
from spider.training import warmup
from spider.training.errors import TrainingError
from spider.training.loop import train
from spider.training.precision import decide
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
        assert set(product["ms"]) == {"fp32", "bf16", "fp8"} and min(product["ms"].values()) > 0
        assert product["fastest"] in ("fp32", "bf16")  # emulated fp8 is never chosen
        assert product["uses"] >= len(product["layers"])


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
    assert train(spec, tmp_path / "a", shards, warmup=path)["precision"] == "bf16"
    assert train(spec, tmp_path / "b", shards, warmup=path)["precision"] == "fp32"


def test_only_a_clearly_faster_precision_displaces_the_exact_one(tmp_path, make_spec, quick, monkeypatch):
    for seconds, chosen in ((0.97, "fp32"), (0.5, "bf16")):
        monkeypatch.setattr(
            warmup,
            "_time_steps",
            lambda spec, precision, device, compiled, s=seconds: {
                "seconds": 1 if precision.kind == "fp32" else s
            },
        )
        record = warm_up(make_spec(precision="auto"), tmp_path / "warmup.json")
        assert decide("auto", torch.device("cpu"), record).kind == chosen


def test_a_precision_that_the_device_lacks_stops_the_warm_up_too(tmp_path, make_spec):
    with pytest.raises(TrainingError, match="precision: fp8 cannot run on cpu"):
        warm_up(make_spec(precision="fp8"), tmp_path / "warmup.json")
    assert not (tmp_path / "warmup.json").exists()
