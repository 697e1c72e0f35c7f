"""Compare the mapping with plain Python and its kernels with their twin; test its invariants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kernels.get_fused_mapping import (
    BLOCK,
    _place,
    count_blocks,
    fused_mapping,
    get_fused_mapping,
    get_fused_mapping_torch,
    static_rows,
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


@settings(max_examples=150)
@given(choices())
def test_mapping_is_what_lists_give(case):
    got = get_fused_mapping(*case)
    rows = int(got.end_E[-1])
    used = [*(field[:rows] for field in got[:3]), *got[3:]]
    assert [field.flatten().tolist() for field in used] == by_hand(*case)
    assert all((field[rows:] == -1).all() for field in got[:3])
    assert all(field.dtype == torch.int32 for field in got)


@settings(max_examples=150)
@given(choices())
def test_invariants(case):
    chosen_NK, E, alignment = case
    m, K = get_fused_mapping(*case), chosen_NK.shape[1]
    real_P, real_NK = m.pos_to_expert_P >= 0, chosen_NK >= 0
    assert len(real_P) == static_rows(chosen_NK.numel(), E, alignment) and len(real_P) % alignment == 0

    # The maps are inverse: every choice has one row, and that row maps back to it.
    places = m.token_to_pos_NK[real_NK].long()
    assert torch.equal(places.sort().values, real_P.nonzero().flatten())
    assert torch.equal(m.pos_to_entry_P[places], real_NK.flatten().nonzero().flatten().int())
    assert torch.equal(m.pos_to_expert_P[places], chosen_NK[real_NK].int())
    assert torch.equal(m.pos_to_token_P[real_P], m.pos_to_entry_P[real_P] // K)
    assert (m.token_to_pos_NK[~real_NK] == -1).all()
    for padding in (m.pos_to_token_P[~real_P], m.pos_to_entry_P[~real_P]):
        assert (padding == -1).all()

    # Segments: aligned, back to back, each filled from its start in the order of the entries.
    assert (m.start_E % alignment == 0).all() and m.start_E[0] == 0
    assert torch.equal(m.start_E[1:], m.end_E[:-1]) and m.count_E.sum() == real_NK.sum()
    for expert, (start, end, count) in enumerate(zip(m.start_E, m.end_E, m.count_E, strict=True)):
        assert 0 <= end - start - count < alignment
        assert (m.pos_to_expert_P[start : start + count] == expert).all()
        assert (m.pos_to_entry_P[start : start + count].diff() > 0).all()
        assert not real_P[start + count : end].any()


def large(N: int, K: int, E: int) -> Tensor:
    """Return more than a block of entries, some masked, some out of range and therefore masked as well."""
    return torch.randint(-2, E + 1, (N, K), generator=torch.Generator().manual_seed(0))


EDGES = [
    (large(BLOCK + 3, 2, 5), 5, 16),
    (large(180, 6, 300), 300, 8),
    (large(BLOCK, 2, 2), 2, 16),
    (large(BLOCK + 3, 1, 1), 1, 4),
    (torch.zeros(BLOCK, 2, dtype=torch.int64), 3, 1),
    (torch.full((5, 2), -1), 3, 16),
    (torch.zeros(0, 2, dtype=torch.int32), 3, 16),
]
MAPPING = Pair(get_fused_mapping, get_fused_mapping_torch, choices(), EDGES)


def test_torch_library_finds_nothing_wrong():
    torch.library.opcheck(fused_mapping, (torch.tensor([[0, 2], [2, -1]]), 3, 4))


@pytest.mark.parametrize("shape, experts, alignment", [((3,), 2, 1), ((3, 1), 0, 1), ((3, 1), 2, 0)])
def test_other_arguments_are_refused(shape, experts, alignment):
    with pytest.raises(ValueError, match="get_fused_mapping"):
        get_fused_mapping(torch.zeros(shape, dtype=torch.int64), experts, alignment)


@pytest.mark.parametrize("E, K", [(32, 2), (256, 8)])
def test_compiles(compiles, E, K):
    sizes = dict(WIDE_E=E, BLOCK=BLOCK, STEP=4096 // E)
    compiles(count_blocks, chosen="*i64", counts="*i32", entries="i32", E="i32", **sizes)
    names = "counts pos_to_expert pos_to_token pos_to_entry token_to_pos start_of end_of count_of"
    matches = {"chosen": "*i64"} | {name: "*i32" for name in names.split()}
    numbers = dict(entries="i32", P="i32", E="i32", blocks="i32")
    compiles(_place, **matches, **numbers, K=K, ALIGNMENT=16, **sizes)
    matches |= dict.fromkeys(("pos_to_token", "pos_to_entry", "start_of"))  # as `route` does
    compiles(_place, **matches, **numbers, K=K, ALIGNMENT=16, **sizes)
