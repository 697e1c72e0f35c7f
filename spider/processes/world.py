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
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from spider.common.errors import Ended, TrainingError

T = TypeVar("T")

#: ``torchrun`` gives a process its place in these variables, and in two others the address where all meet.
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: Time for all processes to meet. Importing torch from a slow disk may take minutes.
_MEETING = timedelta(minutes=10)
#: Time that an exchange may wait for another process. A watchdog ends steps that hang.
_PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class World:
    """This process's rank and the number of processes, in all and on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    _group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Return the device that this process computes on: its own GPU if the machine has GPUs."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    @classmethod
    def started(cls) -> World:
        """Return the place of this process among those that ``torchrun`` started; `ALONE` without others.

        Raises:
            TrainingError: variables of ``torchrun`` name several processes, and do not give this one a place.
        """
        given = {name: os.environ.get(name, "") for name in (*_PLACE, "MASTER_ADDR", "MASTER_PORT")}
        if given["WORLD_SIZE"] in ("", "1"):
            return ALONE
        numbers = [int(given[name]) if given[name].isdigit() else -1 for name in (*_PLACE, "MASTER_PORT")]
        rank, size, local_rank, local_size, _ = numbers
        if min(numbers) < 0 or rank >= size or local_rank >= local_size or not given["MASTER_ADDR"]:
            listed = ", ".join(f"{name}={value}" for name, value in given.items())
            raise TrainingError(
                f"the environment has {listed}, which is no place among several processes: unset WORLD_SIZE "
                "to train in one process, or start them with --processes or torchrun (docs/cluster.md)"
            )
        return cls(rank, size, local_rank, local_size)

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
                dist.broadcast_object_list(outcome, group=self._group, device=torch.device("cpu"))
        if outcome[1]:
            raise Ended("the first process stopped")
        return outcome[0]

    def sum_ints(self, *counts: int, reduction: Any = dist.ReduceOp.SUM) -> list[int]:
        """Return the sum of each count over all processes."""
        if self.size == 1:
            return [*counts]
        reduced = torch.tensor(counts, dtype=torch.int64)
        with peers_required():
            dist.all_reduce(reduced, reduction, group=self._group)
        return reduced.tolist()

    def highest(self, *numbers: int) -> list[int]:
        """Return the highest of all processes' numbers, for each of them."""
        return self.sum_ints(*numbers, reduction=dist.ReduceOp.MAX)

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Call ``make`` in every process and return all results in all of them, or raise the first error."""
        if self.size == 1:
            return [make()]
        outcomes: list[Any] = [None] * self.size
        try:
            own: tuple[Any, Exception | None] = (make(), None)
        except Exception as error:
            own = (None, error)
        with peers_required():
            dist.all_gather_object(outcomes, own, group=self._group)
        for _, failed in outcomes:
            if failed is not None:
                raise failed
        return [made for made, _ in outcomes]

    def aside(self) -> World:
        """Return these processes with connections of their own, for exchanges of a thread beside those of the
        training. All processes call this together."""
        if self.size == 1:
            return self
        return replace(self, _group=dist.new_group(backend="gloo", timeout=_PATIENCE))

    def sum_tensors(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sum of each scalar over all processes, as float64; all pass the same names."""
        if self.size == 1:
            return values
        summed = torch.stack([value.double() for value in values.values()])
        with peers_required():
            dist.all_reduce(summed, group=self._group)
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
def join(meeting: timedelta = _MEETING) -> Iterator[World]:
    """Form the process group of the processes that `World.started` finds. A single process needs none.

    Raises:
        TrainingError: as `World.started`, or the other processes do not come.
        ValueError: this machine has fewer GPUs than processes.
    """
    world = World.started()
    if world.size == 1:
        yield world
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        if world.local_rank >= gpus:
            raise ValueError(
                f"process {world.rank} is number {world.local_rank} on this machine, which has {gpus} GPUs; "
                "start at most one process for each GPU (--nproc-per-node)"
            )
        torch.cuda.set_device(world.device)
    try:
        store, _, _ = next(rendezvous("env://", timeout=meeting))
    except dist.DistError as error:
        raise TrainingError(
            f"WORLD_SIZE={world.size}: the other processes did not come to {os.environ['MASTER_ADDR']}, port "
            f"{os.environ['MASTER_PORT']}, within {meeting}. Unset WORLD_SIZE to train in one process, or "
            "start all of them again"
        ) from error
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=_PATIENCE,
        device_id=world.device if gpus else None,
    )
    yield world
    # After an error the process exits without this call, which could wait for the others for ever.
    dist.destroy_process_group()
