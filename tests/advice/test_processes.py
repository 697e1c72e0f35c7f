"""Advice about the GPUs of a made driver, and about the processes of one training."""

from __future__ import annotations

import multiprocessing
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from spider.processes.gpus import VISIBLE, claimed
from spider.processes.parallel import replicate, shard
from spider.processes.world import ALONE, World, join
from tests.families.toy.config import Config
from tests.families.toy.model import Toy
from tests.unit.processes.test_gpus import jobs, made, wait_until  # noqa: F401 (fixtures)
from tests.unit.processes.test_world import WHOLE

from .followed import refused


def test_a_process_waits_for_its_gpu_or_gets_another(jobs, monkeypatch):  # noqa: F811
    jobs.start("beside", 1, "end")
    wait_until(lambda: jobs.having() == ["beside"])
    with refused("processes/gpus.py", "GPU {} is held by {}; wait for it to end, or name other GPUs in {}"):
        claimed(1, local_rank=0).__enter__()
    with monkeypatch.context() as named:
        named.setenv(VISIBLE, "1")
        with claimed(1, local_rank=0):
            pass
    Path("end").touch()
    jobs.end()
    with claimed(1, local_rank=0):
        pass


def started(environment: dict[str, str]) -> None:
    """Join a group of processes and leave it."""
    os.environ |= environment
    with join() as world:
        assert world.sum_ints(1) == [2]


def test_processes_are_started_together_or_one_without_the_variable(monkeypatch):
    """`tests/unit/cli/test_train.py` starts them with --processes, which do what is done here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = [WHOLE | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port} for rank in "01"]
    for name, value in places[1].items():
        monkeypatch.setenv(name, value)
    with refused("processes/world.py", "or start all of them again"):
        join(meeting=timedelta(seconds=0.1)).__enter__()
    monkeypatch.delenv("MASTER_PORT")
    with refused("processes/world.py", "or start them with --processes or torchrun"):
        join().__enter__()
    monkeypatch.delenv("WORLD_SIZE")
    with join() as world:
        assert world is ALONE
    forks = multiprocessing.get_context("forkserver")  # which imports torch once
    forks.set_forkserver_preload(["spider.training.stage"])
    processes = [forks.Process(target=started, args=(place,)) for place in places]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_scalar_gets_an_axis_or_is_replicated():
    def toy(*shape: int) -> Toy:
        model = Toy(Config(family="toy"))
        model.scale = nn.Parameter(torch.ones(shape))
        return model

    world = World(size=2)
    with refused("processes/parallel.py", "cannot cut {}, a scalar; give it the shape (1,), or set ddp"):
        shard(toy(), world)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        shard(toy(1), world)
        replicate(toy(), world)
    finally:
        dist.destroy_process_group()
