"""Compare the inspector's counts with counts by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from spider.config import merged
from spider.evaluation.bpb import score, windows
from spider.model import build_model
from spider.model.reading import Scoring
from spider.model.spider.config import SpiderConfig
from spider.model.spider.model import Spider
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
    inspector = model.inspector()
    score(model, TOKENS, WINDOWS, observe=inspector.observe)
    of_lengths, of_loops, of_experts = inspector.figures()
    assert sum(lengths.values()) > 20 and len(lengths) > 1
    assert {n: c for n, c in enumerate(of_lengths["counts"]) if c} == lengths
    assert {n: c for n, c in enumerate(of_loops["counts"]) if c} == loops
    share_NRE = load / load.sum(-1, keepdims=True) * load.shape[-1]
    np.testing.assert_allclose(np.reshape(of_experts["values"], share_NRE.shape), share_NRE)
