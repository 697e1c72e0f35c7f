"""Test which positions a GPT sees: windows and documents by mask, by offsets, and from a cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from small_gpt import SWITCHES, build_gpt, text
from torch import Tensor
from torch._dynamo.utils import counters

from spider.config import merged
from spider.model.gpt import attend as attending
from spider.model.gpt.attend import Cache, View, attend, causal_mask, document_offsets, view, view_behind
from spider.training.compilation import compile_forward

CPU = torch.device("cpu")
#: Two rows of 20: documents of 6, 1 and 9 tokens and 4 of padding; one document of 20.
SEGMENTS = torch.tensor([[1] * 6 + [2] + [3] * 9 + [0] * 4, [1] * 20])


def seen_by_hand(T: int, window: int | None, document_BT: Tensor | None) -> Tensor:
    """Return what each position sees, bool (B, T, T), by the definition."""
    rows = 1 if document_BT is None else len(document_BT)
    seen = torch.zeros(rows, T, T, dtype=torch.bool)
    for b, t, s in itertools.product(range(rows), range(T), range(T)):
        near = window is None or t - s <= window
        alike = document_BT is None or document_BT[b, t] == document_BT[b, s]
        seen[b, t, s] = s <= t and near and bool(alike)
    return seen


@pytest.mark.parametrize("document_BT", [None, SEGMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("window", [None, 1, 5, 18, 19, 100])
def test_a_mask_says_what_the_definition_says(window, document_BT):
    found = view((2, 20), window, document_BT, None, CPU, torch.float32)
    expected = seen_by_hand(20, window, document_BT)
    if document_BT is None and (window is None or window >= 19):
        assert found == View()
    else:
        assert torch.equal(found.mask.expand(len(expected), 1, 20, 20)[:, 0], expected)


@pytest.mark.parametrize("most", [3, 7])
def test_offsets_are_where_documents_begin_then_the_end(most):
    found = document_offsets(SEGMENTS, 2 * (most + 1))
    assert found.dtype == torch.int32 and len(found) == 2 * (most + 1) + 1
    assert found.tolist()[:5] == [0, 6, 7, 16, 20] and set(found.tolist()[5:]) == {40}
    same_number = torch.tensor([[1, 1, 1], [1, 1, 1]])  # documents of two rows, despite the equal number
    assert document_offsets(same_number, 3).tolist() == [0, 3, 6, 6]


@pytest.fixture
def kernel(monkeypatch) -> Iterator[list[int]]:
    """Replace the GPU's kernel by its definition on a CPU, which tests everything but its numerics; yield the
    number of documents of each call."""
    calls: list[int] = []

    def twin(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1)):
        assert cu_q is cu_k and max_q == max_k and window_size[1] == 0
        assert q.shape == k.shape == v.shape and (cu_q.diff() >= 0).all() and cu_q.diff().max() <= max_q
        window, out = None if window_size[0] < 0 else window_size[0], torch.full_like(q, torch.nan)
        for start, end in itertools.pairwise(cu_q.tolist()):
            if end > start:
                part = (x[start:end].transpose(0, 1) for x in (q, k, v))
                mask = causal_mask(end - start, end - start, window, CPU)
                y = torch.nn.functional.scaled_dot_product_attention(*part, attn_mask=mask)
                out[start:end] = y.transpose(0, 1)
        calls.append(len(cu_q) - 1)
        return out

    import torch.nn.attention.varlen as varlen

    monkeypatch.setattr(varlen, "varlen_attn", twin)
    monkeypatch.setattr(attending, "has_offsets", lambda *_: True)
    yield calls


@pytest.mark.parametrize("switch", ["nanochat", "grouped", "golf"])
@pytest.mark.parametrize("document_BT", [None, SEGMENTS], ids=["rows", "documents"])
def test_offsets_give_what_the_mask_gives(switch, document_BT, kernel, monkeypatch):
    model = build_gpt(**merged(SWITCHES[switch], {"windows": "SSSL"})).double()
    x, most = text(2, 20), 3 if document_BT is not None else None
    model.most_documents = most
    by_offsets = model(x, document_BT=document_BT).logits
    runs = model.config.order(model.loops(None))
    by_kernel = [layer for layer in runs if document_BT is not None or layer < 3]
    assert kernel == [2 if most is None else 8] * len(by_kernel)
    monkeypatch.setattr(attending, "has_offsets", lambda *_: False)
    torch.testing.assert_close(by_offsets, model(x, document_BT=document_BT).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("switch", SWITCHES)
def test_documents_of_a_packed_row_are_read_as_each_alone(switch):
    model, x = build_gpt(**SWITCHES[switch]).double().eval(), text(2, 20)
    with torch.no_grad():
        packed, row = model(x, document_BT=SEGMENTS).logits, model(x).logits
        for b, begin, end in ((0, 0, 6), (0, 6, 7), (0, 7, 16), (0, 16, 20), (1, 0, 20)):
            alone = model(x[b : b + 1, begin:end]).logits[0]
            torch.testing.assert_close(packed[b, begin:end], alone, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(packed[0, 7:16], row[0, 7:16])
    torch.testing.assert_close(packed[1], row[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_holds_what_the_next_positions_see_in_a_fixed_buffer(window):
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 30, 2, 8), torch.randn(1, 30, 2, 8), torch.randn(1, 30, 4, 8)
    whole = attend(q, k, v, view((1, 30), window, None, None, CPU, torch.float32))
    for sizes in ([1] * 30, [7, 1, 1, 12, 9], [2, 28]):
        cache, start = Cache(30, window), 0
        for N in sizes:
            seen = view_behind(start if window is None else min(start, window), N, window, CPU)
            here = slice(start, start + N)
            y = attend(q[:, here], *cache.extend(k[:, here], v[:, here]), seen)
            torch.testing.assert_close(y, whole[:, here], rtol=1e-5, atol=1e-6)
            start += N
        assert cache._buffer.shape == (2, 1, 2, 30 if window is None else 2 * window + 1, 8)


# ----------------------------------------------------------------------------------------------- compiled


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_steps_are_the_same_graphs_over_batches_and_documents():
    """Trace forward and backward with every part and the loss in pieces, and run them op by op.

    There are graphs of the embedding, of each of three runs of a layer, and of the loss. Other batches and
    other documents cause no recompilation.
    """
    torch.compiler.reset()
    counters.clear()
    changes = SWITCHES["golf"] | {
        "vocab_size": 4100,
        "layers": 2,
        "recurrence": {"layers": [0, 0], "loops": 2},
    }
    changes |= {"value_embeddings": "alternate", "windows": "S", "parallel_from": 1}
    eager, model = build_gpt(**changes), build_gpt(**changes)
    compile_forward(model, fullgraph=True, backend="aot_eager")
    for n in range(4):
        x, document_BT = text(2, 41, seed=n, size=4100), torch.randint(0, 4, (2, 40)).sort(1).values
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            losses = []
            for one in (eager, model):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = one(x[:, :-1], x[:, 1:], document_BT=document_BT).loss
                loss.backward()
                losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert counters["stats"]["unique_graphs"] == 5
    for (name, p), (_, q) in zip(eager.named_parameters(), model.named_parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 0.05 * p.grad.norm(), name
