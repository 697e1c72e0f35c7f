"""`spider diff` names alone what differs between the runs of two pairs of the benchmark."""

from __future__ import annotations

from benchmarks import diff

#: A pair whose runs share one invocation of the workflow, and one with a folder of its own.
CHEAP = ("learning rate", "a document edited")


def test_pairs_of_the_benchmark_are_named_alone(tmp_path, monkeypatch):
    # Less text is scored, because compressors read it too.
    monkeypatch.setitem(diff.BASE["runs"]["base"]["evaluation"], "max_bytes", 300)
    pairs = [pair for pair in diff.PAIRS if pair.name in CHEAP]
    assert len(pairs) == len(CHEAP)
    diff.make(tmp_path, pairs)
    for i, pair in enumerate(pairs):
        assert diff.causes(tmp_path, pairs, i)[0] == [pair.cause]
