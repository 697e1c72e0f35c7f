"""Test adaptive computation time: weights sum to one, and patches halt at the right loop."""

from __future__ import annotations

import pytest
import torch

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
