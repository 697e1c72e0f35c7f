"""Test the benchmark of the kernels: its code on a CPU, the bytes it counts and its goals."""

import pytest
import torch

from spider.model import build_model
from spider.model.spider.config import SpiderConfig

CPU = torch.device("cpu")


@pytest.fixture
def benchmark(gpu_benchmarks):
    import kernel_speed

    return kernel_speed


@pytest.fixture
def timing(benchmark):
    import device_time

    return device_time


@pytest.fixture
def ops(benchmark):
    import kernel_ops

    return kernel_ops


def test_whether_an_op_has_a_backward_is_what_is_said_of_it(ops, benchmark):
    small = ops.Shape(N=8, D=16, E=4, K=2, F=16)
    for name, make in ops.OPS.items():
        assert ops.has_backward(name) == (make(small, CPU).moved_backward is not None), name
    assert {name for name in benchmark.parts(small, CPU, lambda twin: twin)} >= {*ops.OPS, "layer", "experts"}


def test_tokens_that_are_not_valid_go_to_no_expert(ops):
    shape = ops.Shape(N=1000, D=16, E=4, K=2, F=16, filled=450)
    _, chosen_NK, mapping = ops.routed(shape, CPU)
    assert (chosen_NK >= 0).all(1).sum() == shape.real == 450
    assert (mapping.token_to_pos_NK >= 0).sum() == 2 * 450


def test_the_shape_of_the_patches_is_that_of_the_preset_in_the_warm_up(benchmark):
    """Compare all widths, and the share of rows that boundaries fill."""
    found, config = benchmark.patches(8, 64), SpiderConfig()
    with torch.device("meta"):
        rows = build_model(config).chunker.rows(8, 64)
    assert found[:5] == (rows, 2048, 32, 2, 512) and found.shared == 1024
    assert found.real == 8 * (1 + 64 * config.boundary.rate) < found.N
    assert found.valid(CPU).sum() == found.real


@pytest.mark.parametrize(
    "name",
    ["expand", "normalize", "engram_hash", "engram_gate", "topk_gate", "cast_rows_fp8", "cast_columns_fp8"],
)
def test_bytes_are_those_of_arguments_and_results(benchmark, ops, timing, name):
    made = ops.OPS[name](benchmark.SHAPES["spider-1b"]._replace(N=1024, D=256), CPU)
    seen = [a for a in made.arguments if isinstance(a, torch.Tensor)] + timing.tensors(
        made.twin(*made.arguments)
    )
    assert made.moved == pytest.approx(sum(tensor.nbytes for tensor in seen), rel=0.01)


def test_a_way_that_fails_or_gives_another_result_has_no_figures_and_stops_no_other(timing):
    x = torch.ones(100)

    def broken():
        raise RuntimeError("no such thing\nas that")

    found = timing.measure(
        {
            "twin": timing.Way(lambda: x * 2, gives="twin"),
            "close": timing.Way(lambda: x * 2.001, gives="twin"),
            "far": timing.Way(lambda: x * 2.1, gives="twin"),
            "undefined": timing.Way(lambda: x * torch.nan, gives="twin"),
            "broken": timing.Way(broken),
        },
        CPU,
        repeats=2,
    )
    assert found["twin"]["us"] > 0 and found["close"]["us"] > 0
    assert found["far"] == {"error": "ValueError: gives another result: tensor 0 is off by 5.00% of its norm"}
    assert "inf% of its norm" in found["undefined"]["error"]
    assert found["broken"] == {"error": "RuntimeError: no such thing"}


def test_integers_are_equal_or_wrong(timing):
    assert timing.distance(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert timing.distance(torch.tensor([1, 2]), torch.tensor([1, 3])) == torch.inf


def test_kernel_goals_are_met_missed_or_not_measured(benchmark):
    def way(us, replayed=None, launches=None):
        return {"us": us, "replayed_us": replayed, "launches": launches}

    found = {
        "expand": {"copy": way(100, 90), "kernel": way(300, 100)},
        "reduce": {"copy": way(100, 80), "kernel": way(300, 100)},
        "reduce backward": {"copy": way(100, 80), "kernel": {"error": "out of memory"}},
        "route": {"kernel": way(90, 12, 2)},
        "layer": {
            "loop": way(9000),
            "torch": way(3000),
            "torch compiled": way(2000),
            "kernels": way(1900),
            "kernels compiled": way(1500),
        },
        "experts": {"bf16": way(1000), "bf16 compiled": way(900), "fp8": way(800), "fp8 compiled": way(600)},
    }
    outcomes = [goal["outcome"] for goal in benchmark.goals_of(found)]
    assert outcomes[:4] == ["met (0.9)", "not measured", "missed (0.8)", "not measured"]
    assert outcomes[4:] == ["met (2)", "met (12)", "met (6)", "met (1.333)", "met (1.5)"]
    assert {goal["outcome"] for goal in benchmark.goals_of({})} == {"not measured"}
