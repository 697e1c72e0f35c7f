"""One model in several processes: replicated (`Replicas`) or sharded (FSDP2).

Either way each process computes a part of the step's windows and the gradients are summed. The update is that
of one process up to the order of sums.

``ddp``   every process holds all weights, gradients and optimizer state. This sends the least.
``fsdp``  a process holds a slice of each of them (ZeRO, Rajbhandari et al., arXiv:1910.02054), cut along a
          parameter's first axis: rows of a matrix, experts of a stack. Weights are gathered before a
          micro-batch, gradients are scattered after the last one. The whole model is one unit. So the core,
          which runs many times in a micro-batch, is gathered once for all of them. And the compiled forward
          pass is that of a single device. The price: while a micro-batch runs, a process
          holds all weights, in fp32, which keeps the numbers those of one process.

Checkpoints hold whole tensors, so any number of processes can resume from them, replicated or sharded.

`distribute` computes on many matrices, each on one process, and exchanges the results. Process k modulo W
computes matrix k, for W processes, whether every process holds the whole matrix or a slice. The assignment
depends only on the order of the matrices, so it needs no communication. All shapes are packed into one
message: one exchange for replicated matrices, two for sharded ones.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad

from spider.processes.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def shard(model: nn.Module, world: World) -> None:
    """Replace every parameter by this process's slice, in place. All have one dtype."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh(world.device.type, (world.size,)))


def is_sharded(model: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether `shard` was applied. Without an import of FSDP it was not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether this process holds only a slice of the tensor."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


#: Bytes of gradients that are exchanged together. Smaller messages begin sooner, and larger ones cost less.
_BUCKET = 25 << 20


class Replicas(nn.Module):
    """A model that each process holds, and whose gradients are averaged over the processes.

    Gradients are exchanged in buckets while the backward pass goes on. A bucket holds parameters in the
    reverse order of the model, which is about that of their gradients, and buckets are sent in this order. So
    all processes send the same, and a sum has the same order in every step and after every start. (DDP of
    torch orders its buckets anew after the first step, unless it searches the graph of each step for unused
    parameters.)
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__()
        self.module = module
        self.is_enabled = True
        self._world = world
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self._buckets: list[list[nn.Parameter]] = [[]]
        self._bucket_of: dict[nn.Parameter, int] = {}
        held = 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if held >= _BUCKET or (self._buckets[-1] and self._buckets[-1][0].dtype != p.dtype):
                self._buckets.append([])
                held = 0
            self._bucket_of[p] = len(self._buckets) - 1
            self._buckets[-1].append(p)
            held += p.numel() * p.element_size()
            p.register_post_accumulate_grad_hook(self._arrived)
        self._begin()

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    def _begin(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent: list[tuple[list[int], Any]] = []

    def _arrived(self, p: nn.Parameter) -> None:
        """Send what is complete, after the gradient of a parameter."""
        if not self.is_enabled:
            return
        self._missing[self._bucket_of[p]] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] <= 0:
            self._send()

    def _send(self) -> None:
        """Send the next bucket; its gradients become views of the message."""
        bucket = self._buckets[len(self._sent)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        message = torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in gradients])
        message /= self._world.size
        used = [int(p.grad is not None) for p in bucket]
        for p, part in zip(bucket, message.split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view_as(p)
        self._sent.append((used, dist.all_reduce(message, async_op=True)))

    def finish(self) -> None:
        """Wait for all gradients. One that no process has is None, as without this wrapper."""
        while len(self._sent) < len(self._buckets):
            self._send()
        for _, handle in self._sent:
            handle.wait()
        used = self._world.sum_ints(*(one for used, _ in self._sent for one in used))
        parameters = [p for bucket in self._buckets for p in bucket]
        for p, count in zip(parameters, used, strict=True):
            p.grad = p.grad if count else None
        self._begin()


@contextlib.contextmanager
def exchange_gradients(wrapped: nn.Module, enabled: bool) -> Iterator[None]:
    """Set whether backward passes inside exchange gradients: only a step's last micro-batch needs to."""
    if is_sharded(wrapped):
        wrapped.set_requires_gradient_sync(enabled)
    if not isinstance(wrapped, Replicas):
        yield
        return
    wrapped.is_enabled = enabled
    yield
    if enabled:
        wrapped.finish()


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
