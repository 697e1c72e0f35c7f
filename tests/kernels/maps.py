"""Inputs for tests of kernels: scores, choices, and maps between tokens and rows of the fused buffer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.get_fused_mapping import get_fused_mapping_torch

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = st.sampled_from([1, 3, 16, 100, 2049])
"""Widths of rows: less than a tile, a multiple of 16 bytes and not, more than a tile."""


class Maps(NamedTuple):
    token_to_pos: Tensor
    pos_to_expert: Tensor
    weights: Tensor
    """Draw weights (N, K), float32."""


@st.composite
def maps(draw, max_tokens: int = 9) -> Maps:
    """Draw maps: any N from 0, K from 1 to 8, odd E, masked entries, empty experts, padding, a tail."""
    N, K, E = draw(st.integers(0, max_tokens)), draw(st.integers(1, 8)), draw(st.integers(1, 5))
    choice = st.integers(-1, draw(st.integers(0, E - 1)))
    chosen = draw(st.lists(st.lists(choice, min_size=K, max_size=K), min_size=N, max_size=N))
    alignment, tail = draw(st.sampled_from([1, 4, 16])), draw(st.integers(0, 40))
    token_to_pos, pos_to_expert = [[-1] * K for _ in range(N)], []
    for e in range(E):
        for n, k in [(n, k) for n in range(N) for k in range(K) if chosen[n][k] == e]:
            token_to_pos[n][k] = len(pos_to_expert)
            pos_to_expert.append(e)
        pos_to_expert += [-1] * (-len(pos_to_expert) % alignment)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return Maps(
        torch.tensor(token_to_pos, dtype=dtype).view(N, K),
        torch.tensor(pos_to_expert + [-1] * tail, dtype=dtype),
        torch.rand(N, K, generator=generator),
    )


def maps_of(chosen_NK: Tensor, experts: int, alignment: int = 16) -> Maps:
    """Return the maps of the choices at their static size, by the twin of the mapping."""
    mapping = get_fused_mapping_torch(chosen_NK, experts, alignment)
    weights_NK = torch.rand(chosen_NK.shape, generator=torch.Generator().manual_seed(0))
    return Maps(mapping.token_to_pos_NK, mapping.pos_to_expert_P, weights_NK)


SOME = (
    # An odd number of tokens, some masked; all tokens to one expert; no tokens.
    (
        maps_of(torch.randint(-1, 5, (19, 3), generator=torch.Generator().manual_seed(0)), 5),
        2049,
        torch.bfloat16,
    ),
    (maps_of(torch.full((17, 1), 2), 7), 100, torch.float32),
    (maps_of(torch.zeros(0, 2, dtype=torch.int64), 3), 16, torch.bfloat16),
)
"""Maps, width and dtype of rows."""


@st.composite
def scores(draw) -> Tensor:
    """Draw scores (N, E), float32, with many ties, some NaN and infinities, for any N from 0 and any E."""
    N, E = draw(st.integers(0, 9)), draw(st.integers(1, 19))
    value = st.one_of(st.integers(-3, 3), st.floats(width=32))
    return torch.tensor(draw(st.lists(value, min_size=N * E, max_size=N * E)), dtype=torch.float32).view(N, E)


@st.composite
def choices(draw) -> tuple[Tensor, int, int]:
    """Draw choices (N, K), a number of experts and an alignment; in half of the cases few experts are
    used."""
    N, K, E = draw(st.integers(0, 20)), draw(st.integers(1, 8)), draw(st.integers(1, 11))
    choice = st.integers(draw(st.sampled_from([-1, 0])), draw(st.integers(0, E - 1)))
    chosen = draw(st.lists(choice, min_size=N * K, max_size=N * K))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(chosen, dtype=dtype).view(N, K), E, draw(st.sampled_from([1, 3, 16, 128]))
