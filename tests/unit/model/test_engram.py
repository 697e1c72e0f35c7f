"""Engram's equation, and the numbers that its tables depend on (tests/kernels has the hash)."""

from __future__ import annotations

import torch

from spider.model.spider.config import EngramConfig
from spider.model.spider.engram import CONV_TAPS, Engram, multiplier, primes_from


def test_primes_and_multipliers_are_those_of_all_checkpoints():
    assert primes_from(14, 4) == [17, 19, 23, 29]
    primes = primes_from(81_307, 32)
    assert (primes[0], primes[-1], sum(primes)) == (81_307, 81_671, 2_607_934)
    # The tables of every checkpoint depend on these numbers.
    assert [multiplier(i) for i in (0, 5)] == [-2152535657050944081, 6038094601263162091]


def engram() -> Engram:
    torch.manual_seed(0)
    config = EngramConfig(layers=[0], head_dim=4, table_size=31)
    module = Engram(8, config, primes_from(31, 16))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.double()


def test_equals_the_equation_written_out():
    module = engram()
    tokens, close = torch.randint(0, 256, (1, 12)), torch.tensor([0, 2, 3, 9, 0])
    filled = torch.tensor([False, True, True, True, False])
    h = torch.randn(5, 8, dtype=torch.float64)
    got = module(h, module.read(tokens, close, filled), torch.arange(5))

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    values = []
    for j in range(5):
        m = module.tables(module.tables.rows(tokens)[0, close[j]]).flatten() * filled[j]
        key, query = (
            rms(module.key.weight @ m) * module.key_norm.weight,
            rms(h[j]) * module.query_norm.weight,
        )
        s = key @ query / 8**0.5
        values.append(torch.sigmoid(s.sign() * s.abs().clamp(min=1e-6).sqrt()) * (module.value.weight @ m))
    normed = [torch.zeros(8, dtype=torch.float64)] * (CONV_TAPS - 1) + [
        rms(v) * module.value_norm.weight for v in values
    ]
    for j in range(5):
        conv = sum(module.conv[:, 0, i] * normed[j + i] for i in range(CONV_TAPS))
        torch.testing.assert_close(got[j], values[j] + torch.nn.functional.silu(conv))


def test_gradients_stay_finite_where_nothing_is_remembered():
    module = engram()
    h = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    nowhere = torch.zeros(3, dtype=torch.int64)
    memory = module.read(nowhere[None], nowhere, nowhere.bool())
    module(h, memory, torch.arange(3)).sum().backward()
    assert h.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
