"""Work on many matrices that processes share: each does its part of them, and is given what others made.

Matrix k of all that are given goes to the process of rank k modulo their number, whether every process holds
all of it or a slice; that is a function of the order they come in, so nobody has to be told. What crosses is
packed, so that however many shapes there are, there is one exchange (copies) or two (slices).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from spider.processes.parallel import is_cut
from spider.processes.world import World


def share_out(
    operation: Callable[[Tensor], Tensor],
    stacks: Sequence[Tensor],
    patterns: Sequence[Tensor],
    world: World,
    first: int = 0,
) -> list[Tensor]:
    """What ``operation`` makes of each stack of matrices (N, r, c), matrix by matrix and of the same shape;
    each process is given what it holds of that.

    Args:
        stacks: all of the same dtype. Where a pattern is cut, rows of the matrices: those this process holds.
        patterns: a parameter for each, which says how it is held: as copies, or cut by rows. A stack of
            parameters (E, r, c) that are cut between their matrices needs no exchange.
        first: rank, modulo the number of processes, of who does the first matrix.
    """
    if world.size == 1:
        return [operation(stack) for stack in stacks]
    between = [is_cut(pattern) and pattern.ndim == 3 for pattern in patterns]
    shared = [i for i, alone in enumerate(between) if not alone]
    made = {i: operation(stacks[i]) for i, alone in enumerate(between) if alone}
    given = [stacks[i] for i in shared]
    if shared and is_cut(patterns[shared[0]]):
        rows = [patterns[i].shape[0] for i in shared]
        made |= zip(shared, _share_slices(operation, given, rows, world, first), strict=True)
    elif shared:
        made |= zip(shared, _share_copies(operation, given, world, first), strict=True)
    return [made[i] for i in range(len(stacks))]


def _owners(stacks: Sequence[Tensor], world: World, first: int) -> list[list[int]]:
    """Rank of who does each matrix of each stack."""
    owners = []
    for stack in stacks:
        owners.append([(first + i) % world.size for i in range(len(stack))])
        first += len(stack)
    return owners


def _share_copies(
    operation: Callable[[Tensor], Tensor], stacks: list[Tensor], world: World, first: int
) -> list[Tensor]:
    """Every process has all of what was made gathered: as many values as the stacks hold."""
    owners = _owners(stacks, world, first)
    held = [0] * world.size
    for stack, owner_N in zip(stacks, owners, strict=True):
        for rank in owner_N:
            held[rank] += stack[0].numel()
    mine = stacks[0].new_zeros(max(held))  # who has less to send sends zeros behind it
    everywhere = mine.new_empty(world.size, max(held))
    at = 0
    for stack, owner_N in zip(stacks, owners, strict=True):
        if n := owner_N.count(world.rank):
            made_nrc = operation(stack[owner_N.index(world.rank) :: world.size])
            mine[at : at + made_nrc.numel()].view(n, *stack.shape[1:]).copy_(made_nrc)
            at += made_nrc.numel()
    dist.all_gather([*everywhere.unbind()], mine)
    ends, made = [0] * world.size, []
    for stack, owner_N in zip(stacks, owners, strict=True):
        matrices = []
        for rank in owner_N:
            begin, ends[rank] = ends[rank], ends[rank] + stack[0].numel()
            matrices.append(everywhere[rank, begin : ends[rank]].view(stack.shape[1:]))
        made.append(torch.stack(matrices))
    return made


def _share_slices(
    operation: Callable[[Tensor], Tensor], stacks: list[Tensor], rows: list[int], world: World, first: int
) -> list[Tensor]:
    """Slices go to who does their matrix, and slices of what was made come back: twice as many values as
    this process holds."""
    owners, size = _owners(stacks, world, first), world.size
    most = [-(-total // size) for total in rows]  # rows of the first process; others send zeros behind theirs
    parcels: list[list[Tensor]] = [[] for _ in range(size)]
    for stack, owner_N, padded in zip(stacks, owners, most, strict=True):
        for matrix_rc, rank in zip(stack, owner_N, strict=True):
            parcels[rank].append(pad(matrix_rc, (0, 0, 0, padded - len(matrix_rc))).flatten())
    sizes = [sum(parcel.numel() for parcel in theirs) for theirs in parcels]
    sent = torch.cat([parcel for theirs in parcels for parcel in theirs])
    got_WM = sent.new_empty(size, sizes[world.rank])
    dist.all_to_all_single(got_WM.view(-1), sent, [sizes[world.rank]] * size, sizes)
    at = 0
    for stack, owner_N, padded, total in zip(stacks, owners, most, rows, strict=True):
        if n := owner_N.count(world.rank):
            slices_Wnrc = got_WM[:, at : at + n * padded * stack.size(2)].unflatten(1, (n, padded, -1))
            made_nrc = operation(slices_Wnrc.transpose(0, 1).flatten(1, 2)[:, :total])
            made_nrc = pad(made_nrc, (0, 0, 0, size * padded - total))
            slices_Wnrc.copy_(made_nrc.unflatten(1, (size, padded)).transpose(0, 1))
            at += n * padded * stack.size(2)
    dist.all_to_all_single(sent, got_WM.view(-1), sizes, [sizes[world.rank]] * size)
    back = [
        iter(theirs.split([parcel.numel() for parcel in parcels[rank]]))
        for rank, theirs in enumerate(sent.split(sizes))
    ]
    return [
        torch.stack([next(back[rank]).view(padded, -1)[: stack.size(1)] for rank in owner_N])
        for stack, owner_N, padded in zip(stacks, owners, most, strict=True)
    ]
