"""Test the benchmark of training speed: its code on a CPU, its rows and its goals."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spider.sources.mock import make_mock_data

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(gpu_benchmarks):
    import train_throughput

    return train_throughput


def test_a_way_that_fails_says_why(benchmark, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "FOLDER", tmp_path)
    make_mock_data(tmp_path / "text")
    monkeypatch.setattr(benchmark, "text_for", lambda spec: tmp_path / "text")
    with pytest.raises(RuntimeError, match="precision: fp8 cannot run on cpu"):
        benchmark.measure(ROOT / "presets/smoke.yaml", {**benchmark.WAYS["fp8"], "compile": False}, 1, 1)


def test_rows_are_of_the_headline_shape_of_every_preset_and_of_memory(benchmark):
    rows = benchmark.rows_of(rehearse=False)
    presets = {path.stem for path in (ROOT / "presets").glob("spider-1b*.yaml")}
    assert {name.split(", ")[0] for name in rows} == {"headline", "gpt-d12", "memory", *presets}
    ways = {name.partition(", ")[2] for name in rows}
    assert (
        ways == {*benchmark.WAYS, *benchmark.MEMORY_WAYS}
        and benchmark.SECONDS.keys() == benchmark.WAYS.keys()
    )
    for row in rows.values():
        benchmark.config_of(row[0], **row[1])  # raises if no training can have the row's settings
    configuration, changes = rows["headline, bf16, kept"]
    (run,) = benchmark.config_of(configuration, **changes).runs.values()
    assert not run.model.recomputes and run.defaults.micro_batch == 112
    assert all(seconds < 8 * 60 for seconds in benchmark.SECONDS.values())


def test_the_gpt_is_measured_at_nanochats_batch_with_windows_and_with_documents(benchmark):
    rows = benchmark.rows_of(rehearse=False)
    asked = ["gpt-d12, bf16", "gpt-d12, bf16, documents", "gpt-d12, fp8", "gpt-d12, bf16, parts"]
    assert [name for name in rows if name.startswith("gpt")] == asked
    for name in asked:
        configuration, changes = rows[name]
        spec = benchmark.config_of(configuration, **changes).stage("gpt-d12", "steps")
        assert spec.tokens_per_step == 524_288 and spec.settings.seq_len == 2048 and spec.compile
        assert (spec.model.vocab_size, spec.model.windows, spec.model.short_window) == (32_768, "SSSL", 1024)
        assert benchmark.described(benchmark.config_of(configuration, **changes))["total"] < 70e9
        packed = name.endswith("documents")
        assert (spec.settings.attend == "document") == (spec.settings.packing == "best_fit") == packed
        assert spec.settings.grad_accum * benchmark.STEPS >= 25


def test_a_graph_compiled_again_is_counted(benchmark):
    import torch

    before = benchmark.compiled_graphs()
    twice = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    for length, graphs in ((3, 1), (3, 1), (4, 2)):
        twice(torch.ones(length))
        assert benchmark.compiled_graphs() - before == graphs
    row = {"tokens_per_second": 5e5, "peak_memory": 1, "compiled_again": 1}
    outcomes = {goal["goal"]: goal["outcome"] for goal in benchmark.goals_of({"gpt-d12, bf16": row})}
    assert outcomes["gpt-d12: no graph compiled again"] == "missed (1)"
    assert outcomes["gpt-d12: at least 400,000 tokens/s"] == "met (5e+05)"


def test_made_up_ids_are_a_tokenizers_and_packed_as_text_is(benchmark, monkeypatch, tmp_path):
    import texts

    from spider.data.packing import PackedRows
    from spider.data.shards import Shards, verify

    monkeypatch.setattr(texts, "FOLDER", tmp_path)
    folder = texts.made_ids(32_768, count=80_000)
    assert verify(folder)["documents"] == 200
    shards, packing = Shards(folder, "train"), texts.packed(folder, 512)
    ids = shards.read(0, shards.tokens)
    begins, (pad, bos, eos) = (
        shards.begins(0),
        (getattr(shards.vocabulary, name) for name in ("pad", "bos", "eos")),
    )
    assert shards.vocabulary.size == 32_768 and 20_000 < ids.max() < 32_768 and pad not in ids
    assert (np.flatnonzero(ids == bos) == begins).all() and (ids[begins[1:] - 1] == eos).all()
    assert np.mean(ids < 256) > 0.4  # few are most of a text
    assert PackedRows.open(folder, shards, 512).packing == packing and packing.filled > 0.95
    assert texts.made_ids(32_768) == folder


def test_throughput_goals_are_met_missed_or_not_measured(benchmark):
    def way(speed, memory=30e9):
        described = {"total": 24e9}
        return {
            "tokens_per_second": speed,
            "peak_memory": memory,
            "compiled_again": 0,
            "described_memory": described,
        }

    found = {
        f"headline, {name}": way(speed) for name, speed in (("seed", 20e3), ("bf16", 150e3), ("fp8", 170e3))
    }
    found |= {"headline, bf16, parts": way(1e9), "spider-1b-25gb, bf16": way(9e9, 24e9)}
    found["memory, muon"] = way(9e9, 30e9)
    outcomes = [goal["outcome"] for goal in benchmark.goals_of(found)]
    assert outcomes[:3] == ["met (1.7e+05)", "missed (1.7e+05)", "met (1.133)"]
    assert outcomes[3:8] == ["missed (1.133)", "met (8.5)", "met (24)", "not measured", "not measured"]
    assert outcomes[8:] == ["met (1)", "missed (1.25)"]
    assert {goal["outcome"] for goal in benchmark.goals_of({})} == {"not measured"}


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
    from torch.autograd import DeviceType

    def event(name, us, annotation=False, where=DeviceType.CUDA):
        span = SimpleNamespace(elapsed_us=lambda: us)
        known = {"name": name, "is_user_annotation": annotation, "device_type": where}
        return SimpleNamespace(**known, time_range=span)

    events = [event("gemm", 2.0), event("gemm", 3.0), event("## Call CompiledFxGraph", 5.0, annotation=True)]
    profiler = SimpleNamespace(events=lambda: [*events, event("aten::mm", 9.0, where=DeviceType.CPU)])
    assert benchmark.parts_of(profiler) == [("gemm", pytest.approx(5e-6), 2)]
