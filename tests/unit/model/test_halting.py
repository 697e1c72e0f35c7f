"""Test adaptive computation time: weights sum to one, and patches halt at the right loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spider.model.spider.recurrence import EPSILON, Halting


def run(probabilities: list[list[float]], states: torch.Tensor):
    """Run halting over the given p, one row per patch and one column per loop; states (loops, 1, patches,
    D)."""
    p_LR = torch.tensor(probabilities, dtype=states.dtype)
    module = Halting(states.shape[-1]).to(states.dtype)
    module.init_weights()
    state = module.start(states[0])
    for r, h in enumerate(states):
        module.bias = torch.nn.Parameter(p_LR[:, r].logit())  # the weight is zero, so the bias sets p
        state = module(state, h, last=r == len(states) - 1)
    return state


#: 0 and 1, the threshold and its neighbours, and arbitrary values.
PROBABILITIES = st.one_of(
    st.sampled_from([0.0, 1.0, EPSILON, 0.5, 1 - EPSILON, 1 - EPSILON - 1e-7, 1 - EPSILON + 1e-7, 1e-30]),
    st.floats(0, 1),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    rows=st.integers(1, 32).flatmap(
        lambda n: st.lists(st.lists(PROBABILITIES, min_size=n, max_size=n), min_size=1, max_size=6)
    )
)
@settings(max_examples=60)
def test_weights_of_every_patch_sum_to_one(rows, dtype):
    R = len(rows[0])
    # State r is the r-th unit vector, so the output is the weights themselves.
    one_hot = torch.eye(R, dtype=dtype)[:, None, None].expand(R, 1, len(rows), R)
    state = run(rows, one_hot)
    weight_LR = state.output_MD[0].double()
    assert (weight_LR.sum(1) - 1).abs().max() <= 1e-6
    assert weight_LR.min() >= 0
    unused = torch.arange(R) >= state.loops_M[0, :, None]
    assert (weight_LR[unused] == 0).all()
    assert not state.running_M.any()


def test_output_loops_and_remainder_are_those_of_the_definition():
    rows = [[0.3, 0.5, 0.4, 0.9], [0.995, 0.5, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1], [0.5, 0.495, 0.1, 0.1]]
    torch.manual_seed(0)
    states = torch.randn(4, 1, 4, 2, dtype=torch.float64)
    state = run(rows, states)
    for j, row in enumerate(rows):
        total, n = 0.0, 0
        while n < 3 and total + row[n] < 1 - EPSILON:
            total += row[n]
            n += 1
        expected = sum((row[i] * states[i][0, j] for i in range(n)), (1 - total) * states[n][0, j])
        torch.testing.assert_close(state.output_MD[0, j], expected)
        assert state.loops_M[0, j] == n + 1
        assert state.remainder_M[0, j].item() == pytest.approx(1 - total)


def test_ponder_pushes_towards_earlier_halting():
    module = Halting(2)
    module.init_weights()
    h = torch.ones(1, 1, 2)
    state = module(module.start(h), h, last=False)
    state = module(state, h, last=True)
    (state.loops_M + state.remainder_M).sum().backward()
    assert module.bias.grad < 0, "descending the ponder cost must raise p"
