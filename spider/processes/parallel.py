"""One model in several processes: replicated (DDP) or sharded (FSDP2).

Either way each process computes a part of the step's windows and the gradients are summed. The update is that
of one process up to the order of sums.

``ddp``   every process holds all weights, gradients and optimizer state. This sends the least.
``fsdp``  a process holds a slice of each of them (ZeRO, Rajbhandari et al., arXiv:1910.02054), cut along a
          parameter's first axis: rows of a matrix, experts of a stack.

FSDP exchanges unit by unit (`spider.model.interface.Model.units`). The weights of a unit are gathered before
its forward pass and again before its backward pass, and are freed after each. On a GPU the next unit's are on
their way meanwhile. The gradients of a unit are summed in fp32 and scattered after its backward pass.
So no process ever holds the whole model, nor its gradients. The price is exchange: a step of G micro-batches
gathers units 2 G times and scatters gradients G times, where gradients of the whole model would be scattered
once. A layer of a GPT that loops is gathered again for each loop.

Under autocast units are gathered in the dtype of the products, which have the same operands then. A table, or
a weight that several loops use, gets a gradient that is rounded once more. Vectors, routers, embedding and
head are gathered in fp32 for the whole pass, as is all of a model without units. With fp32 products units
change no bit, except where a layer of a GPT loops.

Any number of processes can resume from a checkpoint, replicated or sharded (`spider.checkpoints.parts`).

`distribute` computes on many matrices, each on one process, and exchanges the results. Process k modulo W
computes matrix k, for W processes, whether every process holds the whole matrix or a slice. The assignment
depends only on the order of the matrices, so it needs no communication. All shapes are packed into one
message: one exchange for replicated matrices, two for sharded ones.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from spider.processes.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from spider.model.interface import Model


class _Unit(nn.Module):
    """A module with FSDP's hooks around a call that uses its weights. They stay outside of compiled code."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[..., Any], *inputs: Any) -> Any:
        return call(*inputs)


def unit_parameters(model: Model) -> dict[nn.Module, list[set[nn.Parameter]]]:
    """Return the parameters of each part of the model's units: matrices and tables that need not be wide."""
    group_of = model.parameter_groups()
    narrow = {
        p
        for name, p in model.named_parameters()
        if group_of[name].role != "vector" and not model.keeps_wide(name.rpartition(".")[0])
    }
    return {
        unit: [narrow.intersection(part.parameters()) for part in parts]
        for unit, parts in model.units().items()
    }


def shard(model: Model, world: World, compute: torch.dtype = torch.float32) -> None:
    """Replace every parameter by this process's slice, in place. All have one dtype.

    Args:
        compute: dtype in which the weights of units are gathered.

    Raises:
        ValueError: a parameter has no axis along which it could be cut.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    for name, p in model.named_parameters():
        if not p.ndim:
            raise ValueError(
                f"parallel: fsdp cannot cut {name}, a scalar; give it the shape (1,), or set ddp"
            )
    mesh = init_device_mesh(world.device.type, (world.size,))
    narrow = MixedPrecisionPolicy(compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    units, owned = model.units(), unit_parameters(model)
    wrapped = {unit: [_Unit(part) for part in parts] for unit, parts in units.items()}
    fully_shard(
        model, mesh=mesh, ignored_params={p for parts in owned.values() for part in parts for p in part}
    )
    for part, own in zip(chain(*wrapped.values()), chain(*owned.values()), strict=True):
        fully_shard(part, mesh=mesh, mp_policy=narrow, ignored_params=set(part.parameters()) - own)
    ordered = cast(list[FSDPModule], [model, *chain(*wrapped.values())])
    for one, after in pairwise(ordered):
        one.set_modules_to_forward_prefetch([after])
    model.gathering = wrapped
    model.add_module("units_", nn.ModuleList(chain(*wrapped.values())))  # FSDP's root must contain them


def is_sharded(model: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether `shard` was applied. Without an import of FSDP it was not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether this process holds only a slice of the tensor."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def replicate(model: nn.Module, world: World) -> nn.Module:
    """Return the model wrapped in DDP, which averages gradients over all processes."""
    # DDP orders its buckets anew after the first step of each start, unless it looks for unused parameters.
    # With three or more processes another order is another sum, and a resumed training would end otherwise.
    keeps_buckets = world.size > 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its successor came in 2.12
        return DistributedDataParallel(
            model,
            device_ids=[world.local_rank] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # equal after every step; within a step each counts its own
            gradient_as_bucket_view=True,
            find_unused_parameters=keeps_buckets,
        )


@contextlib.contextmanager
def exchange_gradients(wrapped: nn.Module, enabled: bool) -> Iterator[None]:
    """Set whether backward passes inside exchange gradients: only a step's last micro-batch needs to."""
    if isinstance(wrapped, DistributedDataParallel) and not enabled:
        with wrapped.no_sync():
            yield
    else:
        yield


def sum_gradients(model: nn.Module) -> None:
    """Sum the gradients of all processes in place, after the passes of a step."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for handle in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        handle.wait()


def local(tensor: Tensor) -> Tensor:
    """Return this process's slice of a sharded tensor (it shares memory), or the tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all processes, which all have to call this; return others as they are."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_slice(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this process's slice and its position in the whole tensor; () means all of it."""
    if not is_dtensor(tensor):
        return tensor, ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local(tensor), tuple(slice(at, at + size) for size, at in zip(shape, offset, strict=True))


def dtensor_like(slice_: Tensor, pattern: Tensor) -> Tensor:
    """Return the sharded tensor with this slice, if ``pattern`` is sharded along its first axis.

    The slice has as many rows as ``local(pattern)``. Its other axes may differ.
    """
    if not is_dtensor(pattern):
        return slice_
    from torch.distributed.tensor import DTensor

    shape = torch.Size([pattern.shape[0], *slice_.shape[1:]])
    return DTensor.from_local(
        slice_,
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def sum_over_slices(partial: Tensor, pattern: Tensor) -> None:
    """Sum over the processes in place, if ``pattern`` is sharded and ``partial`` thus covers one slice."""
    if is_dtensor(pattern):
        dist.all_reduce(partial)


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
