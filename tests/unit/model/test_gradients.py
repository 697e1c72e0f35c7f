"""The gradient of the whole model, for each of its parameters, against finite differences in float64.

The text decides the cuts. Halting and the choice of experts are steps: a case too near to one fails.
"""

from __future__ import annotations

import pytest
import torch

from spider.model.spider.chunking import Chunker
from spider.model.spider.config import BoundaryConfig


@pytest.mark.parametrize("seed", [0, 1])
def test_the_whole_model_where_the_text_decides_the_cuts(make, tokens, seed):
    model = make(seed=seed, boundary={"kind": "whitespace"}, engram={"layers": [0, 1], "byte_orders": [2]})
    model = model.double().train()
    assert torch.autograd.gradcheck(
        lambda *_: model(tokens, tokens.roll(-1, 1)).loss, tuple(model.parameters()), fast_mode=True
    )


@pytest.mark.parametrize(("share", "sign"), [(0.1, -1), (0.25, 0), (0.8, 1)])
def test_boundary_loss(share, sign):
    part = Chunker(6, BoundaryConfig(rate=0.3))
    b = (share + 0.01 * torch.rand(2, 7, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda b: part._rate_loss(b)[0], (b,))
    (slope,) = torch.autograd.grad(part._rate_loss(b)[0], b)
    assert (slope.sign() == sign).all()
