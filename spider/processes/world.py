"""The processes that train together, and what they exchange besides gradients.

``torchrun`` starts the processes; each then runs the same program. Only the *first* process (rank 0) locks a
folder, saves and logs; it broadcasts its decisions to the others. Numbers for the host go through gloo on the
CPU, tensors through the device's own library. A single process (`ALONE`) exchanges nothing.

When one process fails, the others cannot go on. A process that notices it in an exchange leaves with `Ended`;
``torchrun`` stops the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spider.errors import Ended

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's rank and the number of processes, in all and on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Return the device that this process computes on: its own GPU if the machine has GPUs."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def from_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` in the first process only and return its result in every process.

        If it fails, the other processes raise `Ended`.
        """
        if self.size == 1:
            return make()
        outcome: list[Any] = [None, True]
        try:
            if self.first:
                outcome = [make(), False]
        finally:
            with peers_required():
                dist.broadcast_object_list(outcome, device=torch.device("cpu"))
        if outcome[1]:
            raise Ended("the first process stopped")
        return outcome[0]

    def total(self, *counts: int, reduction: Any = dist.ReduceOp.SUM) -> list[int]:
        """Return the sum of each count over all processes."""
        if self.size == 1:
            return [*counts]
        reduced = torch.tensor(counts, dtype=torch.int64)
        with peers_required():
            dist.all_reduce(reduced, reduction)
        return reduced.tolist()

    def highest(self, number: int) -> int:
        """Return the highest of all processes' numbers."""
        return self.total(number, reduction=dist.ReduceOp.MAX)[0]

    def sum(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sum of each scalar over all processes, as float64; all pass the same names."""
        if self.size == 1:
            return values
        summed = torch.stack([value.double() for value in values.values()])
        with peers_required():
            dist.all_reduce(summed)
        return dict(zip(values, summed.unbind(), strict=True))


ALONE = World()


@contextlib.contextmanager
def peers_required() -> Iterator[None]:
    """Raise `Ended` if an exchange inside fails because another process is gone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "by peer" in str(error):
            raise Ended("another process of this training is gone; what was saved is safe") from error
        raise


@contextlib.contextmanager
def join() -> Iterator[World]:
    """Join the process group that ``torchrun`` started; yield `ALONE` without one."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield ALONE
        return
    world = World(
        rank=int(os.environ["RANK"]),
        size=size,
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        if world.local_rank >= gpus:
            raise ValueError(
                f"process {world.rank} is number {world.local_rank} on this machine, which has {gpus} GPUs; "
                "start at most one process for each GPU (--nproc-per-node)"
            )
        torch.cuda.set_device(world.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    yield world
    # After an error the process exits without this call, which could wait for the others for ever.
    dist.destroy_process_group()
