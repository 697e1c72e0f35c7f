"""Sums of inputs are those of each expert, GPTQ is optimal for two columns, clusters of rows save bytes."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import grouped_mm
from spider.checkpoints.compress import quantize as it
from spider.checkpoints.compress import rans
from spider.checkpoints.compress.format import join_clusters
from spider.checkpoints.compress.quantize import input_sums
from spider.checkpoints.compress.writer import assign_clusters, split
from spider.config.model import family_block
from spider.model import build_model
from spider.model.spider import moe as experts
from tests.unit.model.small_gpt import build_gpt


@pytest.fixture
def model():
    torch.manual_seed(0)
    attention = {"heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 16, "kv_lora_rank": 16}
    block = {
        "family": "spider",
        "hidden": 32,
        "ffn_hidden": 32,
        "attention": attention,
        "boundary": {"kind": "none"},
        "engram": {"layers": []},
        "moe": {"experts": 4, "top_k": 2, "expert_hidden": 16, "shared_hidden": 0},
        "recurrence": {"layers": 1, "loops": 1},
    }
    model = build_model(family_block(block))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("masks", [False, True], ids=["gradients are right", "gradients are masked"])
@pytest.mark.parametrize("ops", [False, True], ids=["torch", "ops"])
def test_the_inputs_of_every_expert_are_summed_on_every_device(model, masks, ops, monkeypatch):
    """The gradient of an expert without rows is masked on compute capability 10. Calibration takes no
    gradient, so its sums are the same there as on any other device."""
    monkeypatch.setattr(grouped_mm, "_is_wrong_where_empty", lambda device: masks)
    monkeypatch.setattr(experts, "use_triton", lambda x: ops)
    text = torch.arange(200).reshape(2, 100).numpy().astype(np.uint16)
    layer = model.core.layers[0].ffn
    entered = []
    layer.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    sums = input_sums(model, text, None)
    x_ND = entered[0].flatten(0, -2)
    chosen_NK = (x_ND @ layer.router.weight.T).softmax(-1).add(layer.balance_bias).topk(2).indices
    for expert in range(4):
        rows = x_ND[(chosen_NK == expert).any(1)].double()
        found = sums["core.layers.0.ffn.experts.up", expert]
        torch.testing.assert_close(found, rows.T @ rows, rtol=1e-4, atol=1e-4)
        assert ("core.layers.0.ffn.experts.down", expert) in sums


# ------------------------------------------------------------------------------------------------- rounding

BITS = 6


def steps_of(w):
    return it.steps(w, 12.85, BITS, shared=False)


def problem(rows=48, columns=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator)
    x = torch.randn(2000, columns, generator=generator) @ mix
    return torch.randn(rows, columns, generator=generator), (x.mT @ x).double()


def test_uncorrelated_inputs_are_rounded_to_the_nearest():
    w, _ = problem()
    step = steps_of(w)
    found = it.gptq(w, 3.0 * torch.eye(300, dtype=torch.float64), step, BITS)
    assert torch.equal(found, it.nearest(w, step, BITS))


def test_the_second_of_two_columns_is_optimal():
    """The first column is rounded to the nearest, and no other value of the second has a smaller error.

    The error is that of the damped products, which GPTQ minimizes.
    """
    w, h = problem(rows=20, columns=2)
    step = steps_of(w)
    found = it.gptq(w, h, step, BITS)
    h += 0.01 * h.diagonal().mean() * torch.eye(2)
    first, second = h.diagonal().argsort(descending=True).tolist()
    for row in range(len(w)):
        tried = it.nearest(w, step, BITS)[row : row + 1].repeat(63, 1)
        tried[:, second] = torch.arange(-31, 32)
        costs = [it.error(w[row : row + 1], q, step[row : row + 1], h) for q in tried.split(1)]
        assert found[row, first] == tried[0, first]
        assert it.error(w[row : row + 1], found[row : row + 1], step[row : row + 1], h) <= min(costs) * (
            1 + 1e-6
        )


def test_the_block_size_changes_nothing_and_gptq_beats_rounding(monkeypatch):
    w, h = problem()
    step = steps_of(w)
    found = it.gptq(w, h, step, BITS)
    plain = it.nearest(w, step, BITS)
    monkeypatch.setattr(it, "_BLOCK", 7)
    again = it.gptq(w, h, step, BITS)
    assert (found != again).float().mean() < 1e-3, "they differ only where the last bit of a sum decides"
    assert it.error(w, found, step, h) < 0.6 * it.error(w, plain, step, h)


def test_the_benchmark_rounds_as_the_original_script_does(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    benchmark = importlib.import_module("compress")
    row = torch.tensor([[0.0] * 99 + [100.0], [1.0, -1.0] * 50])
    q, step = benchmark.rounded(row, 31)
    mean, deviation = 1.0, 10.0  # of the first row, whose outlier is clipped to 1 + 2.5 x 10
    assert (row[0].mean(), row[0].std()) == (mean, deviation)
    assert (
        step.dtype == torch.float16 and step.tolist() == torch.tensor([[26 / 31], [1 / 31]]).half().tolist()
    )
    assert q[0].tolist() == [0] * 99 + [31] and q[1].tolist() == [31, -31] * 50

    model = build_gpt()
    size, read = benchmark.original(model, kept=0)
    whole, unchanged = benchmark.original(model, kept=10**9)
    for (name, before), after, same in zip(
        model.named_parameters(), read.parameters(), unchanged.parameters(), strict=True
    ):
        role = model.parameter_groups()[name].role
        assert torch.equal(before, after) == (role == "vector" or not before.any()), name
        if role == "matrix":
            assert torch.equal(same, before.half().float())
    assert size < whole


# ------------------------------------------------------------------------------------------------- clusters

RNG = np.random.default_rng(0)
ZERO = 127


def rows(deviations, width=64):
    values = RNG.normal(0, 1, (len(deviations), width)) * np.array(deviations)[:, None]
    return np.clip(np.round(values) + ZERO, 0, 2 * ZERO).astype(np.uint8)


def test_rows_of_several_deviations_take_fewer_bytes_and_come_back():
    symbol_RI = rows(np.repeat([1.0, 4.0, 20.0], 400)[RNG.permutation(1200)])
    cluster_R = assign_clusters(symbol_RI, ZERO)
    runs = split(symbol_RI, cluster_R)
    assert (join_clusters(runs, cluster_R) == symbol_RI).all()
    size, plain = (
        sum(rans.entropy_bits(np.bincount(run)) for run in of) for of in (runs, [symbol_RI.ravel()])
    )
    assert cluster_R.any() and size < 0.9 * plain


def test_rows_of_one_deviation_share_their_table():
    for symbol_RI in (rows(np.full(500, 5.0)), rows([3.0]), np.full((40, 8), ZERO, np.uint8)):
        assert not assign_clusters(symbol_RI, ZERO).any()


def test_inputs_and_rows_of_zeros_give_weights_of_zero_and_short_rows_share_a_step():
    w, h = problem(columns=80)
    h[3] = 0
    h[:, 3] = 0
    w[5] = 0
    step = steps_of(w)
    found = it.gptq(w, h, step, BITS)
    assert not found[:, 3].any() and step[5] == 0 and not found[5].any()
    assert it.gptq(w, torch.full_like(h, float("nan")), step, BITS) is None
    shapes = {(300, False): (48, 1), (300, True): (1, 1), (32, False): (1, 1)}
    for (columns, shared), shape in shapes.items():
        step = it.steps(torch.randn(48, columns), 12.85, BITS, shared=shared)
        assert step.shape == shape and step.dtype == torch.float16
