"""One model in several processes: replicated (DDP) or sharded (FSDP2).

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
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from spider.model.interface import Model
from spider.processes.world import World

if TYPE_CHECKING:  # torch's DTensor takes two seconds to import: only `shard` imports it
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
    if is_sharded(wrapped):
        wrapped.set_requires_gradient_sync(enabled)
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


def compile_forward(model: Model, **options: Any) -> None:
    """Compile the forward pass of the model inside FSDP or DDP; ``options`` are those of `torch.compile`."""
    # DDP would cut the graph at the ends of its buckets; the warm-up compiled one graph.
    torch._dynamo.config.optimize_ddp = False
    # The backward pass is traced while autocast is on, and would narrow what the forward pass kept wide.
    torch._functorch.config.backward_pass_autocast = "off"
    from spider.processes.fusion import fuse_mixed_orders_first  # which imports the compiler

    fuse_mixed_orders_first()
    # Of one function for all layers, this many kinds of layers may have a graph of their own.
    torch._dynamo.config.recompile_limit = 32
    for module, name in model.parts_to_compile():
        setattr(module, name, torch.compile(getattr(module, name), dynamic=False, **options))


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
