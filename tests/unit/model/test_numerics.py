"""Compare bf16 autocast with float32, for each part.

A product under autocast rounds what enters and what leaves it to 8 significant bits, that is by at most half
of U = 2^-8 each, in no one direction: k products in a row are off by about k U of the result's norm, and that
is the bound of each part. What is not a product is float32 and exact: the residual stream, the mean of a
patch, the router, halting, injection.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spider.model.layers import rope_table
from spider.model.spider.chunking import equal_windows
from spider.model.spider.engram import Engram
from spider.model.spider.model import Spider

U = 2**-8
B, T = 2, 12
WINDOWS = equal_windows(B, T, torch.device("cpu"))
VALID = WINDOWS.valid_M.view(B, T)
ROPE = rope_table(T, 8, 1e4, torch.device("cpu"))
TOKENS = torch.tensor([list(b"ab cde f ghi"), list(b"one two 3 4 ")])
READ = TOKENS, torch.arange(B * T), WINDOWS.valid_M


def narrow(function: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return function()


def relative(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def halted(model: Spider, x: Tensor) -> Tensor:
    halting = model.core.halting
    return halting(halting(halting.start(x), x, last=False), x.cos(), last=True).output_MD


def there_and_back(model: Spider, x: Tensor) -> Tensor:
    patches, _, _ = model.chunker.patch_bounds(TOKENS, x)
    return model.chunker.up(model.chunker.down(x, patches), patches)


def remembered(engram: Engram, x: Tensor) -> Tensor:
    return engram(x.flatten(0, 1), engram.read(*READ), WINDOWS.number_M)


#: Number of consecutive products, and the part.
PARTS: dict[str, tuple[int, Callable[[Spider, Tensor], Tensor]]] = {
    "attention": (5, lambda m, x: m.prelude[0].attention(x, ROPE)),
    "swiglu": (2, lambda m, x: m.prelude[0].ffn(x)),
    "experts": (2, lambda m, x: m.core.layers[0].ffn(x, VALID)[0]),
    "lora": (2, lambda m, x: m.core.lora.adapt(x, m.core.lora.loop_scale(1))),
    "engram": (1, lambda m, x: remembered(m.core.layers[1].engram, x)),
    "predictor": (2, lambda m, x: m.chunker.boundary_predictor(x, TOKENS, VALID)),
    "dense block": (7, lambda m, x: m.prelude[0](x, ROPE)[0]),
    "head": (1, lambda m, x: m.head(x)),
    "byte n-grams": (0, lambda m, x: m.embed(TOKENS)),
    "halting": (0, halted),
    "injection": (0, lambda m, x: m.core.injection(x, x.cos())),
}


def error(model: Spider, part: Callable[[Spider, Tensor], Tensor], seed: int) -> float:
    x = torch.randn(B, T, model.config.hidden, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return relative(narrow(lambda: part(model, x)), part(model, x))


@pytest.mark.parametrize("name", PARTS)
def test_part(make, name):
    products, part = PARTS[name]
    model = make(engram={"byte_orders": [2]}).eval()
    worst = max(error(model, part, seed) for seed in range(5))
    assert worst <= products * U
    assert (worst > 0) == (products > 0), "autocast was meant to reach products and nothing else"


def test_patches_are_averaged_and_read_in_float32(make):
    model = make(boundary={"kind": "whitespace"}).eval()
    assert error(model, there_and_back, 0) == 0
