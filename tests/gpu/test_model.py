"""The model on a GPU beside the same model on a CPU.

Float32 agrees within 1e-4. Two devices may round RoPE's frequencies differently. One unit in their last place
moved the logits of this model and text by 2e-5; the order of sums moves them less.
"""

from __future__ import annotations

import copy

import pytest
import torch

from spider.model.spider import attention
from spider.model.spider.attention import takes_offsets
from spider.model.spider.chunking import lay_out
from spider.tokens import BYTES
from tests.unit.model.small import build, train

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU: nothing of this file was tested"
)

DEVICE = "cuda"


def text(length: int = 48) -> torch.Tensor:
    """Return four windows of letters and spaces with a document start in each."""
    generator = torch.Generator().manual_seed(5)
    tokens_BT = torch.randint(97, 123, (4, length), generator=generator)
    tokens_BT[torch.rand(4, length, generator=generator) < 0.2] = 32
    tokens_BT[:, length // 3] = BYTES.bos
    return tokens_BT


@pytest.mark.parametrize("kind", ["learned", "whitespace", "none"])
def test_forward_and_backward_agree_in_float32(kind):
    here = build(boundary={"kind": kind}, engram={"byte_orders": [2]}).eval()
    there = copy.deepcopy(here).to(DEVICE)
    tokens = text()
    results = []
    for model, x in ((here, tokens), (there, tokens.to(DEVICE))):
        gradients = torch.autograd.grad(model(x, x.roll(-1, 1)).loss, [*model.parameters()])
        results.append([model(x).logits.detach().cpu(), *(gradient.cpu() for gradient in gradients)])
    names = ["logits", *(name for name, _ in here.named_parameters())]
    for name, a, b in zip(names, *results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_attention_by_offsets_equals_attention_on_padded_windows(monkeypatch):
    """Windows have one row up to the most, with spare rows behind; the spare rows are compared too."""
    rows = torch.tensor([1, 33, 129, 60, 128], device=DEVICE)
    windows, model = lay_out(rows, 400, 129), build().to(DEVICE)
    part, rope = model.core.layers[0].attention, model.rope(129)
    x_MD = torch.randn(400, model.config.hidden, device=DEVICE, requires_grad=True)
    weight_MD = torch.randn_like(x_MD) * windows.valid_M[:, None]
    results = []
    for offsets in (True, False):
        with torch.autocast(DEVICE, torch.bfloat16):
            if offsets:
                assert takes_offsets(part.q(x_MD), part.config)
            else:
                monkeypatch.setattr(attention, "takes_offsets", lambda *_: False)
            y_MD = part(x_MD, rope, windows)
        assert y_MD.isfinite().all()
        gradients = torch.autograd.grad((y_MD * weight_MD).sum(), [x_MD, *part.parameters()])
        results.append([y_MD[windows.valid_M].detach(), *gradients])
    for by_offsets, spread in zip(*results, strict=True):
        off = (by_offsets.double() - spread.double()).norm() / spread.double().norm()
        assert off < 0.02


def test_training_steps_are_one_graph_and_never_recompile():
    torch.compiler.reset()
    eager, model = (build(recurrence={"checkpointing": True}).to(DEVICE).train() for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, options={"fallback_random": True})
    assert train(model, compiled) == pytest.approx(train(eager, eager), rel=0.02)
