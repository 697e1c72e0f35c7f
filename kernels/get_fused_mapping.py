"""Layout of the fused buffer: the rows of each expert are contiguous there.

Token n's k-th choice is entry ``n K + k``. Entries are sorted by expert and keep their order within an
expert, so the mapping is the same on every run. Each expert's segment is padded to a multiple of
``alignment`` (grouped products in FP8 require 16). An expert without tokens has an empty segment. An index
outside 0..E-1 is masked and gets no row.

P must be known before the indices are, because otherwise the host waits for the device. So P is the largest
number that N, K, E and the alignment allow, and the rows after the last segment are padding.

Launches dominate the cost, so there are only two. The first counts each block's entries by expert. In the
second, every block sums the counts of all blocks (E integers per 1024 entries, from the L2 cache). This gives
the segments and the rank of its first entry in each. It numbers its own entries by a cumulative sum over a
one-hot tile. Further programs mark the padding. A sort would need several launches and passes. ``route``
counts its choices itself and needs only the second.

Letters: I = N K entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.switch import check_shapes, jit, op, tile, tl

BLOCK = 1024
"""Entries, or rows of the result, of one program."""
STEP = 4096
"""Elements of a tile of entries and experts."""


class FusedMapping(NamedTuple):
    """Maps, all int32; -1 marks padding in maps from rows, and masked entries in ``token_to_pos_NK``."""

    pos_to_expert_P: Tensor
    pos_to_token_P: Tensor
    pos_to_entry_P: Tensor
    """``token * K + k``, the index of the row's weight among all weights."""
    token_to_pos_NK: Tensor
    start_E: Tensor
    end_E: Tensor
    """Ends of the padded segments: the offsets that ``torch.nn.functional.grouped_mm`` takes."""
    count_E: Tensor
    """Rows that are not padding."""


def static_rows(entries: int, experts: int, alignment: int) -> int:
    """Return the most rows that the entries can need: each expert with entries pads at most alignment - 1."""
    return (entries + min(experts, entries) * (alignment - 1)) // alignment * alignment


