"""Engram hash: the table rows of the byte n-grams that end at each byte.

Let ``x_i`` be the id i positions back, or PAD before the document's BOS or the window, and m_i fixed odd
64-bit multipliers. In wrapping int64 arithmetic::

    mix_n = x_0 m_0 ^ x_1 m_1 ^ ... ^ x_{n-1} m_{n-1}
    row_g = mix_n mod prime_g + sum over f < g of prime_f

The remainder is floored, so a negative mix gives a valid row. Each order n has the same number of tables g,
side by side. All arithmetic is on integers, so every device and every run give the same rows.

Layout: there is one launch. torch needs six per position back and two per table. A thread takes one byte of a
window. It reads the few earlier ids itself, from the L1 cache, and stops at the first BOS. So no scan has to
find the starts of documents. Multipliers and primes are constants of the compiled kernel. A remainder is then
a product and a shift instead of a 64-bit division, and each set of primes costs one compilation. Triton's
``%`` truncates, which the kernel corrects. Each table's rows are stored with a stride of 8 G bytes, and the
L2 cache combines them. Rows are computed for every byte, although patches read only those of closing bytes.
Selecting them here would tie the op to the chunking.

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
"""Bytes of one program, one per thread."""


def engram_hash_torch(
    ids_BT: Tensor, orders: Integers, multipliers: Integers, primes: Integers, bos: int, pad: int
) -> Tensor:
    """Compute ``engram_hash`` in torch: a running maximum finds document starts."""
    T = ids_BT.shape[1]
    ids_BT = ids_BT.long()
    t = torch.arange(T, device=ids_BT.device)
    start_BT = torch.where(ids_BT == bos, t, 0).cummax(1).values
    mix_BT = torch.zeros_like(ids_BT)
    by_order = {}
    for i in range(max(orders)):
        back_BT = F.pad(ids_BT, (i, 0), value=pad)[:, :T]
        mix_BT = mix_BT ^ torch.where(t - i >= start_BT, back_BT, pad) * multipliers[i]
        by_order[i + 1] = mix_BT
    heads = len(primes) // len(orders)
    tables = enumerate(zip(primes, accumulate(primes, initial=0), strict=False))
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
    B, T = ids_BT.shape
    orders, multipliers, primes, bos, pad = numbers
    if B * T:
        _hash[B, -(-T // BLOCK)](
            ids_BT, out_BTG, T, **constants(orders, multipliers, primes), BOS=bos, PAD=pad, BLOCK=BLOCK
        )


def constants(orders: Integers, multipliers: Integers, primes: Integers) -> dict:
    """Return the constants of the kernel that depend on the tables."""
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
    """Return int64 rows (B, T, G) of an embedding with ``sum(primes)`` rows, without a derivative.

    Args:
        ids_BT: int32 or int64.
        orders: lengths of the n-grams.
        multipliers: signed 64-bit numbers. The i-th belongs to the id i positions back.
        primes: number of rows of each table, the heads of an order side by side.

    Raises:
        ValueError: the ids have another shape or dtype, or the numbers do not fit each other.
    """
    if ids_BT.dim() != 2 or ids_BT.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"engram_hash: ids must be (B, T), int32 or int64, are {tuple(ids_BT.shape)} {ids_BT.dtype}"
        )
    if not orders or min(orders) < 1 or len(multipliers) < max(orders):
        raise ValueError(
            f"engram_hash: orders {list(orders)} must be a non-empty list of numbers from 1 to the number of "
            f"multipliers, {len(multipliers)}"
        )
    if not primes or len(primes) % len(orders) or min(primes) < 1:
        raise ValueError(
            f"engram_hash: the {len(primes)} primes must be positive, and a multiple of {len(orders)} orders"
        )
    return ids_BT.new_empty(*ids_BT.shape, len(primes), dtype=torch.int64)
