"""Rounding: where inputs tell nothing it is to the nearest, of two columns it is the best there is."""

import pytest
import torch

from spider.compress import gptq as it

BITS = 6


def steps_of(w):
    return it.steps(w, 12.85, BITS, shared=False)


def problem(rows=48, columns=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator)
    x = torch.randn(2000, columns, generator=generator) @ mix
    return torch.randn(rows, columns, generator=generator), (x.mT @ x).double()


def test_inputs_that_have_nothing_in_common_leave_it_to_the_nearest():
    w, _ = problem()
    step = steps_of(w)
    found = it.gptq(w, 3.0 * torch.eye(300, dtype=torch.float64), step, BITS, 0.01)
    assert torch.equal(found, it.nearest(w, step, BITS))


def test_of_two_columns_none_is_better():
    """With the first column at its nearest, the second is the best that there is for it."""
    w, h = problem(rows=20, columns=2)
    step = steps_of(w)
    found = it.gptq(w, h, step, BITS, 1e-9)
    first, second = h.diagonal().argsort(descending=True).tolist()
    for row in range(len(w)):
        tried = it.nearest(w, step, BITS)[row : row + 1].repeat(63, 1)
        tried[:, second] = torch.arange(-31, 32)
        costs = [it.error(w[row : row + 1], q, step[row : row + 1], h) for q in tried.split(1)]
        assert found[row, first] == tried[0, first]
        assert it.error(w[row : row + 1], found[row : row + 1], step[row : row + 1], h) <= min(costs) * (
            1 + 1e-6
        )


def test_blocks_change_nothing_and_it_is_better_than_rounding(monkeypatch):
    w, h = problem()
    step = steps_of(w)
    found, plain = it.gptq(w, h, step, BITS, 0.01), it.nearest(w, step, BITS)
    monkeypatch.setattr(it, "_BLOCK", 7)
    again = it.gptq(w, h, step, BITS, 0.01)
    assert (found != again).float().mean() < 1e-3, "only where a sum's last bit decides"
    assert it.error(w, found, step, h) < 0.6 * it.error(w, plain, step, h)


def test_what_never_enters_and_what_never_moves():
    w, h = problem(columns=80)
    h[3], h[:, 3] = 0, 0
    w[5] = 0
    step = steps_of(w)
    found = it.gptq(w, h, step, BITS, 0.01)
    assert not found[:, 3].any() and step[5] == 0 and not found[5].any()
    assert it.gptq(w, torch.full_like(h, float("nan")), step, BITS, 0.01) is None


@pytest.mark.parametrize(
    "columns, shared, shape", [(300, False, (48, 1)), (300, True, (1, 1)), (32, False, (1, 1))]
)
def test_rows_share_a_step_where_it_is_asked_or_they_are_short(columns, shared, shape):
    step = it.steps(torch.randn(48, columns), 12.85, BITS, shared=shared)
    assert step.shape == shape and step.dtype == torch.float16


def test_more_bits_and_a_smaller_clip_are_a_finer_step():
    w, _ = problem()
    sizes = [float(it.steps(w, clip, bits, shared=True)) for clip, bits in ((12, 5), (12, 6), (6, 6))]
    assert sizes == sorted(sizes, reverse=True)
    assert it.steps(torch.full((2, 80), 1e-9), 6, 6, shared=False).count_nonzero() == 0, "underflow is zeros"
