"""GPTQ rounds to the nearest where inputs are uncorrelated, and is optimal for two columns."""

import importlib
from pathlib import Path

import pytest
import torch

from spider.checkpoints.compress import gptq as it
from tests.unit.model.small_gpt import build_gpt

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


def test_inputs_and_rows_of_zeros_give_weights_of_zero():
    w, h = problem(columns=80)
    h[3] = 0
    h[:, 3] = 0
    w[5] = 0
    step = steps_of(w)
    found = it.gptq(w, h, step, BITS)
    assert not found[:, 3].any() and step[5] == 0 and not found[5].any()
    assert it.gptq(w, torch.full_like(h, float("nan")), step, BITS) is None


@pytest.mark.parametrize(
    "columns, shared, shape", [(300, False, (48, 1)), (300, True, (1, 1)), (32, False, (1, 1))]
)
def test_rows_share_a_step_if_configured_or_if_they_are_short(columns, shared, shape):
    step = it.steps(torch.randn(48, columns), 12.85, BITS, shared=shared)
    assert step.shape == shape and step.dtype == torch.float16


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
