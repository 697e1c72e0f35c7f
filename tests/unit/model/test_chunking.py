"""Compare patches with a Python loop over bytes; test capacity, and the rate and gradient of boundaries."""

from __future__ import annotations

import pytest
import torch
from small import GivenLogits

from spider.model.spider.chunking import Chunker
from spider.model.spider.config import BoundaryConfig
from spider.tokens import BYTES

D = 6


def chunker(**changes: object) -> Chunker:
    torch.manual_seed(0)
    module = Chunker(D, BoundaryConfig.model_validate({"hidden": 8} | changes))
    for part in module.modules():
        if hasattr(part, "init_weights"):
            part.init_weights()
    return module.eval()


def text(string: str) -> torch.Tensor:
    return torch.tensor([list(string.encode())])


@pytest.mark.parametrize("capacity", [1.0, 0.2])
def test_down_and_up_equal_a_loop_over_bytes(capacity):
    module = chunker(kind="whitespace", capacity=capacity)
    tokens = text("one two  three, four five six and a tail")
    h = torch.randn(1, tokens.shape[1], D)
    patches, metrics, _ = module.patch_bounds(tokens, h)
    e = module.down(h, patches)
    z = torch.randn_like(e)
    up = module.up(z, patches)

    slots, members, reads = module.slots(tokens.shape[1]), [], []
    closed: list[torch.Tensor] = []
    for t in range(tokens.shape[1]):
        members.append(h[0, t])
        closes = chr(tokens[0, t]) == " " and (t == 0 or chr(tokens[0, t - 1]) != " ")
        if closes and len(closed) < slots - 1:
            closed.append(torch.stack(members).mean(0))
            members = []
        reads.append(len(closed))
    for j, mean in enumerate([module.null, *closed]):
        torch.testing.assert_close(e[j], module.down_norm(mean))
    assert torch.equal(up[0], module.up_norm(z)[reads])
    assert patches.filled_M.sum() == len(closed) and patches.closes_BT.sum() == len(closed)
    boundaries = 8
    assert metrics["patch_overflow"].item() == pytest.approx((boundaries - len(closed)) / tokens.shape[1])
    assert metrics["patch_fill"] == 1 and len(e) == 1 + len(closed)  # one window: no row is spare


def test_whitespace_closes_at_specials_too():
    tokens = torch.tensor([[BYTES.bos, 97, 32, 32, 98, BYTES.eos, BYTES.bos, 99]])
    patches, _, _ = chunker(kind="whitespace", capacity=1.0).patch_bounds(tokens, torch.zeros(1, 8, D))
    assert patches.row_BT.tolist() == [[1, 1, 2, 2, 2, 3, 3, 3]]


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_new_predictor_cuts_at_about_the_wanted_rate(rate):
    rates = {True: [], False: []}
    for seed in range(6):
        torch.manual_seed(seed)
        module = Chunker(64, BoundaryConfig(hidden=64, rate=rate, capacity=1.0))
        for part in module.modules():
            if hasattr(part, "init_weights"):
                part.init_weights()
        for training, found in rates.items():
            tokens, h = torch.zeros(8, 256).long(), torch.randn(8, 256, 64)
            _, metrics, _ = module.train(training).patch_bounds(tokens, h)
            found.append(metrics["boundary_rate"].item())
    for seen in rates.values():
        assert sum(seen) / len(seen) == pytest.approx(rate, abs=0.1)


def test_a_predictor_may_start_at_white_space_and_learn_from_there():
    tokens = text("one two  three,\n\tfour \r\n five")
    tokens[0, 12], tokens[0, 13] = BYTES.eos, BYTES.bos
    h = torch.randn(1, tokens.shape[1], D)
    learned, fixed = chunker(start="whitespace", capacity=1.0), chunker(kind="whitespace", capacity=1.0)
    assert torch.equal(learned.patch_bounds(tokens, h)[0].row_BT, fixed.patch_bounds(tokens, h)[0].row_BT)
    predictor = learned.train().boundary_predictor
    predictor(h, tokens, torch.zeros_like(tokens, dtype=torch.bool)).square().sum().backward()
    for name, parameter in predictor.named_parameters():
        if "hidden" not in name:  # it feeds an output map that starts at zero
            assert parameter.grad.abs().sum() > 0, name


def test_a_boundary_has_the_gradient_of_what_cutting_changes_for_the_bytes_that_read_it():
    """The gradient is that difference times the slope of the sigmoid, if the loss is linear in what is
    read."""
    module = chunker(capacity=1.0).double()
    module.boundary_predictor = given = GivenLogits()
    h = torch.randn(1, 12, D, dtype=torch.float64)
    weight = torch.randn(1, 12, D, dtype=torch.float64)
    logits = torch.tensor([[-1.0, 2.0, -1.0, -3.0, 0.5, -1.0, -2.0, -2.0, 3.0, 0.5, -1.0, -1.0]]).double()

    def loss(logits_BT: torch.Tensor, bytes_read: slice) -> torch.Tensor:
        given.logits_BT = logits_BT
        patches, _, _ = module.patch_bounds(text("abcdefghijkl"), h)
        return (module.up(module.down(h, patches), patches) * weight)[:, bytes_read].sum()

    cuts = (logits[0] > 0).nonzero().flatten().tolist()
    for cut, following in zip(cuts, [*cuts[1:], 12], strict=True):
        reads = slice(cut, following)
        with_it = logits.clone().requires_grad_()
        loss(with_it, reads).backward()
        without = logits.clone()
        without[0, cut] = -1
        slope = logits[0, cut].sigmoid() * (-logits[0, cut]).sigmoid()
        changes = loss(logits, reads) - loss(without, reads)
        torch.testing.assert_close(with_it.grad[0, cut], slope * changes)
