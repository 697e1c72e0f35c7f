"""Compare the inspector's counts with counts by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

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
