"""One model in several processes: a whole copy in each (DDP), or a share of it in each (FSDP2).

Both give every process a part of the step's windows and add the gradients up, so the update is that of one
process up to the order of sums.

``ddp``   every process holds weights, gradients and optimizer state whole. The least to send.
``fsdp``  a process holds a slice of each of them (ZeRO, Rajbhandari et al., arXiv:1910.02054), cut along a
          parameter's first axis: rows of a matrix, experts of a stack. Before a micro-batch the weights are
          gathered, after the last one gradients are scattered. All of the model is one unit: its core runs
          many times in a micro-batch and is gathered once for all of them, and the forward pass that is
          compiled is that of a single device. The price is that gathered weights are whole while a
          micro-batch runs, in fp32, which keeps the numbers those of one process.

Checkpoints are of whole tensors: any number of processes, cut either way, goes on from any other's.
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

from spider.model.interface import LanguageModel
from spider.processes.world import World

if TYPE_CHECKING:  # torch's own part for slices takes two seconds to import: `shard` does it
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def shard(model: nn.Module, world: World) -> None:
    """Leave each process its slice of every parameter, in place; all are of one dtype, marks on them stay."""
    from torch.distributed.fsdp import fully_shard

    marks = {name: dict(vars(p)) for name, p in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh(world.device.type, (world.size,)))
    for name, p in model.named_parameters():
        vars(p).update(marks[name])


def is_sharded(model: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether `shard` has cut it, for which it had to import what cuts."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def is_cut(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this process holds a slice of it only."""
    slices = sys.modules.get("torch.distributed.tensor")
    return slices is not None and isinstance(tensor, slices.DTensor)


def replica(model: nn.Module, world: World) -> nn.Module:
    """The model to call so that gradients are averaged over all processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its successor came in 2.12
        return DistributedDataParallel(
            model,
            device_ids=[world.local_rank] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # equal after every step; within one they count what each has seen
            gradient_as_bucket_view=True,
        )


@contextlib.contextmanager
def exchange_gradients(called: nn.Module, when: bool) -> Iterator[None]:
    """Whether a backward pass in here sends gradients: only that of a step's last micro-batch needs to."""
    if is_sharded(called):
        called.set_requires_gradient_sync(when)
    with contextlib.ExitStack() as held:
        if isinstance(called, DistributedDataParallel) and not when:
            held.enter_context(called.no_sync())
        yield


def compile_forward(model: LanguageModel, graphs: int = 1, **how: Any) -> None:
    """Compile the forward pass, without what FSDP or DDP hang around it. It will be called with ``graphs``
    numbers of loops: each may be a graph of its own. ``how`` is for `torch.compile`."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, graphs)
    # DDP would have the graph cut where its buckets end; one graph is what the warm-up has compiled.
    torch._dynamo.config.optimize_ddp = False
    # The backward pass is traced while autocast is on, and would narrow what the forward pass kept wide.
    torch._functorch.config.backward_pass_autocast = "off"
    for module, name in model.parts_to_compile():
        setattr(module, name, torch.compile(getattr(module, name), dynamic=False, **how))


def local(tensor: Tensor) -> Tensor:
    """The slice that this process holds, in place; all of a tensor that is not cut."""
    return tensor.to_local() if is_cut(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered where it is cut; every process has to call this."""
    return tensor.full_tensor() if is_cut(tensor) else tensor


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """The slice that this process holds, and where in the whole it stands: () for all of it."""
    if not is_cut(tensor):
        return tensor, ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    cut = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local(tensor), tuple(slice(at, at + size) for size, at in zip(*cut, strict=True))


def cut_like(slice_: Tensor, pattern: Tensor) -> Tensor:
    """The tensor of which ``slice_`` is this process's, if it is cut along its first axis as ``pattern`` is:
    it has as many rows as `local` of the pattern; other axes as they like."""
    if not is_cut(pattern):
        return slice_
    from torch.distributed.tensor import DTensor

    shape = torch.Size([pattern.shape[0], *slice_.shape[1:]])
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        slice_, pattern.device_mesh, pattern.placements, run_check=False, shape=shape, stride=strides
    )


def sum_of_slices(partial: Tensor, pattern: Tensor) -> Tensor:
    """The sum over the processes that hold slices as ``pattern`` is cut, in place; all of it where it is not
    cut."""
    if is_cut(pattern):
        dist.all_reduce(partial)
    return partial
