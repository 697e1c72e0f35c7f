"""Compare n-gram hashes with Python's integers; test document starts and Engram's equation."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from spider.model.spider.config import EngramConfig
from spider.model.spider.engram import CONV_TAPS, Engram, Tables, multiplier, primes_from
from spider.tokens import BYTES


def ngram_rows(tokens_BT: torch.Tensor, orders: list[int], primes: list[int]) -> torch.Tensor:
    return Tables(orders, primes, 1, std=0.0).rows(tokens_BT)


def wrap(value: int) -> int:
    """Wrap an integer to signed 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def oracle(tokens: list[int], t: int, order: int, multipliers: Sequence[int]) -> int:
    """Return the mix of the n-gram that ends at t, computed with unbounded integers."""
    start = max((i for i in range(t + 1) if tokens[i] == BYTES.bos), default=0)
    mixed = 0
    for i in range(order):
        byte = tokens[t - i] if t - i >= start else BYTES.pad
        mixed ^= wrap(byte * multipliers[i])
    return mixed


INT64 = st.one_of(st.sampled_from([-(1 << 63), (1 << 63) - 1, -1, 0]), st.integers(-(1 << 63), (1 << 63) - 1))
IDS = st.one_of(st.just(BYTES.bos), st.integers(0, BYTES.size - 1))


@given(
    tokens=st.lists(IDS, min_size=1, max_size=30),
    multipliers=st.lists(INT64, min_size=8, max_size=8),
    orders=st.lists(st.integers(1, 8), min_size=1, unique=True),
    start=st.integers(2, 200),
)
def test_hashes_equal_big_integers_negative_ones_included(tokens, multipliers, orders, start):
    primes = primes_from(start, 2 * len(orders))
    with mock.patch("spider.model.spider.engram.multiplier", multipliers.__getitem__):
        rows = ngram_rows(torch.tensor([tokens]), orders, primes)
    mixes = [[oracle(tokens, t, order, multipliers) for order in orders] for t in range(len(tokens))]
    assert rows[0].tolist() == [
        [mix[g // 2] % p + sum(primes[:g]) for g, p in enumerate(primes)] for mix in mixes
    ]


def test_the_fixed_multipliers_make_negative_and_positive_hashes():
    tokens = torch.randint(0, 256, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    mixes = [oracle(tokens, t, 3, [multiplier(i) for i in range(3)]) for t in range(50)]
    assert ngram_rows(torch.tensor([tokens]), [3], [101])[0, :, 0].tolist() == [mix % 101 for mix in mixes]
    assert min(mixes) < 0 < max(mixes)


def test_multipliers_are_odd_distinct_and_signed():
    values = [multiplier(i) for i in range(16)]
    assert all(v % 2 and -(1 << 63) <= v < 1 << 63 for v in values)
    assert len(set(values)) == 16
    assert min(values) < 0 < max(values)


def test_ngrams_do_not_reach_across_a_document_start():
    def rows(tokens_BT: torch.Tensor) -> torch.Tensor:
        return ngram_rows(tokens_BT, [3, 6], primes_from(81_307, 2))

    tokens = torch.randint(0, 256, (1, 30))
    tokens[0, 12] = BYTES.bos
    changed = tokens.clone()
    changed[0, :12] = 7
    before, after = rows(tokens), rows(changed)
    assert torch.equal(before[0, 12:], after[0, 12:])
    assert not torch.equal(before[0, :12], after[0, :12])
    alone = rows(tokens[:, 12:])
    assert torch.equal(before[:, 12:], alone), "a document hashes the same wherever it stands"


def test_primes_are_the_next_ones():
    assert primes_from(14, 4) == [17, 19, 23, 29]
    primes = primes_from(81_307, 32)
    assert (primes[0], primes[-1], sum(primes)) == (81_307, 81_671, 2_607_934)


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
