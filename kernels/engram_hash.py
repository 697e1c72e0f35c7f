"""Engram hash: the table rows of the byte n-grams that end at each byte.

With ``x_i`` the id i places back, PAD where that lies before the document's BOS or before the window, and m_i
fixed odd 64-bit multipliers, everything in wrapping int64::

    mix_n = x_0 m_0 ^ x_1 m_1 ^ ... ^ x_{n-1} m_{n-1}
    row_g = mix_n mod prime_g + sum over f < g of prime_f

The remainder is floored, so a negative mix gives a row, too. Each order n has as many tables g as the others,
side by side. Integers only: the same rows on every device and every run.

Layout: one launch, for six a place back and two a table in torch. A thread takes a byte of a window. It looks
the few places back itself and stops at the first BOS, which needs no scan for where documents start; its
neighbours' loads are in the L1 cache. Multipliers and primes are constants of the compiled kernel, so that a
remainder is a product and a shift, not a 64-bit division; the price is a compilation for each set of primes.
Triton's ``%`` truncates, which the kernel corrects. Each table is stored by itself, 8 bytes in every 8 G, so
the L2 cache puts the rows together. And rows are made for every byte; an index of patches reads only those of
closing bytes, but to pick them here would tie the op to the chunking.

Letters: B batch, T bytes, N = B T, O orders, G = O * heads tables.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.switch import jit, op, tl

Integers = Sequence[int]

BLOCK = 128
"""Bytes of one program, one a thread."""


def engram_hash_torch(
    ids_BT: Tensor, orders: Integers, multipliers: Integers, primes: Integers, bos: int, pad: int
) -> Tensor:
    """``engram_hash`` in torch: document starts by a running maximum, a pass for each place and table."""
    T, ids_BT = ids_BT.shape[1], ids_BT.long()
    t = torch.arange(T, device=ids_BT.device)
    start_BT = torch.where(ids_BT == bos, t, 0).cummax(1).values
    mix_BT = torch.zeros_like(ids_BT)
    by_order = {}
    for i in range(max(orders)):
        back_BT = F.pad(ids_BT, (i, 0), value=pad)[:, :T]
        mix_BT = mix_BT ^ torch.where(t - i >= start_BT, back_BT, pad) * multipliers[i]
        by_order[i + 1] = mix_BT
    heads, offsets = len(primes) // len(orders), accumulate(primes, initial=0)
    tables = enumerate(zip(primes, offsets, strict=False))
    rows = [by_order[orders[g // heads]] % prime + offset for g, (prime, offset) in tables]
    return torch.stack(rows, dim=-1)


@jit
def _hash(
    ids,
    out,
    T,
    ORDERS: tl.constexpr,
    MULTIPLIERS: tl.constexpr,
    PRIMES: tl.constexpr,
    OFFSETS: tl.constexpr,
    DEPTH: tl.constexpr,
    BOS: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(0).to(tl.int64) * T + t
    HEADS: tl.constexpr = len(PRIMES) // len(ORDERS)
    reached = t < T
    mix = tl.zeros((BLOCK,), tl.int64)
    for i in tl.static_range(DEPTH):
        reached = reached & (t >= i)
        x = tl.load(ids + n - i, mask=reached, other=PAD).to(tl.int64)
        mix = mix ^ (x * MULTIPLIERS[i])
        reached = reached & (x != BOS)
        for o in tl.static_range(len(ORDERS)):
            if ORDERS[o] == i + 1:
                for g in tl.static_range(o * HEADS, o * HEADS + HEADS):
                    row = mix % PRIMES[g]
                    row = tl.where(row < 0, row + PRIMES[g], row) + OFFSETS[g]
                    tl.store(out + n * len(PRIMES) + g, row, mask=t < T)


def _launch(out_BTG: Tensor, ids_BT: Tensor, *numbers) -> None:
    (B, T), (*of_tables, bos, pad) = ids_BT.shape, numbers
    if B * T:
        sizes = dict(BOS=bos, PAD=pad, BLOCK=BLOCK)
        _hash[B, -(-T // BLOCK)](ids_BT, out_BTG, T, **constants(*of_tables), **sizes)


def constants(orders: Integers, multipliers: Integers, primes: Integers) -> dict:
    """What the kernel is compiled for."""
    return dict(
        ORDERS=tuple(orders),
        MULTIPLIERS=tuple(multipliers),
        PRIMES=tuple(primes),
        OFFSETS=tuple(accumulate(primes, initial=0))[: len(primes)],
        DEPTH=max(orders),
    )


@op("engram_hash", _launch, engram_hash_torch)
def engram_hash(
    ids_BT: Tensor, orders: Integers, multipliers: Integers, primes: Integers, bos: int, pad: int
) -> Tensor:
    """Rows (B, T, G), int64, of one embedding of ``sum(primes)`` rows, for ``ids_BT``, int32 or int64.

    ``orders``: lengths of the n-grams. ``multipliers``: signed 64-bit, the i-th for the id i places back.
    ``primes``: rows of each table, the heads of an order side by side. No derivative. Raises ``ValueError``
    for ids of another shape or dtype, and for numbers that do not fit each other.
    """
    if ids_BT.dim() != 2 or ids_BT.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"engram_hash: ids must be (B, T), int32 or int64, here {tuple(ids_BT.shape)} {ids_BT.dtype}"
        )
    if not orders or min(orders) < 1 or len(multipliers) < max(orders):
        raise ValueError(
            f"engram_hash: orders {list(orders)} must be positive, at least one, and at most the number of "
            f"multipliers, {len(multipliers)}"
        )
    if not primes or len(primes) % len(orders) or min(primes) < 1:
        raise ValueError(
            f"engram_hash: {len(primes)} primes must be positive and as many for each of {len(orders)} orders"
        )
    return ids_BT.new_empty(*ids_BT.shape, len(primes), dtype=torch.int64)
