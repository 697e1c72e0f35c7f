"""The gradient of the whole model, for each of its parameters, against finite differences in float64.

The text decides the cuts. Halting and the choice of experts are steps: a case too near to one fails.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from spider.model.layers import capped, cross_entropy, rms_norm
from spider.model.spider.chunking import Chunker
from spider.model.spider.config import BoundaryConfig
from spider.tokens import IGNORED


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


@pytest.mark.parametrize(
    "function",
    [rms_norm, partial(capped, cap=2.0), lambda x: cross_entropy(x, torch.tensor([[3, IGNORED], [0, 6]]))],
    ids=["rms_norm", "capped", "cross_entropy"],
)
def test_a_gradient_by_hand_is_that_of_the_function_which_evaluation_computes(function):
    x = torch.randn(2, 2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)
    trained = function(x)
    with torch.no_grad():
        torch.testing.assert_close(trained, function(x), rtol=0, atol=0)