def get_fused_mapping_torch(chosen_NK: Tensor, experts: int, alignment: int = 1) -> FusedMapping:
    """Compute ``get_fused_mapping`` by a stable sort; masked entries form one more expert, which is cut
    off."""
    N, K = chosen_NK.shape
    device = chosen_NK.device
    P = static_rows(N * K, experts, alignment)
    expert_I = chosen_NK.flatten().long()
    expert_I = torch.where((expert_I >= 0) & (expert_I < experts), expert_I, experts)
    sorted_I, entry_I = expert_I.sort(stable=True)
    count = expert_I.new_zeros(experts + 1).scatter_add(0, expert_I, torch.ones_like(expert_I))
    count_E = count[:experts]
    padded_E = (count_E + alignment - 1) // alignment * alignment
    end_E = padded_E.cumsum(0)
    start_E = end_E - padded_E
    rank_I = torch.arange(N * K, device=device) - (count.cumsum(0) - count)[sorted_I]
    masked_I = sorted_I == experts
    pos_I = torch.where(masked_I, P, start_E[sorted_I.clamp(max=experts - 1)] + rank_I)

    def at_rows(value_I: Tensor) -> Tensor:
        return torch.full((P + 1,), -1, device=device).scatter(0, pos_I, value_I)[:P].to(torch.int32)

    token_to_pos_I = torch.empty_like(pos_I).scatter(0, entry_I, pos_I.masked_fill(masked_I, -1))
    maps = at_rows(sorted_I), at_rows(entry_I // max(K, 1)), at_rows(entry_I), token_to_pos_I.view(N, K)
    return FusedMapping(*(m.to(torch.int32) for m in (*maps, start_E, end_E, count_E)))


@jit
def _experts_of(chosen, entry, last, E):
    """Return the experts that the entries before ``last`` chose, -1 where masked."""
    e = tl.load(chosen + entry, mask=entry < last, other=-1)
    return tl.where((e >= 0) & (e < E), e, -1).to(tl.int32)


@jit
def count_blocks(chosen, counts, entries, E, WIDE_E: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Count the choices of each expert among each block's entries, ``counts`` (blocks, WIDE_E) int32."""
    block, experts = tl.program_id(0), tl.arange(0, WIDE_E)
    count = tl.zeros((WIDE_E,), tl.int32)
    last = min(block * BLOCK + BLOCK, entries)
    for i in range(block * BLOCK, last, STEP):
        e = _experts_of(chosen, i + tl.arange(0, STEP), last, E)
        count += tl.sum((e[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts + block * WIDE_E + experts, count)


@jit
def sum_blocks(counts, until, blocks, WIDE_E: tl.constexpr, STEP: tl.constexpr):
    """Return the counts of each expert in all blocks, and in those before the block ``until``."""
    experts = tl.arange(0, WIDE_E)
    total, before = tl.zeros((WIDE_E,), tl.int32), tl.zeros((WIDE_E,), tl.int32)
    for i in range(0, blocks, STEP):
        block = i + tl.arange(0, STEP)[:, None]
        count = tl.load(counts + block * WIDE_E + experts[None, :], mask=block < blocks, other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where(block < until, count, 0), axis=0)
    return total, before


@jit
def _place(
    chosen,
    counts,
    pos_to_expert,
    pos_to_token,
    pos_to_entry,
    token_to_pos,
    start_of,
    end_of,
    count_of,
    entries,
    P,
    E,
    blocks,
    K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE_E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    block, experts = tl.program_id(0), tl.arange(0, WIDE_E)
    total, before = sum_blocks(counts, block, blocks, WIDE_E, STEP)
    padded = (total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    end = tl.cumsum(padded, axis=0)
    start = end - padded
    if block == 0:
        if start_of is not None:
            tl.store(start_of + experts, start, mask=experts < E)
        tl.store(end_of + experts, end, mask=experts < E)
        tl.store(count_of + experts, total, mask=experts < E)
    if block < blocks:
        place, last = start + before, min(block * BLOCK + BLOCK, entries)
        for i in range(block * BLOCK, last, STEP):
            entry = i + tl.arange(0, STEP)
            e = _experts_of(chosen, entry, last, E)
            hit = (e[:, None] == experts[None, :]).to(tl.int32)
            # The cumulative sum includes the entry itself, hence the -1.
            pos = tl.sum(hit * (place[None, :] + tl.cumsum(hit, axis=0) - 1), axis=1)
            real = e >= 0
            tl.store(token_to_pos + entry, tl.where(real, pos, -1), mask=entry < last)
            tl.store(pos_to_expert + pos, e, mask=real)
            if pos_to_token is not None:
                tl.store(pos_to_token + pos, entry // K, mask=real)
                tl.store(pos_to_entry + pos, entry, mask=real)
            place += tl.sum(hit, axis=0)
    else:
        first = (block - blocks) * BLOCK
        for i in range(first, min(first + BLOCK, P), STEP):
            p = i + tl.arange(0, STEP)
            filled = (p[:, None] >= start[None, :]) & (p[:, None] < (start + total)[None, :])
            padding = (p < P) & (tl.sum(filled.to(tl.int32), axis=1) == 0)
            nothing = tl.full((STEP,), -1, tl.int32)
            tl.store(pos_to_expert + p, nothing, mask=padding)
            if pos_to_token is not None:
                tl.store(pos_to_token + p, nothing, mask=padding)
                tl.store(pos_to_entry + p, nothing, mask=padding)


def block_counts(chosen_NK: Tensor, experts: int) -> Tensor:
    """Launch ``count_blocks``; return the counts (blocks, WIDE_E), at least one block."""
    wide = tile(experts)
    blocks = max(-(-chosen_NK.numel() // BLOCK), 1)
    counts = chosen_NK.new_empty(blocks, wide, dtype=torch.int32)
    sizes = dict(WIDE_E=wide, BLOCK=BLOCK, STEP=max(STEP // wide, 1))
    count_blocks[blocks,](chosen_NK, counts, chosen_NK.numel(), experts, **sizes)
    return counts


def place(
    maps: Sequence[Tensor | None], chosen_NK: Tensor, counts: Tensor, block: int, experts: int, alignment: int
) -> None:
    """Fill the fields of a ``FusedMapping``. The tokens and entries of rows, and the starts, may be None.

    Args:
        counts: choices of each expert among each ``block`` entries, (blocks, WIDE_E), at least one block.
    """
    pos_to_expert_P = maps[0]
    assert pos_to_expert_P is not None
    P, (blocks, wide) = len(pos_to_expert_P), counts.shape
    _place[blocks - (-P // block),](
        chosen_NK,
        counts,
        *maps,
        chosen_NK.numel(),
        P,
        experts,
        blocks,
        K=chosen_NK.shape[1],
        ALIGNMENT=alignment,
        WIDE_E=wide,
        BLOCK=block,
        STEP=max(STEP // wide, 1),
    )


def _launch(mapping: FusedMapping, chosen_NK: Tensor, experts: int, alignment: int) -> None:
    place(mapping, chosen_NK, block_counts(chosen_NK, experts), BLOCK, experts, alignment)


@op("get_fused_mapping", _launch, get_fused_mapping_torch)
def fused_mapping(
    chosen_NK: Tensor, experts: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of ``FusedMapping`` at their static size. This is the registered op."""
    check_shapes("get_fused_mapping", chosen_NK=chosen_NK)
    if experts < 1 or alignment < 1:
        raise ValueError(
            f"get_fused_mapping: experts {experts} and alignment {alignment} must be positive numbers"
        )
    N, K = chosen_NK.shape
    P = static_rows(N * K, experts, alignment)
    shapes = (P,), (P,), (P,), (N, K), (experts,), (experts,), (experts,)
    return FusedMapping(*(chosen_NK.new_empty(shape, dtype=torch.int32) for shape in shapes))


def get_fused_mapping(chosen_NK: Tensor, experts: int, alignment: int = 1) -> FusedMapping:
    """Return the layout of each expert's rows for the choices ``chosen_NK``, int32 or int64, -1 where masked.

    Raises:
        ValueError: the shape is not (N, K), or a number is not positive.
    """
    return FusedMapping(*fused_mapping(chosen_NK, experts, alignment))
