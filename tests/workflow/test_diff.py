"""`spider diff` names alone what differs between the runs of five pairs of the benchmark."""

from __future__ import annotations

from importlib import import_module

import pytest

from .conftest import ROOT

#: Pairs whose runs share one invocation of the workflow, and one with a folder of its own.
CHEAP = ("seed", "learning rate", "width", "overlap", "a document edited")


@pytest.fixture
def trust_diff(monkeypatch):
    """Return the benchmark as a module. Less text is scored, because compressors read it too."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = import_module("trust_diff")
    monkeypatch.setitem(module.BASE["runs"]["base"]["evaluation"], "max_bytes", 300)
    return module


def test_pairs_of_the_benchmark_are_named_alone(trust_diff, tmp_path):
    pairs = [pair for pair in trust_diff.PAIRS if pair.name in CHEAP]
    assert len(pairs) == len(CHEAP)
    trust_diff.make(tmp_path, pairs)
    for i, pair in enumerate(pairs):
        assert trust_diff.causes(tmp_path, pairs, i)[0] == [pair.cause]
