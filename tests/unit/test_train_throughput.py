"""The benchmark of training speed: its code path on a CPU, and what it makes of what it measured."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import train_throughput

    return train_throughput


def test_a_way_is_measured_and_one_that_fails_says_why_in_its_place(tmp_path):
    asked = ["--quick", "--ways", "seed", "fp8", "--json", tmp_path / "figures.json"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "train_throughput.py", *asked], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "fp8 failed: precision: fp8 cannot run on cpu" in done.stdout
    ways = json.loads((tmp_path / "figures.json").read_text())["figures"]["ways"]
    seed = ways["seed"]
    assert seed["bytes_per_second"] == pytest.approx(8 * 64 / seed["seconds_per_step"])
    assert seed["peak_memory"] > 1e8 and seed["mfu"] is None and ways["fp8"].keys() == {"error"}


def test_without_a_gpu_it_says_that_the_figures_need_one(benchmark, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_throughput.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="these figures need a GPU and this machine has none"):
        benchmark.main()


def test_goals_are_met_missed_or_not_measured(benchmark):
    def way(speed, memory=30e9):
        return {"bytes_per_second": speed, "peak_memory": memory}

    found = {"seed": way(20_000), "bf16": way(150_000), "fp8": way(170_000, 24e9)}
    found["fp8-rowwise"] = {"error": "out of memory"}
    outcomes = [goal["outcome"] for goal in benchmark.goals_of(found)]
    assert outcomes == ["missed (1.7e+05)", "met (24)", "met (8.5)", "missed (1.133)"]
    only = [goal["outcome"] for goal in benchmark.goals_of({"seed": way(20_000), "bf16": {"error": "x"}})]
    assert only == ["not measured"] * 4


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("void cutlass::device_kernel<enable_3x_kernel_for_sm9x<... e4m3 ...>", "fp8 products"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "fp8 products"),
        ("void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>", "grouped products"),
        ("pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("triton_poi_fused_silu_mul_3", "compiled elementwise"),
        ("triton_red_fused__to_copy_mean_pow_12", "compiled reductions"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>", "sorting and lookups"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("aten::mm", "products"),
        ("aten::_scaled_mm", "fp8 products"),
        ("some_kernel", "other"),
    ],
)  # fmt: skip
def test_kernels_are_told_apart_by_their_names(benchmark, kernel, group):
    assert benchmark.group_of(kernel) == group


def test_a_profile_counts_kernels_and_not_the_annotations_that_span_them(benchmark):
    import steps
    from torch.autograd import DeviceType

    def event(name, us, annotation=False, where=DeviceType.CUDA):
        span = SimpleNamespace(elapsed_us=lambda: us)
        known = {"name": name, "is_user_annotation": annotation, "device_type": where}
        return SimpleNamespace(**known, time_range=span)

    events = [event("gemm", 2.0), event("gemm", 3.0), event("## Call CompiledFxGraph", 5.0, annotation=True)]
    profiler = SimpleNamespace(events=lambda: [*events, event("aten::mm", 9.0, where=DeviceType.CPU)])
    assert steps._parts(profiler) == [("gemm", pytest.approx(5e-6), 2)]
