"""Compare every kernel with its twin in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.twins import Pair, pairs, poisoned, run_examples

PAIRS = pairs()


@pytest.mark.interpreter
@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=12)
@given(data=st.data())
def test_kernel_gives_what_its_twin_gives(name, data):
    PAIRS[name].check(data.draw(PAIRS[name].cases))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", PAIRS)
def test_kernel_gives_what_its_twin_gives_at_the_edges(name):
    for arguments in PAIRS[name].examples:
        PAIRS[name].check(arguments)


def test_examples_run_by_themselves():
    assert run_examples("cpu") == sum(len(pair.examples) for pair in PAIRS.values()) > len(PAIRS)


def forgets_a_row(x):
    out = x.new_empty(x.shape)
    out[:-1] = x[:-1]
    return out


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (forgets_a_row, "result 0: .*not close"),
        (lambda x: x + 1e-3, "result 0: .*not close"),
        (lambda x: x.double(), "float64"),
        (lambda x: x + 1e-6 * torch.rand(3), "differs from one call"),
    ],
)
def test_a_wrong_kernel_is_found(kernel, complaint):
    x = torch.ones(3)
    Pair(torch.clone, torch.clone, st.nothing()).check([x])
    with pytest.raises(AssertionError, match=f"(?s){complaint}"):
        Pair(kernel, torch.clone, st.nothing(), rtol=1e-5).check([x])
    with poisoned():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
