"""Test the core's flat buffer: every layout computes what each window computes alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from small import GivenLogits, build
from torch import Tensor
from torch._subclasses import FakeTensorMode

from spider.model.layers import attention_by_offsets
from spider.model.spider import attention, chunking
from spider.model.spider.chunking import Chunker, PatchLayout, equal_windows, lay_out
from spider.model.spider.config import AttentionConfig, SpiderConfig
from spider.model.spider.model import Spider

HERE = torch.device("cpu")
#: Rows of each window of a batch, rows of the buffer, and the most rows of a window.
LAYOUTS = {
    "as many rows as there are": ([3, 1, 7, 2], 13, 7),
    "to spare": ([3, 1, 7, 2], 32, 7),
    "to spare, and longer windows possible": ([3, 1, 7, 2], 37, 11),
    "as many as all have at the longest one's length": ([3, 1, 7, 2], 28, 7),
    "one window": ([5], 16, 5),
    "null patches alone": ([1, 1, 1], 16, 1),
}


@pytest.fixture
def static(monkeypatch):
    """Use static sizes, as in training on a GPU."""
    monkeypatch.setattr(chunking, "shapes_are_static", lambda x, training: True)


def core_output(model: Spider, e_MD: Tensor, close_M: Tensor, tokens: Tensor, windows: PatchLayout) -> Tensor:
    indexes = model.core.retrieve(tokens, close_M, windows.number_M > 0)
    return model.core(e_MD, indexes, model.rope(windows.longest), windows, 3).z_MD


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_have_the_values_and_gradients_of_each_window_alone(layout):
    rows, M, longest = LAYOUTS[layout]
    model = build(engram={"layers": [0, 1]}).double().train()
    windows = lay_out(torch.tensor(rows), M, longest)
    tokens, close_M = torch.randint(0, 256, (2, 20)), torch.randint(0, 40, (M,))
    e_MD = torch.randn(M, model.config.hidden, dtype=torch.float64, requires_grad=True)
    weight_MD = torch.randn_like(e_MD) * windows.valid_M[:, None]
    together = core_output(model, e_MD, close_M, tokens, windows)
    assert windows.valid_M.sum() == sum(rows)

    alone = []
    for n, start in zip(rows, windows.begin_B.tolist(), strict=True):
        own = slice(start, start + n)
        alone.append(core_output(model, e_MD[own], close_M[own], tokens, equal_windows(1, n, HERE)))
    inputs = [e_MD, *model.core.parameters()]
    gradients = torch.autograd.grad((together * weight_MD).sum(), inputs, allow_unused=True)
    loss = (torch.cat(alone) * weight_MD[windows.valid_M]).sum()
    torch.testing.assert_close(together[windows.valid_M], torch.cat(alone))
    for got, want in zip(gradients, torch.autograd.grad(loss, inputs, allow_unused=True), strict=True):
        torch.testing.assert_close(got, want)


def test_a_fault_in_one_window_stays_there():
    rows, M, longest = LAYOUTS["to spare"]
    windows, model = lay_out(torch.tensor(rows), M, longest), build().double()
    e_MD = torch.randn(M, model.config.hidden, dtype=torch.float64)
    faulty = e_MD.index_fill(0, torch.tensor([3]), torch.nan).requires_grad_()  # the window of one row
    z_MD = core_output(model, faulty, torch.zeros(M, dtype=torch.int64), torch.zeros(1, 1).long(), windows)
    others = windows.valid_M & (torch.arange(M) != 3)
    assert z_MD[3].isnan().all() and z_MD[others].isfinite().all()
    z_MD[others].sum().backward()
    assert faulty.grad[others].isfinite().all()


# ------------------------------------------------------------------------------- attention by offsets


def by_offsets(
    q: Tensor, k: Tensor, v: Tensor, at: Tensor, to: Tensor, longest: int, same: int, *, window_size: object
) -> Tensor:
    """Compute what torch's kernel computes, sequence by sequence."""
    assert at is to and at.dtype == torch.int32 and longest == same and window_size == (-1, 0)
    assert at[0] == 0 and at[-1] == len(q) and at.diff().min() >= 0 and at.diff().max() <= longest
    sequences = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in itertools.pairwise(at)]
    done = [F.scaled_dot_product_attention(*s, is_causal=True) for s in sequences if s[0].shape[1]]
    return torch.cat(done, dim=1).transpose(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_by_offsets_gives_what_spreading_out_gives(monkeypatch, layout):
    rows, M, longest = LAYOUTS[layout]
    windows, model = lay_out(torch.tensor(rows), M, longest), build().double()
    part, rope = model.core.layers[0].attention, model.rope(longest)
    x_MD = torch.randn(M, model.config.hidden, dtype=torch.float64, requires_grad=True)
    weight_MD = torch.randn_like(x_MD) * windows.valid_M[:, None]
    results = []
    for offsets in (False, True):
        if offsets and windows.offset_S is not None:
            monkeypatch.setattr(attention, "takes_offsets", lambda *_: True)
            monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_offsets)
        y_MD = part(x_MD, rope, windows)
        gradients = torch.autograd.grad((y_MD * weight_MD).sum(), [x_MD, *part.parameters()])
        results.append([y_MD[windows.valid_M].detach(), *gradients])
    for spread, got in zip(*results, strict=True):
        torch.testing.assert_close(got, spread)


