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
