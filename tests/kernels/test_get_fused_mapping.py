"""Compare the mapping with plain Python and its kernels with their twin; test its invariants."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from torch import Tensor

from kernels.get_fused_mapping import (
    BLOCK,
    get_fused_mapping,
    get_fused_mapping_torch,
)
from tests.kernels.maps import choices
from tests.kernels.twins import Pair


def by_hand(chosen_NK: Tensor, E: int, alignment: int) -> list[list[int]]:
    """Return the fields of a mapping without rows after the last segment, by lists."""
    N, K = chosen_NK.shape
    entries, start, end, count = [], [], [], []
    token_to_pos = [-1] * (N * K)
    for expert in range(E):
        mine = [i for i, e in enumerate(chosen_NK.flatten().tolist()) if e == expert]
        start.append(len(entries))
        for i in mine:
            token_to_pos[i] = len(entries)
            entries.append((expert, i // K, i))
        entries += [(-1, -1, -1)] * (-len(mine) % alignment)
        end.append(len(entries))
        count.append(len(mine))
    return [[entry[i] for entry in entries] for i in range(3)] + [token_to_pos, start, end, count]


@settings(max_examples=60)
@given(choices())
def test_mapping_is_what_lists_give(case):
    got = get_fused_mapping(*case)
    rows = int(got.end_E[-1])
    used = [*(field[:rows] for field in got[:3]), *got[3:]]
    assert [field.flatten().tolist() for field in used] == by_hand(*case)
    assert all((field[rows:] == -1).all() for field in got[:3])
    assert all(field.dtype == torch.int32 for field in got)


def large(N: int, K: int, E: int) -> Tensor:
    """Return more than a block of entries, some masked, some out of range and therefore masked as well."""
    return torch.randint(-2, E + 1, (N, K), generator=torch.Generator().manual_seed(0))


EDGES = [
    (large(BLOCK + 3, 2, 5), 5, 16),
    (large(180, 6, 300), 300, 8),
    (large(BLOCK + 3, 1, 1), 1, 4),
    (torch.full((5, 2), -1), 3, 16),
    (torch.zeros(0, 2, dtype=torch.int32), 3, 16),
]
MAPPING = Pair(get_fused_mapping, get_fused_mapping_torch, choices(), EDGES)
