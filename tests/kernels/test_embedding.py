"""Test the lookup as a custom op: torch's numbers, and a gradient that a compiler does not decompose."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import embedding as module
from kernels.embedding import PIECE, embedding, embedding_sum, sort_once
from tests.kernels.twins import Pair


def gradient(lookup, ids_N: Tensor, table_VD: Tensor, dy_ND: Tensor) -> Tensor:
    table_VD = table_VD.detach().requires_grad_()
    return torch.autograd.grad(lookup(ids_N, table_VD), table_VD, dy_ND)[0]


def lookups(V: int, D: int, N: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids of which half are the same, as spaces are in a text."""
    generator = torch.Generator().manual_seed(seed)
    ids_N = torch.randint(0, V, (N,), generator=generator) * torch.randint(0, 2, (N,), generator=generator)
    return ids_N, torch.randn(V, D, generator=generator), torch.randn(N, D, generator=generator)


CASES = st.builds(lookups, st.integers(1, 20), st.integers(1, 40), st.integers(0, 99), st.integers(0, 99))
#: tests/gpu also checks for the same bits twice. Beyond 3072 ids torch uses another algorithm on a GPU.
EMBEDDING = Pair(
    partial(gradient, module._embedding),
    partial(gradient, F.embedding),
    CASES,
    [lookups(272, 200, 5000), lookups(20_011, 64, 4000), lookups(5, 3, 1)],
    rtol=1e-4,
    atol=1e-4,
)


def looked_up_once(ids_N: Tensor, table_VD: Tensor) -> Tensor:
    return embedding(module._sort(ids_N, len(table_VD)), table_VD)


SORTED = EMBEDDING._replace(
    kernel=partial(gradient, looked_up_once),
    examples=[
        *(lookups(V, D, N) for V, D, N in [(40, 200, 300), (1, 1100, 2 * PIECE + 1)]),
        (lookups(9, 30, 50)[0].new_tensor([8, 8, 0]), *(x.bfloat16() for x in lookups(9, 30, 3)[1:])),
    ],
)


@given(st.integers(1, 9), st.lists(st.integers(0, 8), max_size=120))
def test_pieces_of_sorted_ids_are_short_and_of_one_id_each(V, drawn):
    ids_N = torch.tensor(drawn, dtype=torch.int64) % V
    _, order_N, piece_P1, first_V1 = module._sort(ids_N, V)
    assert piece_P1[0] == 0 and piece_P1[-1] == len(drawn) and (piece_P1.diff() <= PIECE).all()
    for v in range(V):
        pieces = piece_P1[first_V1[v] : first_V1[v + 1] + 1]
        found = order_N[pieces[0] : pieces[-1]].tolist() if len(pieces) > 1 else []
        assert found == (ids_N == v).nonzero().flatten().tolist()  # in rising order


@pytest.fixture
def on_gpu(monkeypatch):
    """Select the path of a GPU."""
    monkeypatch.setattr(module, "_is_on_gpu", lambda table: True)


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 40), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_gradient_are_those_of_torch(on_gpu, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    table_VD = torch.randn(11, 5, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(0, 11, shape, generator=generator)
    dy = torch.randn(*shape, 5, generator=generator).to(dtype)
    results = []
    for lookup in (embedding, F.embedding):
        y = lookup(ids, table_VD)
        results.append([y.detach(), *torch.autograd.grad(y, table_VD, dy)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want) and got.dtype == dtype


def test_ids_are_sorted_only_where_a_gpu_needs_them_for_a_gradient(on_gpu, monkeypatch):
    ids, table_VD = torch.tensor([3, 1]), torch.randn(4, 3)
    assert isinstance(sort_once(ids, table_VD), module.Sorted)
    with torch.no_grad():
        assert sort_once(ids, table_VD) is ids
    monkeypatch.setattr(module, "_is_on_gpu", lambda table: False)
    assert sort_once(ids, table_VD) is ids


@pytest.mark.parametrize(("orders", "D"), [(1, 5), (5, 192), (17, 128), (8, 40)])
def test_sums_of_rows_have_the_bits_of_rows_that_are_added(orders, D):
    generator = torch.Generator().manual_seed(0)
    table_VD = torch.randn(50, D, generator=generator)
    ids = torch.randint(0, 50, (2, 9, orders), generator=generator)
    assert torch.equal(embedding_sum(ids, table_VD), embedding(ids, table_VD).sum(-2))
