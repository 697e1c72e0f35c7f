"""The processes that train together, and the few things they have to agree on.

``torchrun`` starts them; each then runs the same program. What only one may do (lock a folder, save, log) the
*first* does, and what it decides the others are told. Numbers that the host needs go through gloo on the CPU,
tensors through the device's own library. One process (`ALONE`) exchanges nothing. When one of several fails,
the others cannot go on: where they learn of it in an exchange they leave as `Ended`, else ``torchrun`` stops
them.
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
    """Which of how many processes this one is, and which of how many on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """What this process computes on: a GPU of its own, where there are any."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` returns in the first process, where alone it is called. If it fails there, the other
        processes raise `Ended`."""
        if self.size == 1:
            return make()
        outcome: list[Any] = [None, True]
        try:
            if self.first:
                outcome = [make(), False]
        finally:
            with together():
                dist.broadcast_object_list(outcome, device=torch.device("cpu"))
        if outcome[1]:
            raise Ended("the first process stopped")
        return outcome[0]

    def total(self, *counts: int, how: Any = dist.ReduceOp.SUM) -> list[int]:
        """The sum of each count over all processes."""
        if self.size == 1:
            return [*counts]
        reduced = torch.tensor(counts, dtype=torch.int64)
        with together():
            dist.all_reduce(reduced, how)
        return reduced.tolist()

    def highest(self, number: int) -> int:
        """The highest of all processes' numbers."""
        return self.total(number, how=dist.ReduceOp.MAX)[0]

    def sum(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum of each scalar over all processes, as float64; every process has the same names."""
        if self.size == 1:
            return values
        summed = torch.stack([value.double() for value in values.values()])
        with together():
            dist.all_reduce(summed)
        return dict(zip(values, summed.unbind(), strict=True))


ALONE = World()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What breaks off in here because another process is gone ends this one too, as `Ended`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "by peer" in str(error):
            raise Ended("another process of this training is gone; what was saved is safe") from error
        raise


@contextlib.contextmanager
def join() -> Iterator[World]:
    """Meet the other processes that ``torchrun`` started; `ALONE` where there are none."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield ALONE
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    world = World(*(int(os.environ[name]) for name in names))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        if world.local_rank >= gpus:
            raise ValueError(
                f"process {world.rank} is number {world.local_rank} on this machine, which has {gpus} GPUs; "
                "start as many processes as there are (--nproc-per-node)"
            )
        torch.cuda.set_device(world.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    yield world
    # After an error the process ends, and its connections with it: waiting for the others might be for ever.
    dist.destroy_process_group()
