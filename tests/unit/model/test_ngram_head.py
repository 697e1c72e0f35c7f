"""Test the n-gram head alone, and in a model that is trained, compiled and read as a stream."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small import SWITCHES, randomised
from torch import Tensor

from spider.config import merged
from spider.config.model import NgramConfig
from spider.data.ngram.layout import BEGIN, END, Layout
from spider.model.ngram_head import NgramHead
from spider.model.spider.model import Incremental
from spider.tokens import BYTES
from tests.families.toy.config import Config as ToyConfig
from tests.families.toy.model import Toy

NGRAM = {"contexts": [1, 2, 4], "matches": [2, 5], "hidden": 8, "state": 12}
CONFIG = NgramConfig.model_validate(NGRAM)
LAYOUT = Layout.of(CONFIG)
D = 16


def candidates(*shape: int, seed: int = 0) -> Tensor:
    """Return logits, states and random candidates: up to five per position, all different, with any
    counts."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(0, 256, (*shape, LAYOUT.width), generator=generator, dtype=torch.uint8)
    there, symbols, *_ = LAYOUT.split(draw)
    there %= LAYOUT.candidates + 1
    different = torch.rand(*shape, BEGIN, generator=generator).argsort(-1)[..., : LAYOUT.candidates]
    symbols.copy_(different)
    symbols[..., 0].masked_fill_(symbols[..., 0] < 40, END)
    beyond = torch.arange(LAYOUT.candidates) >= there
    symbols.masked_fill_(beyond, 0)
    for part in LAYOUT.split(draw)[4:]:
        part.masked_fill_(beyond[..., None], 0)
    return draw


def chosen(candidates_W: Tensor) -> list[int]:
    """Return the ids of a position's candidates."""
    there, symbols, *_ = LAYOUT.split(candidates_W)
    return [BYTES.eos if s == END else s for s in symbols[: int(there)].tolist()]


@pytest.fixture
def head() -> NgramHead:
    torch.manual_seed(0)
    part = NgramHead(D, CONFIG, BYTES)
    with torch.no_grad():
        for module in part.modules():
            getattr(module, "init_weights", lambda: None)()
    return part


def given(places: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(places, BYTES.size), torch.randn(places, D), candidates(places)


# ------------------------------------------------------------------------------------------- the head alone


def test_a_new_head_leaves_the_logits_as_they_are(head):
    logits, h, proposed = given()
    torch.testing.assert_close(head(logits, h, proposed), logits, rtol=0, atol=1e-6)


def test_only_candidates_move_until_the_network_is_trusted_more_or_less(head):
    randomised(head)
    with torch.no_grad():
        head.trust.weight.zero_()
    logits, h, proposed = given()
    moved = (head(logits, h, proposed) - logits).abs() > 1e-6
    for place, row in enumerate(proposed):
        assert set(moved[place].nonzero().flatten().tolist()) == set(chosen(row)), place
    assert BYTES.eos in {i for row in proposed for i in chosen(row)}
    with torch.no_grad():
        head.trust.weight.fill_(0.1)
    scaled = head(logits, h, proposed) / logits
    for place, row in enumerate(proposed):
        others = [i for i in range(BYTES.size) if i not in chosen(row)]
        torch.testing.assert_close(scaled[place, others], scaled[place, others[:1]].expand(len(others)))


def test_a_counts_worth_is_that_of_its_candidate_whatever_the_slot(head):
    """And what is no candidate has no effect."""
    randomised(head)
    logits, h, proposed = given(200)
    LAYOUT.split(proposed)[0].fill_(LAYOUT.candidates)
    turned = proposed.clone()
    for part in (1, 4, 5):
        LAYOUT.split(turned)[part].copy_(LAYOUT.split(proposed)[part].flip(1))
    different = [len(set(chosen(row))) == LAYOUT.candidates for row in proposed]
    a, b = head(logits, h, proposed), head(logits, h, turned)
    torch.testing.assert_close(a[different], b[different], rtol=1e-3, atol=1e-3)  # the order of sums differs
    assert sum(different) > 10
    for none in (proposed, turned):
        LAYOUT.split(none)[0].zero_()
    assert torch.equal(head(logits, h, proposed), head(logits, h, turned))


# ------------------------------------------------------------------------------------------------- in a model


def test_a_model_with_an_index_is_not_read_without_what_that_proposes(make, tokens):
    toy = Toy(ToyConfig(width=8, ngram=CONFIG))
    toy.reset_parameters()
    for model in (make(ngram=NGRAM), toy):
        with pytest.raises(
            ValueError, match="this model reads an n-gram index: pass its candidates as `candidates_BTW`"
        ):
            model(tokens)
        assert model(tokens, **model.empty_candidates(tokens)).logits.isfinite().all()


def test_a_new_model_with_index_predicts_what_the_one_without_would(make, tokens):
    without, model = make(busy=False).eval(), make(busy=False, ngram=NGRAM).eval()
    kept = model.load_state_dict(without.state_dict(), strict=False)
    assert all(name.startswith("ngram.") for name in kept.missing_keys) and not kept.unexpected_keys
    with torch.no_grad():
        logits = model(tokens, candidates_BTW=candidates(*tokens.shape)).logits
        torch.testing.assert_close(logits, without(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("switch", ["everything", "overflow", "no_patches"])
def test_no_logit_sees_a_later_byte_nor_what_is_proposed_after_it(make, tokens, switch):
    model, T = make(**merged(SWITCHES[switch], {"ngram": NGRAM})).eval(), 24
    window_TT, of_window = tokens[0, :T].repeat(T, 1), candidates(1, T).repeat(T, 1, 1)
    changed_TT, of_changed = window_TT.clone(), of_window.clone()
    for t in range(T):
        changed_TT[t, t:] = (changed_TT[t, t:] + 1) % 256
        of_changed[t, t:] = candidates(T - t, seed=1)
    with torch.no_grad():
        before = model(window_TT, candidates_BTW=of_window).logits
        after = model(changed_TT, candidates_BTW=of_changed).logits
        alone = model(window_TT, candidates_BTW=of_changed).logits
    for t in range(T):
        torch.testing.assert_close(after[t, :t], before[t, :t], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(alone[t, :t], before[t, :t], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(alone[t, t], before[t, t], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("switch", ["everything", "whitespace_overflow", "no_patches", "bare"])
@pytest.mark.parametrize("sizes", [[1], [7, 1, 1, 12]])
def test_every_prefix_has_the_logits_of_a_whole_forward_pass(make, tokens, switch, sizes):
    model = make(**merged(SWITCHES[switch], {"ngram": NGRAM})).eval()
    for row, ids in enumerate(tokens.tolist()):
        proposed, stream, got = candidates(len(ids), seed=row), Incremental(model, context=48), []
        for turn in range(len(ids)):
            if piece := ids[(at := sum(map(len, got))) : at + sizes[turn % len(sizes)]]:
                got.append(stream.extend(piece, proposed[at : at + len(piece)]))
        window = torch.tensor([ids + [BYTES.pad] * (48 - len(ids))])
        padded = F.pad(proposed, (0, 0, 0, 48 - len(ids)))[None]
        with torch.no_grad():
            whole = model(window, candidates_BTW=padded).logits[0, : len(ids)]
        torch.testing.assert_close(torch.cat(got), whole, rtol=1e-4, atol=1e-4)
