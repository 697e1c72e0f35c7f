"""Compare sums of segments with plain Python and the kernels with their twins; test that the ops are
adjoint."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.segment_sum import (
    ROWS,
    segment_expand,
    segment_expand_torch,
    segment_sum,
    segment_sum_torch,
)
from tests.kernels.maps import DTYPES, WIDTHS
from tests.kernels.twins import Pair


class Segments(NamedTuple):
    segment: Tensor
    edge: Tensor


def segments(edge: list[int], N: int) -> Segments:
    """Return the arguments for N rows cut at these edges."""
    own = [
        next((m for m, (a, b) in enumerate(itertools.pairwise(edge)) if a <= n < b), len(edge) - 1)
        for n in range(N)
    ]
    return Segments(torch.tensor(own, dtype=torch.int64), torch.tensor(edge))


@st.composite
def cuts(draw) -> Segments:
    """Draw empty segments, no segments, and rows before the first or after the last."""
    edge = sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=9)))
    return segments(edge, edge[-1] + draw(st.integers(0, 3)))


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)


def summed(s: Segments, width: int, dtype: torch.dtype) -> tuple:
    return rows(len(s.segment), width, dtype), *s


def expanded(s: Segments, width: int, dtype: torch.dtype) -> tuple:
    return rows(len(s.edge) - 1, width, dtype), *s


def with_special_values() -> Tensor:
    x = rows(9, 20)
    x[0, 1], x[3, 2], x[4, 3], x[8, 4] = math.nan, math.inf, -math.inf, math.nan
    return x


LONG = segments([0, 0, 3 * ROWS + 1, 3 * ROWS + 1, 40], 41)
NINE = segments([0, 2, 3, 8], 9)
EDGES = [
    (LONG, 2049, torch.bfloat16),
    (segments([0], 0), 16, torch.float32),
    (segments([0], 5), 3, torch.bfloat16),
]
SUM = Pair(
    segment_sum,
    segment_sum_torch,
    st.builds(summed, cuts(), WIDTHS, DTYPES),
    [*(summed(*edge) for edge in EDGES), (with_special_values(), *NINE)],
    rtol=1e-5,
    atol=1e-5,
)
EXPAND = Pair(
    segment_expand,
    segment_expand_torch,
    st.builds(expanded, cuts(), WIDTHS, DTYPES),
    [*(expanded(*edge) for edge in EDGES), (with_special_values()[:3], *NINE)],
)


@settings(max_examples=25)
@given(cuts(), st.sampled_from([torch.float32, torch.float64]))
def test_each_segment_is_the_sum_of_its_rows_and_gives_its_own_back(made, dtype):
    x, edge = rows(len(made.segment), 3, dtype), made.edge.tolist()
    sums = segment_sum(x, *made)
    for m, (first, end) in enumerate(itertools.pairwise(edge)):
        torch.testing.assert_close(sums[m], x[first:end].sum(0))
        assert torch.equal(segment_expand(sums, *made)[first:end], sums[m].expand(end - first, -1))
    outside = made.segment == len(edge) - 1
    assert (segment_expand(sums, *made)[outside] == 0).all()


@pytest.mark.parametrize("made", [LONG, NINE, segments([0], 2)])
def test_gradients_of_ops_and_twins(made):
    N, M = len(made.segment), len(made.edge) - 1
    for op in (segment_sum, segment_sum_torch):
        x = rows(N, 3, torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, op=op: op(x, *made), x)
    for op in (segment_expand, segment_expand_torch):
        z = rows(M, 3, torch.float64).requires_grad_()
        assert not M or torch.autograd.gradcheck(lambda z, op=op: op(z, *made), z)


def test_a_sum_of_narrow_rows_is_rounded_once():
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)
    made = segments([0, 1000], 1000)
    assert segment_sum(ones, *made) == segment_sum_torch(ones, *made) == 1000
