"""Compare the load of experts with counts in plain Python, and its kernels with their twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kernels.aux_fi import aux_fi, aux_fi_torch
from kernels.get_fused_mapping import BLOCK
from tests.kernels.maps import choices
from tests.kernels.twins import Pair


@settings(max_examples=100)
@given(choices())
def test_counts_are_scaled(case):
    chosen_NK, E, _ = case
    N, K = chosen_NK.shape
    chosen = chosen_NK.flatten().tolist()
    want = [chosen.count(e) * E / (N * K) if N else 0.0 for e in range(E)]
    assert aux_fi(chosen_NK, E, K).tolist() == pytest.approx(want)


LOAD = Pair(
    aux_fi,
    aux_fi_torch,
    choices().map(lambda case: (case[0], case[1], case[0].shape[1])),
    [
        (torch.arange(2 * BLOCK + 2).view(-1, 2) % 7, 7, 2),
        (torch.arange(2 * BLOCK).view(-1, 2) % 3 % 2, 2, 2),
        (torch.zeros(0, 2, dtype=torch.int64), 3, 2),
    ],
    rtol=1e-6,
)


def test_even_load_is_one():
    assert aux_fi(torch.arange(12).view(6, 2) % 4, 4, 2).tolist() == [1.0] * 4
