"""Compare the hash with unbounded integers in plain Python, and its kernel with its twin."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.engram_hash import BLOCK, engram_hash, engram_hash_torch
from spider.model.spider.engram import multiplier, primes_from
from spider.tokens import BYTES
from tests.kernels.twins import Pair


class Case(NamedTuple):
    ids: Tensor
    orders: list[int]
    multipliers: list[int]
    primes: list[int]
    bos: int = BYTES.bos
    pad: int = BYTES.pad


def case(ids: Tensor, orders: list[int], heads: int, start: int) -> Case:
    """Return arguments with the model's multipliers and primes."""
    return Case(
        ids, orders, [multiplier(i) for i in range(max(orders))], primes_from(start, len(orders) * heads)
    )


@st.composite
def cases(draw) -> Case:
    """Draw few bytes, many BOS, windows shorter than the n-grams, unsorted orders, extreme multipliers."""
    B, T = draw(st.integers(0, 3)), draw(st.integers(0, 12))
    byte = st.one_of(st.sampled_from([BYTES.bos, BYTES.bos, BYTES.pad, 0, 97]), st.integers(0, 271))
    ids = torch.tensor(draw(st.lists(byte, min_size=B * T, max_size=B * T)), dtype=torch.int64)
    orders = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True))
    start = draw(st.sampled_from([2, 81_307, 2**31, 2**40]))
    made = case(ids.view(B, T), orders, draw(st.integers(1, 3)), start if start < 2**31 else 2)
    if start >= 2**31:
        # The arithmetic works for any modulus; large primes take long to find.
        made = made._replace(primes=[start + 1 + 2 * g for g in range(len(made.primes))])
    if draw(st.booleans()):
        extreme = st.sampled_from([-(2**63), 2**63 - 1, -1, 2**62])
        made = made._replace(multipliers=[draw(extreme) for _ in made.multipliers])
    return made._replace(ids=made.ids.to(draw(st.sampled_from([torch.int32, torch.int64]))))


LONG = torch.randint(90, 110, (2, BLOCK + 3), generator=torch.Generator().manual_seed(0))
LONG[:, ::97] = BYTES.bos
AS_CONFIGURED = case(LONG, [3, 4, 5, 6], 4, 81_307)


def by_hand(made: Case) -> list[list[list[int]]]:
    """Compute unbounded sums and products, cut to 64 bits once at the end of an n-gram."""
    rows = []
    for ids in made.ids.tolist():
        rows.append([])
        for t in range(len(ids)):
            start = max((s for s in range(t + 1) if ids[s] == made.bos), default=0)
            of_byte, offset, heads = [], 0, len(made.primes) // len(made.orders)
            for g, prime in enumerate(made.primes):
                mix = 0
                for i in range(made.orders[g // heads]):
                    mix ^= (ids[t - i] if t - i >= start else made.pad) * made.multipliers[i]
                signed = (mix + 2**63) % 2**64 - 2**63
                of_byte.append(signed % prime + offset)
                offset += prime
            rows[-1].append(of_byte)
    return rows


@settings(max_examples=60)
@given(cases())
@example(AS_CONFIGURED)
def test_rows_are_those_of_unbounded_integers(made):
    rows_BTG = engram_hash(*made)
    assert rows_BTG.dtype == torch.int64 and rows_BTG.shape == (*made.ids.shape, len(made.primes))
    assert rows_BTG.tolist() == by_hand(made)


HASH = Pair(
    engram_hash, engram_hash_torch, cases(), [AS_CONFIGURED, AS_CONFIGURED._replace(ids=LONG[:0].int())]
)


def test_no_ngram_reaches_across_a_document():
    ids = torch.tensor([[97, 98, BYTES.bos, 99, 100], [1, 2, BYTES.bos, 99, 100]])
    first, second = engram_hash(*case(ids, [6], 2, 81_307))
    assert torch.equal(first[2:], second[2:]) and (first[:2] != second[:2]).all()
