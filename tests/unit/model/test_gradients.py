"""Every part's gradient, for its input and for each of its parameters, against finite differences in float64.

Hashes and cuts are fixed here. Halting and the choice of experts are steps: a case too near to one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from small import randomised, small_config
from torch import Tensor, nn

from spider.model.layers import RMSNorm, SwiGLU, rope_table
from spider.model.spider.attention import LatentAttention
from spider.model.spider.chunking import BoundaryPredictor, Chunker, lay_out
from spider.model.spider.config import AttentionConfig, BoundaryConfig, MoEConfig
from spider.model.spider.engram import Engram, NgramEmbedding, primes_from
from spider.model.spider.moe import MoE
from spider.model.spider.recurrence import Halting, Injection, Layer, LoopLoRA

B, T, D = 2, 5, 6
HEADS = {"heads": 2, "nope_dim": 2, "rope_dim": 4, "v_dim": 3, "kv_lora_rank": 4}
ROPE = rope_table(T, 4, 1e4, torch.device("cpu"))
TOKENS = torch.tensor([list(b"a b c"), list(b"de fg")])
#: Windows of four and three rows, the null patch first; the last three rows are spare.
WINDOWS = lay_out(torch.tensor([4, 3]), B * T, 4)
FILLED = WINDOWS.valid_M & (WINDOWS.number_M > 0)
CLOSE = torch.arange(B * T)

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def attention() -> tuple[nn.Module, Function]:
    part = LatentAttention(D, AttentionConfig(**HEADS))
    return part, lambda x: part(x, ROPE)


def core_attention() -> tuple[nn.Module, Function]:
    part = LatentAttention(D, AttentionConfig(**HEADS))
    return part, lambda x: part(x.flatten(0, 1), ROPE.part(0, 4), WINDOWS)[WINDOWS.valid_M]


def chunker() -> tuple[nn.Module, Function]:
    part = Chunker(D, BoundaryConfig(kind="whitespace"))

    def there_and_back(x: Tensor) -> Tensor:
        patches, _, _ = part.patch_bounds(TOKENS, x)
        assert patches.closes_BT.any(1).all()
        return part.up(part.down(x, patches).sin(), patches)

    return part, there_and_back


def predictor(start: Literal["random", "whitespace"]) -> tuple[nn.Module, Function]:
    part = BoundaryPredictor(D, BoundaryConfig(hidden=4, start=start))
    return part, lambda x: part(x, TOKENS, TOKENS > 100)


def random_predictor() -> tuple[nn.Module, Function]:
    return predictor("random")


def whitespace_predictor() -> tuple[nn.Module, Function]:
    return predictor("whitespace")


def engram() -> tuple[nn.Module, Function]:
    part = Engram(D, small_config().engram, primes_from(11, 16))
    return part, lambda x: part(x.flatten(0, 1), part.read(TOKENS, CLOSE, FILLED), WINDOWS.number_M)


def ngram_embedding() -> tuple[nn.Module, Function]:
    part = NgramEmbedding(D, [1, 3], primes_from(5, 2))
    return part, lambda x: x * part(TOKENS)


def halting() -> tuple[nn.Module, Function]:
    part = Halting(D)

    def three_loops(x: Tensor) -> tuple[Tensor, Tensor]:
        state = part.start(x)
        for r, h in enumerate((x, x.cos(), x.roll(1, 0))):
            state = part(state, h, last=r == 2)
        assert set(state.loops_M.flatten().tolist()) > {2}, "patches were meant to differ in their loops"
        return state.output_MD, state.remainder_M

    return part, three_loops


def moe() -> tuple[nn.Module, Function]:
    part = MoE(D, MoEConfig(experts=4, top_k=2, expert_hidden=3, shared_hidden=3))

    def routed(x: Tensor) -> tuple[Tensor, ...]:
        _, second, third, _ = (x.detach() @ part.router.weight.mT).softmax(-1).sort(-1).values.unbind(-1)
        assert (third - second).min() > 1e-3
        y, stats = part(x, FILLED.view(B, T))
        return y, stats.aux, stats.z

    return part, routed


def core_layer() -> tuple[nn.Module, Function]:
    config = small_config(hidden=D, attention=HEADS, moe={"expert_hidden": 3, "shared_hidden": 3})
    part = Layer(config, config.moe, primes_from(5, 16))

    def layer(x: Tensor) -> Tensor:
        assert part.engram is not None
        memory = part.engram.read(TOKENS, CLOSE, FILLED)
        return part(x.flatten(0, 1), ROPE.part(0, 4), WINDOWS, memory)[0][WINDOWS.valid_M]

    return part, layer


def injection() -> tuple[nn.Module, Function]:
    part = Injection(D)
    return part, lambda x: part(x, x.flip(1))


def lora() -> tuple[nn.Module, Function]:
    part = LoopLoRA(D, 2, loops=2)
    return part, lambda x: tuple(part.adapt(x, part.loop_scale(r)) for r in (0, 1, 7))


def rms_norm() -> tuple[nn.Module, Function]:
    part = RMSNorm(D)
    return part, part


def swiglu() -> tuple[nn.Module, Function]:
    part = SwiGLU(D, 4)
    return part, part


PARTS = [
    attention, core_attention, chunker, random_predictor, whitespace_predictor, engram, ngram_embedding,
    halting, moe, core_layer, injection, lora, rms_norm, swiglu,
]  # fmt: skip


@pytest.mark.parametrize("build", PARTS, ids=lambda build: build.__name__)
def test_part(build):
    part, function = build()
    randomised(part).double()
    torch.manual_seed(0)
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    # gradcheck changes its inputs in place, and these are the parameters themselves. The parts of the layer
    # are checked in full, so one random direction is enough for it.
    inputs, fast = (x, *part.parameters()), build is core_layer
    assert torch.autograd.gradcheck(lambda x, *_: function(x), inputs, fast_mode=fast)


@pytest.mark.parametrize(
    ("share", "sign"),
    [(0.1, -1), (0.25, 0), (0.8, 1)],
)
def test_boundary_loss(share, sign):
    part = Chunker(D, BoundaryConfig(rate=0.3))
    b = (share + 0.01 * torch.rand(2, 7, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda b: part._rate_loss(b)[0], (b,))
    (slope,) = torch.autograd.grad(part._rate_loss(b)[0], b)
    assert (slope.sign() == sign).all()


def test_the_whole_model_where_the_text_decides_the_cuts(make, tokens):
    model = make(boundary={"kind": "whitespace"}, engram={"byte_orders": [2]}).double().train()
    assert torch.autograd.gradcheck(
        lambda *_: model(tokens, tokens.roll(-1, 1)).loss, tuple(model.parameters()), fast_mode=True
    )
