"""Maps between tokens and places of the fused buffer, drawn at random and made in plain Python."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Maps(NamedTuple):
    token_to_pos: Tensor
    pos_to_expert: Tensor
    weights: Tensor
    """(N, K) float32."""


@st.composite
def maps(draw, max_tokens: int = 9) -> Maps:
    """Any N from 0, K from 1 to 8, E no power of two, masked entries, empty experts, padding, a tail."""
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


@st.composite
def scores(draw) -> Tensor:
    """(N, E) float32 with many ties, some NaN and infinities; N from 0, E any number."""
    N, E = draw(st.integers(0, 9)), draw(st.integers(1, 19))
    value = st.one_of(st.integers(-3, 3), st.floats(width=32))
    return torch.tensor(draw(st.lists(value, min_size=N * E, max_size=N * E)), dtype=torch.float32).view(N, E)


@st.composite
def choices(draw) -> tuple[Tensor, int, int]:
    """Choices (N, K), the number of experts, an alignment. Half of the time all tokens take few experts."""
    N, K, E = draw(st.integers(0, 20)), draw(st.integers(1, 8)), draw(st.integers(1, 11))
    choice = st.integers(draw(st.sampled_from([-1, 0])), draw(st.integers(0, E - 1)))
    chosen = draw(st.lists(choice, min_size=N * K, max_size=N * K))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(chosen, dtype=dtype).view(N, K), E, draw(st.sampled_from([1, 3, 16, 128]))
