import re

import pytest
import torch
from torch._dynamo.utils import counters

from spider.checkpoints.records import Step, Warmup
from spider.common.errors import TrainingError
from spider.config import StageSpec
from spider.config.model import family_block, model_block
from spider.model import build_model
from spider.model.interface import Model
from spider.model.spider import moe
from spider.training import build, precision, warmup
from spider.training.precision import decide
from spider.training.stage import train
from spider.training.warmup import warm_up
from tests.unit.training.disturb import Stop, crash_at


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(warmup, "_STEP_SECONDS", 0.1)


def test_the_warm_up_times_whole_steps_and_selects_a_precision(tmp_path, make_spec, quick):
    record = warm_up(make_spec(precision="auto"), tmp_path / "warmup.json")
    assert record == Warmup.read(tmp_path / "warmup.json")
    assert set(record.step) == {"fp32", "bf16"}  # a CPU does not support fp8
    assert record.precision in record.step and record.fp8_layers == [] and record.compile is None
    assert all(s.peak_memory_mb > 0 and s.seconds > 0 for s in record.step.values())
    cost = r"\d+ ms, \d\.\d\d GB"
    step = "measured on cpu, a step of one micro-batch: "
    assert re.fullmatch(f"{step}fp32 {cost}; bf16 {cost}", record.reason)
    configured = warm_up(make_spec(precision="bf16"), tmp_path / "warmup.json").reason
    assert re.fullmatch(f"configured, {step}bf16 {cost}", configured)


@pytest.fixture
def emulated(monkeypatch):
    """Emulate a device with fp8, grouped fp8 products, and layers that are large for it."""
    monkeypatch.setattr(precision, "has_fp8", lambda device: True)
    monkeypatch.setattr(precision, "_LARGE", 64)
    monkeypatch.setattr(moe, "runs_on", lambda device: True)


@pytest.mark.parametrize(("seconds", "chosen"), [(0.97, "bf16"), (0.5, "fp8")])
def test_fp8_replaces_bf16_if_a_whole_step_is_clearly_faster(
    tmp_path, make_spec, emulated, monkeypatch, seconds, chosen
):
    plans = {}

    def step(spec, precision, device, data):
        plans[precision.kind] = precision
        took = seconds if precision.kind == "fp8" else 1
        return Step(first_seconds=1, seconds=took, peak_memory_mb=1)

    monkeypatch.setattr(warmup, "_time_steps", step)
    monkeypatch.setattr(warmup, "_candidates", lambda *given: ["bf16", "fp8"])
    record = warm_up(make_spec(precision="auto"), tmp_path / "warmup.json")
    decided = decide("auto", torch.device("cpu"), record)
    assert decided.kind == record.precision == chosen
    assert plans["fp8"].layers == frozenset(record.fp8_layers) and record.fp8_layers
    assert decided.layers == (plans["fp8"].layers if chosen == "fp8" else None)


def test_training_uses_the_warm_ups_precision_and_keeps_it_on_resume(tmp_path, make_spec, shards, quick):
    spec, path = make_spec(precision="auto", max_steps=6, ckpt_every=3), tmp_path / "warmup.json"
    record = warm_up(spec, path)
    record.model_copy(update={"precision": "bf16"}).write(path)
    with pytest.raises(Stop):
        train(spec, tmp_path / "a", shards, warmup=path, on_step=crash_at(4))
    record.model_copy(update={"precision": "fp32"}).write(path)
    assert train(spec, tmp_path / "a", shards, warmup=path).precision == "bf16"
    assert train(spec, tmp_path / "b", shards, warmup=path).precision == "fp32"


def test_a_gpu_without_bf16_warms_up_and_trains_uncompiled(tmp_path, make_spec, shards, quick, monkeypatch):
    """Grouped experts compile only in bf16, which this GPU lacks."""
    spec, on = make_spec(precision="auto", max_steps=2), StageSpec.compiled_on
    assert [spec.compiled_on("cuda", kind) for kind in ("fp32", "bf16", "fp8")] == [False, True, True]
    assert make_spec(model={"moe": {"expert_hidden": 12}}).compiled_on("cuda", "fp32")
    assert not spec.compiled_on("cpu", "bf16")
    monkeypatch.setattr(StageSpec, "compiled_on", lambda self, device, kind: on(self, "cuda", kind))
    monkeypatch.setattr(warmup, "_candidates", lambda *_: ["fp32"])
    record = warm_up(spec, tmp_path / "warmup.json")
    assert record.precision == "fp32" and record.compile is None and set(record.step) == {"fp32"}
    assert train(spec, tmp_path / "a", shards, warmup=tmp_path / "warmup.json").precision == "fp32"


