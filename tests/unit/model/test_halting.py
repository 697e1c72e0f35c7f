"""Adaptive computation time: weights that sum to one, and when a patch stops."""

from __future__ import annotations

import pytest
import torch

from spider.model.halting import Halting

EPSILON = 0.01


def run(probabilities: list[list[float]], states: torch.Tensor | None = None):
    """Halting over given p, one row a patch, one column a loop; states are ones unless given."""
    p_LR = torch.tensor(probabilities, dtype=torch.float64)
    module = Halting(2, EPSILON, 0.0).double()
    module.init_weights()
    state = None
    for r in range(p_LR.shape[1]):
        h = torch.ones(1, len(p_LR), 2, dtype=torch.float64) if states is None else states[r]
        state = module.start(h) if state is None else state
        module.bias = torch.nn.Parameter(p_LR[:, r].logit())  # the weight is zero: p is what the bias says
        state = module(state, h, last=r == p_LR.shape[1] - 1)
    return state


def test_weights_of_every_patch_sum_to_one():
    torch.manual_seed(0)
    rows = torch.rand(200, 7, dtype=torch.float64).clamp(1e-3, 0.999)
    state = run(rows.tolist())
    torch.testing.assert_close(state.output_BLD, torch.ones_like(state.output_BLD), rtol=0, atol=1e-6)
    assert not state.running_BL.any()


def test_output_loops_and_remainder_are_those_of_the_definition():
    rows = [[0.3, 0.5, 0.4, 0.9], [0.995, 0.5, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1], [0.5, 0.495, 0.1, 0.1]]
    torch.manual_seed(0)
    states = [torch.randn(1, 4, 2, dtype=torch.float64) for _ in range(4)]
    state = run(rows, states)
    for j, row in enumerate(rows):
        total, n = 0.0, 0
        while n < 3 and total + row[n] < 1 - EPSILON:
            total += row[n]
            n += 1
        expected = sum((row[i] * states[i][0, j] for i in range(n)), (1 - total) * states[n][0, j])
        torch.testing.assert_close(state.output_BLD[0, j], expected)
        assert state.loops_BL[0, j] == n + 1
        assert state.remainder_BL[0, j].item() == pytest.approx(1 - total)


def test_ponder_pushes_towards_earlier_halting():
    module = Halting(2, EPSILON, 1e-6)
    module.init_weights()
    h = torch.ones(1, 1, 2)
    state = module(module.start(h), h, last=False)
    state = module(state, h, last=True)
    (state.loops_BL + state.remainder_BL).sum().backward()
    assert module.bias.grad < 0, "descending the ponder cost must raise p"
