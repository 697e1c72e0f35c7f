"""Test how the benchmark of training speed reads a profile."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def benchmark(gpu_benchmarks):
    import train_throughput

    return train_throughput


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
        ("_scaled_mm", "fp8 products"),
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
    events.append(event("aten::mm", 9.0, where=DeviceType.CPU))
    found = benchmark.Profiled.figures(SimpleNamespace(events=lambda: events))
    assert found["kernels"] == [("gemm", pytest.approx(5e-6), 2)] and found["launches"] == 2
    assert found["parts"] == {"products": pytest.approx(5e-6)} and found["kernel_seconds"] == pytest.approx(
        5e-6
    )
