"""Compare the inspector's counts with counts by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spider.config import merged
from spider.evaluation.bpb import score, windows
from spider.model import build_model
from spider.model.reading import Scoring
from spider.model.spider.config import SpiderConfig
from spider.model.spider.model import Spider, SpiderInspector
from spider.tokens import BYTES, IGNORED
from tests.unit.model.small import SMALL

TEXT = "The quick brown fox jumps over the lazy dog, größer than before; and then it sleeps.\n" * 4
TOKENS = np.concatenate([BYTES.encode(TEXT), BYTES.encode("A second document.")])
WINDOWS = Scoring(seq_len=48, overlap=0.25, batch=3)


def busy_model(**changes) -> Spider:
    """Return a small model without a neutral part: every parameter has noise."""
    torch.manual_seed(3)
    model = build_model(SpiderConfig(**merged(SMALL, changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def observed(model: Spider, **changes) -> SpiderInspector:
    inspector = model.inspector()
    score(model, TOKENS, replace(WINDOWS, **changes), observe=inspector.observe)
    return inspector


def counts_of(inspector: SpiderInspector) -> dict:
    """Return the values of the three figures; None for a note."""
    lengths, loops, experts = inspector.figures()
    return {
        "patch_bytes": lengths.get("counts"),
        "halting_loops": loops.get("counts"),
        "expert_share": experts.get("values"),
    }


def test_a_patch_counts_only_in_the_window_that_scores_its_closing_byte():
    # Row 0 has 8 positions and all are scored. Patches close at 1 and 4, and two bytes stay open.
    # Row 1 scores its last 5 positions. A patch closes at 2, in the context. Others close at 3 and 7.
    # The last slot is a spare one.
    patches = SimpleNamespace(
        close_M=torch.tensor([0, 1, 4, 8, 10, 11, 15, 15]),
        filled_M=torch.tensor([False, True, True, False, True, True, True, False]),
        first_S=torch.tensor([0, 0, 2, 5, 8, 11, 12, 16, 16]),
    )
    trace = SimpleNamespace(
        patches=patches,
        loops_M=torch.tensor([9.0, 1, 2, 9, 1, 2, 3, 9]),
        counts_NRE=torch.tensor([[[3, 1], [2, 2]]]),
    )
    scored_BT = np.array([[True] * 8, [False] * 3 + [True] * 5])
    inspector = busy_model().inspector()
    inspector.observe(trace, scored_BT)
    assert counts_of(inspector) == {
        "patch_bytes": [0, 1, 1, 1, 1],
        "halting_loops": [0, 1, 2, 1],
        "expert_share": [[1.5, 0.5], [1.0, 1.0]],
    }
    inspector.observe(trace, np.zeros_like(scored_BT))
    assert counts_of(inspector)["patch_bytes"] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["learned", "whitespace"])
def test_the_counts_equal_those_of_a_loop_over_every_window(kind):
    model = busy_model(boundary={"kind": kind}, recurrence={"loops": 3})
    lengths = Counter()
    loops = Counter()
    load = 0
    for _, inputs_BT, labels_BT in windows(TOKENS, WINDOWS):
        with torch.inference_mode():
            trace = model(torch.from_numpy(inputs_BT), trace=True).trace
        load = load + trace.counts_NRE.numpy()
        begin_B = trace.patches.layout.begin_B.tolist()
        for row, row_T in enumerate(trace.patches.row_BT.tolist()):
            began, before = 0, begin_B[row]
            for t, slot in enumerate(row_T):
                if slot == before:
                    continue
                if labels_BT[row, t] != IGNORED:
                    lengths[t + 1 - began] += 1
                    loops[int(trace.loops_M[slot])] += 1
                began, before = t + 1, slot
    found = counts_of(observed(model))
    assert sum(lengths.values()) > 20 and len(lengths) > 1
    assert {n: c for n, c in enumerate(found["patch_bytes"]) if c} == lengths
    assert {n: c for n, c in enumerate(found["halting_loops"]) if c} == loops
    share_NRE = load / load.sum(-1, keepdims=True) * load.shape[-1]
    np.testing.assert_allclose(np.reshape(found["expert_share"], share_NRE.shape), share_NRE)


def test_the_inspector_changes_no_score_and_needs_no_further_pass():
    model = busy_model()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    plain = score(model, TOKENS, WINDOWS)
    once = len(calls)
    assert score(model, TOKENS, WINDOWS, observe=model.inspector().observe).nats == plain.nats
    assert len(calls) == 2 * once


def test_a_text_without_overlap_counts_every_byte_that_a_patch_holds():
    model = busy_model(boundary={"kind": "whitespace"})
    inspector = model.inspector()
    reading = Scoring(seq_len=len(TOKENS), overlap=0.0, carry_over=len(TOKENS))
    score(model, TOKENS, reading, observe=inspector.observe)
    closes = [t for t, i in enumerate(TOKENS[:-1]) if i in (*b" \n", *range(256, 272))]
    assert sum(n * count for n, count in inspector.lengths.items()) == closes[-1] + 1


def test_parts_that_are_switched_off_have_notes_instead_of_counts():
    model = busy_model(boundary={"kind": "none"}, moe=None)
    found = counts_of(observed(model))
    assert found["patch_bytes"] is None and found["expert_share"] is None
    assert sum(found["halting_loops"]) == len(TOKENS) - 1
    assert [one["kind"] for one in model.inspector().figures()] == ["note", "histogram", "note"]


def test_each_depth_has_its_own_score():
    model = busy_model()
    curve = [score(model, TOKENS, replace(WINDOWS, n_loops=n)).bpb for n in (1, 2, 3, 4)]
    assert curve[1] == score(model, TOKENS, WINDOWS).bpb  # the model is configured with two
    assert len(set(curve)) == 4
