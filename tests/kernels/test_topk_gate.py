"""Compare the gate with sorting in plain Python, and its kernel with its twin."""

from __future__ import annotations

import math

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.topk_gate import topk_gate, topk_gate_torch
from tests.kernels.maps import scores
from tests.kernels.twins import Pair

SPECIAL = torch.tensor(
    [[0.0, -0.0, math.nan], [math.inf, math.nan, -math.inf], [-math.inf] * 3, [math.nan] * 3]
)


def by_hand(scores_NE: Tensor, k: int) -> Tensor:
    def best(row: list[float]) -> list[int]:
        return sorted(
            range(len(row)), key=lambda e: (not math.isnan(row[e]), -row[e] if row[e] == row[e] else 0, e)
        )

    return torch.tensor([best(row)[:k] for row in scores_NE.tolist()], dtype=torch.int64).view(-1, k)


@settings(max_examples=100)
@given(scores(), st.integers(1, 8))
@example(SPECIAL, 3)
def test_largest_first_and_ties_to_the_lower_index(scores_NE, k):
    k = min(k, scores_NE.shape[1])
    assert torch.equal(topk_gate(scores_NE, k), by_hand(scores_NE, k))


GATE = Pair(
    topk_gate,
    topk_gate_torch,
    st.builds(lambda scores_NE, k: (scores_NE, min(k, scores_NE.shape[1])), scores(), st.integers(1, 8)),
    [(SPECIAL, 3), (torch.randn(65, 32), 2), (torch.randn(3, 3000), 8), (torch.zeros(0, 5), 2)],
)
