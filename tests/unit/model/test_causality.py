"""Test that no output depends on a later byte, under every switch.

Two forward passes of one shape are compared row by row: one over copies of a window, one over copies of which
row t is changed at place t. In float64 no product's last bit depends on the other rows of a batch of the same
shape, so that "does not see" means bit-equal where shapes are static, as in training on a GPU. Where the core
has as many rows as there are patches, a changed byte changes that number, and the order of sums with it:
there it means equal but for the last bits.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from small import SWITCHES, randomised
from torch import Tensor

from spider.config import merged
from spider.model.spider import chunking
from spider.model.spider.chunking import Chunker
from spider.model.spider.config import BoundaryConfig
from spider.tokens import BYTES

T = 24
#: A document ends and the next begins in the middle; runs of spaces; more words than the low capacity.
WINDOW = torch.tensor([*b"ab  c de fgh", BYTES.eos, BYTES.bos, *b"i jkl m nopq"[: T - 14]])
#: Replacements of a byte, in turn: an ordinary byte, one that closes patches, both ends of a document.
NEW = (ord("Z"), ord(" "), BYTES.bos, BYTES.eos)

#: Every kind of boundaries; the low capacities are exhausted long before the end of the window.
CUTS: dict[str, dict[str, Any]] = {
    "learned": {"capacity": 1.0},
    "learned, from white space": {"start": "whitespace"},
    "learned, overflow": {"capacity": 0.1},
    "whitespace": {"kind": "whitespace"},
    "whitespace, overflow": {"kind": "whitespace", "capacity": 0.1},
    "none": {"kind": "none"},
}
#: Every other switch with its settings; the tests use their product.
OTHERS: list[list[dict[str, Any]]] = [
    [{"engram": {"layers": []}}, {"engram": {"layers": [1]}}],
    [{"engram": {"byte_orders": []}}, {"engram": {"byte_orders": [2, 3]}}],
    [{"moe": None}, {}],
    [{"recurrence": {"lora_rank": rank}} for rank in (0, 2)],
    [{"recurrence": {"loops": loops}} for loops in (1, 2)],
]


def changed_at_each_place(window_T: Tensor, turn: int) -> Tensor:
    """Return T copies of the window, (T, T). Row t has another byte at position t; ``turn`` selects it."""
    changed_TT = window_T.repeat(len(window_T), 1)
    for t, old in enumerate(window_T.tolist()):
        choices = [new for new in NEW if new != old]
        changed_TT[t, t] = choices[(t + turn) % len(choices)]
    return changed_TT


def assert_causal(before_BT: Tensor, after_BT: Tensor, what: str, off: float = 0.0) -> None:
    """Row t of ``after_BT...``, changed at place t, equals ``before_BT...`` to the bit up to there, or is at
    most ``off``; no further."""
    same_BT = ((before_BT - after_BT).abs() <= off).flatten(2).all(2)
    for t, same_T in enumerate(same_BT):
        assert same_T[:t].all(), f"{what}: place {int((~same_T).nonzero()[0])} sees place {t}"
        assert not same_T[t], f"{what}: place {t} has no influence on its own output"


@pytest.fixture(params=["static", "as many rows as patches"])
def off(request, monkeypatch) -> float:
    """Choose the number of rows; yield the tolerance of equal results."""
    static = request.param == "static"
    monkeypatch.setattr(chunking, "shapes_are_static", lambda x, training: static)
    return 0.0 if static else 1e-11


@pytest.mark.parametrize("cut", CUTS)
def test_no_logit_sees_a_later_byte_whatever_is_on(make, monkeypatch, cut):
    monkeypatch.setattr(chunking, "shapes_are_static", lambda x, training: True)
    overflow = []
    for turn, others in enumerate(product(*OTHERS)):
        changes: dict[str, Any] = {"boundary": CUTS[cut]}
        for other in others:
            changes = merged(changes, other)
        model = make(seed=turn, **changes).double().eval()
        with torch.no_grad():
            before = model(WINDOW.repeat(T, 1))
            after = model(changed_at_each_place(WINDOW, turn))
        assert_causal(before.logits, after.logits, str(changes))
        overflow.append(before.metrics.get("patch_overflow", torch.zeros(())) > 0)
    assert sum(overflow) > len(overflow) / 2 if "overflow" in cut else not any(overflow)


@pytest.mark.parametrize("switch", SWITCHES)
def test_in_training_neither(make, switch, off):
    # The number of rows is static, and changing a byte never takes rows from other windows.
    roomy = {"boundary": {"capacity": 1.0, "spare": 2.4}}
    model = make(**merged(roomy, SWITCHES[switch])).double().train()

    def run(tokens_BT: Tensor) -> Tensor:
        torch.manual_seed(3)  # the same boundary noise
        return model(tokens_BT).logits.detach()

    for turn in range(3):
        assert_causal(run(WINDOW.repeat(T, 1)), run(changed_at_each_place(WINDOW, turn)), switch, off)


def test_a_row_does_not_depend_on_the_others_of_its_batch(make, off):
    model, rows = make().double().eval(), changed_at_each_place(WINDOW, 0)
    with torch.no_grad():
        among_others = model(rows).logits
        for t in (0, 11, T - 1):
            alone = model(rows[t].repeat(T, 1)).logits[t]
            torch.testing.assert_close(alone, among_others[t], rtol=0, atol=off)


def test_a_byte_shows_from_the_closing_byte_of_its_patch_on_and_a_patch_until_the_next_closes():
    D, config = 8, BoundaryConfig(hidden=8, kind="whitespace", capacity=1.0)
    part = randomised(Chunker(D, config)).double().eval()
    window_1T = torch.tensor([list(b"ab cde f ghi")])
    h = torch.randn(1, 12, D, dtype=torch.float64)
    patches, _, _ = part.patch_bounds(window_1T, h)
    assert patches.close_M[patches.filled_M].tolist() == [2, 6, 8]
    read = part.up(part.down(h, patches), patches)
    first, second, third = [2, 3, 4, 5], [6, 7], [8, 9, 10, 11]
    for t, seen in ((0, first), (2, first), (3, second), (6, second), (8, third), (9, [])):
        moved = h.clone()
        moved[0, t] += torch.randn(D)
        after = part.up(part.down(moved, patches), patches)
        assert (after != read).any(-1)[0].nonzero().flatten().tolist() == seen, f"byte {t}"
