"""Compare bf16 autocast with float32, for each part and for the whole model.

A product under autocast rounds what enters and what leaves it to 8 significant bits, that is by at most half
of U = 2^-8 each, in no one direction: k products in a row are off by about k U of the result's norm, and that
is the bound of each part. What is not a product is float32 and exact: the residual stream, the mean of a
patch, the router, halting, injection. A choice that hangs on a narrow product (a cut, an expert, a halt) may
fall differently where it was a near tie, so that the whole model is bound twice: its logits and gradient with
the text making the choices, and its loss with all of them in.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

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


def test_whole_model(make, tokens):
    """The bounds are about twice what several seeds give.

    The errors of the parts are random and partly cancel in the residual stream; a gradient goes through every
    product twice. Of 16 seeds, two have an error of the gradient of 18 U, and the others of 4 to 11 U.
    """
    labels = tokens.roll(-1, 1)
    errors = []
    for seed in range(5):
        model = make(seed=seed, boundary={"kind": "whitespace"}, moe=None)
        logits, gradients = [], []
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                logits.append(model(tokens).logits.detach())
                loss = model(tokens, labels).loss
            gradients.append(
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
            )
        assert relative(logits[1], logits[0]) < 8 * U
        errors.append(relative(gradients[1], gradients[0]))
    assert median(errors) < 16 * U and max(errors) < 32 * U


def test_loss_with_every_choice_made_from_narrow_numbers(make, tokens):
    labels = tokens.roll(-1, 1)
    for seed in range(5):
        model = make(seed=seed).eval()
        with torch.no_grad():
            exact = model(tokens, labels).metrics["cross_entropy"]
            loss = narrow(lambda model=model: model(tokens, labels).metrics["cross_entropy"])
        assert loss.dtype == torch.float32
        assert abs(loss - exact) < 0.02 * exact
    model.train()
    narrow(lambda: model(tokens, labels).loss).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
