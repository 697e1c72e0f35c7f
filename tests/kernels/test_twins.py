"""Compare every kernel with its twin in Triton's interpreter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.twins import pairs, run_examples

PAIRS = pairs()


@pytest.mark.interpreter
@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=4)
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
