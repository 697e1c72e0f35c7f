"""The GPT on a GPU: its attention kernel beside the dense mask, and the model beside a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from spider.model.gpt.attend import View, attend, document_offsets, view
from spider.model.layers import has_offsets
from spider.processes.device import _try_attention, choose_attention
from spider.training.compilation import compile_forward
from tests.unit.model.small_gpt import SWITCHES, build_gpt, text

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU: nothing of this file was tested"
)

DEVICE = torch.device("cuda")
#: Rows, ids of a row, most documents of a row.
B, T, MOST = 2, 2048, 74


def documents() -> Tensor:
    """Return a row of 74 documents and padding, and a row of a single document."""
    ends = torch.linspace(20, T - 100, MOST).long()
    packed_T = (torch.searchsorted(ends, torch.arange(T), right=True) + 1).where(
        torch.arange(T) < ends[-1], 0
    )
    assert len(packed_T.unique()) == MOST + 1
    return torch.stack([packed_T, torch.ones_like(packed_T)]).to(DEVICE)


@pytest.mark.parametrize("document_BT", [None, "packed"])
@pytest.mark.parametrize("window", [None, 1, 64, 1024])
@pytest.mark.parametrize("groups", [4, 2])
def test_the_kernel_equals_attention_with_a_dense_mask(groups, window, document_BT):
    """Forward and backward are within 1e-2 of the mask's in float32; the offsets end in empty documents."""
    segments = None if document_BT is None else documents()
    by_offsets = view((B, T), window, segments, MOST, DEVICE, torch.bfloat16)
    by_mask = view((B, T), window, segments, MOST, DEVICE, torch.float32)
    if segments is None and window is None:
        assert by_offsets == by_mask == View()
    else:
        assert by_offsets.mask is None and by_mask.offset_P is None
    if segments is not None:
        assert (document_offsets(segments, B * (MOST + 1))[-50:] == B * T).all()
    torch.manual_seed(0)
    narrow = [torch.randn(B, T, n, 64, device=DEVICE).bfloat16() for n in (4, groups, groups)]
    upstream, found = torch.randn(B, T, 4, 64, device=DEVICE), []
    for seen, dtype in ((by_offsets, torch.bfloat16), (by_mask, torch.float32)):
        q, k, v = (x.to(dtype).requires_grad_() for x in narrow)
        y = attend(q, k, v, seen)
        gradients = torch.autograd.grad(y, [q, k, v], upstream.to(dtype))
        found.append([y.detach(), *gradients])
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        assert (a.float() - b).norm() <= 1e-2 * b.norm()


@pytest.mark.parametrize("switch", SWITCHES)
def test_float32_agrees_with_the_cpu(switch):
    here, x = build_gpt(**SWITCHES[switch]).eval(), text(2, 40)
    there = copy.deepcopy(here).to(DEVICE)
    found = []
    for model, ids in ((here, x), (there, x.to(DEVICE))):
        gradients = torch.autograd.grad(model(ids, ids.roll(-1, 1)).loss, [*model.parameters()])
        found.append([model(ids).logits.detach().cpu(), *(gradient.cpu() for gradient in gradients)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("switch", ["nanochat", "golf"])
def test_bfloat16_stays_near_float32(switch):
    """The kernel attends within documents; the reference is the mask in float32 on a CPU."""
    here = build_gpt(busy=False, hidden=128, layers=5, short_window=100, **SMALLER[switch])
    with torch.no_grad():
        for name, p in here.named_parameters():
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                p.normal_(0, 128**-0.5)
    here.most_documents = MOST
    there, x, segments = copy.deepcopy(here).to(DEVICE), text(B, T), documents()
    with torch.no_grad():
        exact = here(x, document_BT=segments.cpu()).logits
        with torch.autocast("cuda", torch.bfloat16):
            assert has_offsets(DEVICE, torch.bfloat16)
            narrow = there(x.to(DEVICE), document_BT=segments).logits.cpu()
    assert (narrow - exact).norm() <= 2e-2 * exact.norm()


SMALLER = {"nanochat": {}, "golf": {k: v for k, v in SWITCHES["golf"].items() if k != "recurrence"}}


def test_a_compiled_step_is_one_graph_over_batches_and_documents():
    torch.compiler.reset()
    eager, model = (build_gpt(hidden=64, short_window=64, vocab_size=5000).to(DEVICE) for _ in range(2))
    eager.most_documents = model.most_documents = 8
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    for n in range(50):
        x = text(4, 257, seed=n, size=5000).to(DEVICE)
        segments = torch.randint(1, 8, (4, 256), generator=torch.Generator().manual_seed(n)).sort(1).values
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            losses = []
            for one in (eager, compiled):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = one(x[:, :-1], x[:, 1:], document_BT=segments.to(DEVICE)).loss
                loss.backward()
                losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiled_loss_of_many_ids_agrees_with_that_of_pieces(reduction):
    torch.compiler.reset()
    x, found = text(8, 2049, size=5000).to(DEVICE), []
    for compiled in (False, True):
        model = build_gpt(hidden=64, layers=2, vocab_size=5000).to(DEVICE)
        if compiled:
            compile_forward(model)
        assert model.in_pieces(compiled) != compiled
        with torch.autocast("cuda", torch.bfloat16):
            nats = model(x[:, :-1], x[:, 1:], reduction=reduction).loss
        nats.mean().backward()
        found.append([nats.detach(), model.head.weight.grad, model.embedding.grad])
    for a, b in zip(*found, strict=True):
        assert (b - a).norm() <= 2e-2 * a.norm()


def test_flash_attention_of_torch_passes_its_trial_and_is_the_choice_without_a_package():
    _try_attention(DEVICE)
    assert choose_attention(DEVICE, deterministic=True) == "FA2"
    assert choose_attention(DEVICE, deterministic=False) in ("FA2", "FA3", "FA4")
    assert choose_attention(DEVICE, deterministic=True) == "FA2"


def test_incremental_logits_equal_a_whole_pass_in_bfloat16():
    model, x = build_gpt().to(DEVICE).eval(), text(1, 40)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        whole = model(x.to(DEVICE)).logits[0]
        stream = model.incremental(40)
        got = torch.cat([stream.extend([i]) for i in x[0].tolist()])
    assert (got - whole).norm() <= 2e-2 * whole.norm()
