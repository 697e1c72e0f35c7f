"""Distribute work on many matrices over processes, and exchange the results.

Process k modulo W computes matrix k, for W processes, whether every process holds the whole matrix or a
slice. The assignment depends only on the order of the matrices, so it needs no communication. All shapes are
packed into one message: one exchange for replicated matrices, two for sharded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
    alone = [is_dtensor(pattern) and pattern.ndim == 3 for pattern in patterns]
    results = {i: operation(stacks[i]) for i in range(len(stacks)) if alone[i]}
    shared = [i for i in range(len(stacks)) if not alone[i]]
    if shared:
        inputs = [stacks[i] for i in shared]
        shares = _shares(inputs, world, first)
        if is_dtensor(patterns[shared[0]]):
            rows = [patterns[i].shape[0] for i in shared]
            outputs = _distribute_slices(operation, inputs, rows, shares, world)
        else:
            outputs = _distribute_replicas(operation, inputs, shares, world)
        results.update(zip(shared, outputs, strict=True))
    return [results[i] for i in range(len(stacks))]


def _shares(stacks: Sequence[Tensor], world: World, first: int) -> list[list[slice]]:
    """Return for each stack the matrices that each rank computes."""
    shares = []
    for stack in stacks:
        shares.append([slice((rank - first) % world.size, None, world.size) for rank in range(world.size)])
        first += len(stack)
    return shares


def _pack(parts: Iterable[Tensor]) -> Tensor:
    """Return the values of several tensors as one message."""
    return torch.cat([part.flatten() for part in parts])


def _unpack(messages: Iterable[Tensor], stacks: list[Tensor], shares: list[list[slice]]) -> list[Tensor]:
    """Return stacks of the shapes of ``stacks`` from the message of each rank, which holds its shares."""
    results = [stack.new_empty(stack.shape) for stack in stacks]
    for rank, message in enumerate(messages):
        at = 0
        for result, share in zip(results, shares, strict=True):
            part = result[share[rank]]
            part.copy_(message[at : at + part.numel()].view(part.shape))
            at += part.numel()
    return results


def _distribute_replicas(
    operation: Callable[[Tensor], Tensor], stacks: list[Tensor], shares: list[list[slice]], world: World
) -> list[Tensor]:
    """Compute this process's matrices and gather all results: as many values as the stacks hold."""
    pairs = list(zip(stacks, shares, strict=True))
    sizes = [sum(stack[share[rank]].numel() for stack, share in pairs) for rank in range(world.size)]
    own = _pack(operation(stack[share[world.rank]]) for stack, share in pairs)
    own = pad(own, (0, max(sizes) - len(own)))  # messages must have equal sizes
    gathered_WM = own.new_empty(world.size, len(own))
    dist.all_gather([*gathered_WM.unbind()], own)
    return _unpack(gathered_WM, stacks, shares)


def _distribute_slices(
    operation: Callable[[Tensor], Tensor],
    stacks: list[Tensor],
    rows: list[int],
    shares: list[list[slice]],
    world: World,
) -> list[Tensor]:
    """Send slices to the owner of their matrix and receive slices of the results: twice as many values as
    this process holds."""
    size = world.size
    most = [-(-total // size) for total in rows]  # rows of the first process; the others pad with zeros
    padded = [pad(stack, (0, 0, 0, m - stack.size(1))) for stack, m in zip(stacks, most, strict=True)]
    pairs = list(zip(padded, shares, strict=True))
    messages = [_pack(stack[share[rank]] for stack, share in pairs) for rank in range(size)]
    sizes = [len(message) for message in messages]
    sent = torch.cat(messages)
    received_WM = sent.new_empty(size, sizes[world.rank])
    dist.all_to_all_single(received_WM.view(-1), sent, [sizes[world.rank]] * size, sizes)
    at = 0
    for (stack, share), total in zip(pairs, rows, strict=True):
        own_nrc = stack[share[world.rank]]
        slices_Wnrc = received_WM[:, at : at + own_nrc.numel()].view(size, *own_nrc.shape)
        y_nrc = operation(slices_Wnrc.transpose(0, 1).flatten(1, 2)[:, :total])
        y_nrc = pad(y_nrc, (0, 0, 0, size * stack.size(1) - total))
        slices_Wnrc.copy_(y_nrc.unflatten(1, (size, stack.size(1))).transpose(0, 1))
        at += own_nrc.numel()
    dist.all_to_all_single(sent, received_WM.view(-1), sizes, [sizes[world.rank]] * size)
    results = _unpack(sent.split(sizes), padded, shares)
    return [result[:, : stack.size(1)].contiguous() for result, stack in zip(results, stacks, strict=True)]
