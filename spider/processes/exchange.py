"""Distribute work on many matrices over processes, and exchange the results.

Process k modulo W computes matrix k, for W processes, whether every process holds the whole matrix or a
slice. The assignment depends only on the order of the matrices, so it needs no communication. All shapes are
packed into one message: one exchange for replicated matrices, two for sharded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from spider.processes.parallel import is_dtensor
from spider.processes.world import World


def distribute(
    operation: Callable[[Tensor], Tensor],
    stacks: Sequence[Tensor],
    patterns: Sequence[Tensor],
    world: World,
    first: int = 0,
) -> list[Tensor]:
    """Apply ``operation`` to stacks of matrices (N, r, c), each matrix on one process.

    Args:
        operation: maps each matrix of a stack to one of the same shape.
        stacks: all of the same dtype. If the pattern is sharded by rows, this process's rows of the matrices.
        patterns: a parameter for each stack that is replicated or sharded as the stack is. A parameter
            (E, r, c) that is sharded between its matrices needs no exchange.
        first: rank, modulo the number of processes, that computes the first matrix.

    Returns:
        For each stack the results, as this process holds the stack.
    """
    if world.size == 1:
        return [operation(stack) for stack in stacks]
    results: dict[int, Tensor] = {}
    shared = []
    for i, pattern in enumerate(patterns):
        if is_dtensor(pattern) and pattern.ndim == 3:
            results[i] = operation(stacks[i])
        else:
            shared.append(i)
    if shared:
        inputs = [stacks[i] for i in shared]
        if is_dtensor(patterns[shared[0]]):
            rows = [patterns[i].shape[0] for i in shared]
            outputs = _distribute_slices(operation, inputs, rows, world, first)
        else:
            outputs = _distribute_replicas(operation, inputs, world, first)
        results.update(zip(shared, outputs, strict=True))
    return [results[i] for i in range(len(stacks))]


def _owners(stacks: Sequence[Tensor], world: World, first: int) -> list[list[int]]:
    """Return for each stack the rank that computes each of its matrices."""
    owners = []
    for stack in stacks:
        owners.append([(first + i) % world.size for i in range(len(stack))])
        first += len(stack)
    return owners


def _distribute_replicas(
    operation: Callable[[Tensor], Tensor], stacks: list[Tensor], world: World, first: int
) -> list[Tensor]:
    """Compute this process's matrices and gather all results: as many values as the stacks hold."""
    owners = _owners(stacks, world, first)
    sizes = [0] * world.size
    for stack, owner_N in zip(stacks, owners, strict=True):
        for rank in owner_N:
            sizes[rank] += stack[0].numel()
    own = stacks[0].new_zeros(max(sizes))  # shorter messages are padded with zeros
    gathered = own.new_empty(world.size, max(sizes))
    at = 0
    for stack, owner_N in zip(stacks, owners, strict=True):
        if n := owner_N.count(world.rank):
            y_nrc = operation(stack[owner_N.index(world.rank) :: world.size])
            own[at : at + y_nrc.numel()].view(n, *stack.shape[1:]).copy_(y_nrc)
            at += y_nrc.numel()
    dist.all_gather([*gathered.unbind()], own)
    ends = [0] * world.size
    results = []
    for stack, owner_N in zip(stacks, owners, strict=True):
        matrices = []
        for rank in owner_N:
            begin = ends[rank]
            ends[rank] += stack[0].numel()
            matrices.append(gathered[rank, begin : ends[rank]].view(stack.shape[1:]))
        results.append(torch.stack(matrices))
    return results


def _distribute_slices(
    operation: Callable[[Tensor], Tensor], stacks: list[Tensor], rows: list[int], world: World, first: int
) -> list[Tensor]:
    """Send slices to the owner of their matrix and receive slices of the results: twice as many values as
    this process holds."""
    owners, size = _owners(stacks, world, first), world.size
    most = [-(-total // size) for total in rows]  # rows of the first process; the others pad with zeros
    parcels: list[list[Tensor]] = [[] for _ in range(size)]
    for stack, owner_N, padded in zip(stacks, owners, most, strict=True):
        for matrix_rc, rank in zip(stack, owner_N, strict=True):
            parcels[rank].append(pad(matrix_rc, (0, 0, 0, padded - len(matrix_rc))).flatten())
    sizes = [sum(part.numel() for part in parcel) for parcel in parcels]
    sent = torch.cat([part for parcel in parcels for part in parcel])
    received_WM = sent.new_empty(size, sizes[world.rank])
    dist.all_to_all_single(received_WM.view(-1), sent, [sizes[world.rank]] * size, sizes)
    at = 0
    for stack, owner_N, padded, total in zip(stacks, owners, most, rows, strict=True):
        if n := owner_N.count(world.rank):
            slices_Wnrc = received_WM[:, at : at + n * padded * stack.size(2)].unflatten(1, (n, padded, -1))
            y_nrc = operation(slices_Wnrc.transpose(0, 1).flatten(1, 2)[:, :total])
            y_nrc = pad(y_nrc, (0, 0, 0, size * padded - total))
            slices_Wnrc.copy_(y_nrc.unflatten(1, (size, padded)).transpose(0, 1))
            at += n * padded * stack.size(2)
    dist.all_to_all_single(sent, received_WM.view(-1), sizes, [sizes[world.rank]] * size)
    returned = [
        iter(values.split([part.numel() for part in parcels[rank]]))
        for rank, values in enumerate(sent.split(sizes))
    ]
    return [
        torch.stack([next(returned[rank]).view(padded, -1)[: stack.size(1)] for rank in owner_N])
        for stack, owner_N, padded in zip(stacks, owners, most, strict=True)
    ]