def test_torch_has_that_kernel_with_that_signature():
    windows = lay_out(torch.tensor([3, 1, 7, 2]), 32, 7)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(32, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = attention_by_offsets(q, k, v, windows.offset_S, windows.longest)
        assert out.shape == q.shape
        assert [g.shape for g in torch.autograd.grad(out.sum(), [q, k, v])] == 3 * [q.shape]
    narrow = torch.empty(1, dtype=torch.bfloat16)
    assert not attention.takes_offsets(narrow, AttentionConfig()), "not on a CPU"


# ------------------------------------------------------------------------------- a static number of rows


CLEAR = 1e9
"""A logit so large that no noise changes its sign."""


def chunker(**changes: object) -> tuple[Chunker, GivenLogits]:
    model = build(boundary=changes)
    given = model.chunker.boundary_predictor = GivenLogits()
    return model.chunker.eval(), given


@pytest.mark.parametrize("spare, rows", [(0.06, 7728), (0.05, 7648)])
def test_static_rows_are_92_percent_useful_at_the_rate_of_spider_1b_and_hold_all_patches(static, spare, rows):
    """The rates of windows differ, as those of texts do."""
    config, (B, T) = SpiderConfig().boundary, (112, 256)
    part, given = chunker(**config.model_dump() | {"spare": spare})
    generator = torch.Generator().manual_seed(0)
    rate_B1 = config.rate + 0.02 * torch.randn(B, 1, generator=generator)
    given.logits_BT = CLEAR * (rate_B1 - torch.rand(B, T, generator=generator))
    patches, metrics, _ = part.train().patch_bounds(torch.zeros(B, T).long(), torch.zeros(B, T, 32))
    assert len(patches.layout.valid_M) == part.rows(B, T) == rows and part.rows(B, T) % 16 == 0
    assert metrics["patch_fill"] >= 0.92 and metrics["patch_overflow"] == 0
    assert part.filled(T) == 65


def test_what_does_not_fit_is_cut_off_where_it_closes_last_whatever_follows(static):
    """Every window would close at every second byte, but there are rows for every fourth."""
    B, T = 16, 32
    part, given = chunker(rate=0.25, spare=0.0, capacity=1.0)
    given.logits_BT = torch.full((B, T), -CLEAR)
    given.logits_BT[:, 1::2] = CLEAR
    tokens, h = torch.zeros(B, T).long(), torch.randn(B, T, 32)
    patches, metrics, _ = part.train().patch_bounds(tokens, h)
    room = part.rows(B, T) - B
    assert room == B * T / 4 and patches.filled_M.sum() == patches.closes_BT.sum() == room
    assert metrics["patch_overflow"] == 0.5 / 2 and metrics["patch_fill"] == 1
    assert patches.closes_BT[:, : T // 2].sum() == room, "the first half of every window, all of which fits"
    # Changed boundaries from byte 11 on do not affect earlier bytes.
    given.logits_BT[:, 11:] = given.logits_BT[:, 11:].flip(0, 1)
    again, _, _ = part.patch_bounds(tokens, h)
    assert torch.equal(again.closes_BT[:, :11], patches.closes_BT[:, :11])
    # In evaluation every patch has a row, and no window depends on the others.
    evaluated, metrics, _ = part.eval().patch_bounds(tokens, h)
    assert metrics["patch_overflow"] == 0 and len(evaluated.filled_M) == B * (T + 1)


@pytest.mark.parametrize("kind", ["learned", "whitespace", "none"])
def test_static_rows_give_the_result_of_as_many_as_there_are(kind, monkeypatch, tokens):
    def results() -> list[Tensor]:
        torch.manual_seed(0)  # the same noise
        loss = model(tokens, tokens.roll(-1, 1)).loss
        return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

    model = build(boundary={"kind": kind, "spare": 1.0}, engram={"byte_orders": [2]}).double().train()
    exact = results()
    monkeypatch.setattr(chunking, "shapes_are_static", lambda x, training: True)
    for got, want in zip(results(), exact, strict=True):
        torch.testing.assert_close(got, want)