# ------------------------------------------------------------------------------------------- out of memory


def test_a_precision_that_runs_out_of_memory_is_left_out(tmp_path, make_spec, quick, monkeypatch, caplog):
    make = build.build_optimizer
    lacking = {torch.float32: torch.OutOfMemoryError("CUDA out of memory")}

    def too_large(model, config, lr, compute, **options):
        if compute in lacking:
            raise lacking[compute]
        return make(model, config, lr, compute, **options)

    monkeypatch.setattr(build, "build_optimizer", too_large)
    record = warm_up(make_spec(precision="auto"), tmp_path / "warmup.json")
    assert record.precision == "bf16" and set(record.step) == {"bf16"}
    assert caplog.text.count("a step in fp32 is left out: out of memory") == 1
    lacking[torch.bfloat16] = RuntimeError("can't allocate memory")
    with pytest.raises(
        TrainingError, match=r"out of memory in the warm-up, a step with micro_batch 4.*set micro_batch: 2"
    ):
        warm_up(make_spec(precision="auto"), tmp_path / "warmup.json")


# -------------------------------------------------------------------------------------- what the stage runs


def small_gpt(**changes):
    return family_block(model_block({"preset": "gpt-cpu", "hidden": 32, "heads": 2, **changes}))


def test_a_compiled_stage_of_packed_documents_runs_the_graphs_of_its_warm_up(
    tmp_path, talk, talk_spec, quick, graphs
):
    spec = talk_spec.model_copy(update={"compile": True})
    warm_up(spec, tmp_path / "warmup.json", talk)
    measured = graphs()
    train(spec, tmp_path / "a", talk, warmup=tmp_path / "warmup.json")
    assert graphs() == measured and len(measured) > 2
    row = {"settings": spec.settings.model_copy(update={"attend": "row"})}
    assert spec.shape != spec.model_copy(update=row).shape


@pytest.mark.inductor
@pytest.mark.long
def test_a_stage_compiles_nothing_that_its_warm_up_compiled(tmp_path, talk, talk_spec, quick, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "torch"))
    monkeypatch.setattr("torch._inductor.config.cpp.simdlen", 1)
    spec = talk_spec.model_copy(update={"compile": True})
    warm_up(spec, tmp_path / "warmup.json", talk)
    torch.compiler.reset()
    counters.clear()
    train(spec, tmp_path / "a", talk, warmup=tmp_path / "warmup.json")
    assert counters["inductor"]["fxgraph_cache_miss"] == 0 < counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.parametrize("family", ["gpt", "spider"])
def test_under_fsdp_no_process_builds_the_whole_model(tmp_path, make_spec, quick, family):
    spec = make_spec(precision="fp32", model={"recurrence": {"layers": 4}, "coda_layers": 3})
    if family == "gpt":
        windows = {"windows": "SSSL", "short_window": 8, "value_embeddings": "alternate"}
        spec = spec.model_copy(update={"model": small_gpt(layers=12, **windows)})
    largest = {"built": 0}

    def note(module, _):
        if isinstance(module, Model):
            largest["built"] = max(largest["built"], sum(p.numel() for p in module.parameters()))

    with torch.nn.modules.module.register_module_forward_pre_hook(note):
        for parallel in ("fsdp", "ddp"):
            shared = spec.model_copy(update={"parallel": parallel, "processes": 2})
            record = warm_up(shared, tmp_path / "warmup.json")
            assert (" from fewer layers: fp32 " in record.reason) == (parallel == "fsdp")
            if parallel == "fsdp":
                assert 0 < largest["built"] < 0.7 * build_model(spec.model).num_parameters()
    assert largest["built"] == build_model(spec.model).num_parameters()
