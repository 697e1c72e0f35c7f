"""Process groups: errors that end a process with another one, ranks, and a single process."""

import multiprocessing
import os
import socket

import pytest
import torch.distributed as dist

from spider.common.errors import Ended, TrainingError
from spider.processes.world import ALONE, join, peers_required

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
WHOLE = dict(zip(VARIABLES, "1212", strict=True)) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

#: Errors of gloo and torch if another process is gone.
GONE = [
    RuntimeError("[../gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.2]:40132"),
    RuntimeError("[enforce fail] Connection reset by peer"),
    dist.DistBackendError("NCCL communicator was aborted on rank 1"),
    dist.DistNetworkError("The client socket has timed out"),
    dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0"),
]
#: Errors of this process itself.
OWN = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("Connection closed by peer"),
]


@pytest.fixture
def environment(request, monkeypatch):
    """Set these variables, and no others of ``torchrun``."""
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"RANK": "3", "LOCAL_RANK": "3"},
        dict.fromkeys(VARIABLES, "0") | {"WORLD_SIZE": "1"},
    ],
    indirect=True,
)
def test_a_single_process_joins_no_group(environment):
    with join() as world:
        assert world is ALONE and not dist.is_initialized()
        assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
        assert world.first and world.sum_ints(3, 4) == [3, 4] and world.from_first(lambda: "made") == "made"


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "many"},
        {name: value for name, value in WHOLE.items() if name != "LOCAL_RANK"},
        WHOLE | {"RANK": "2"},
        WHOLE | {"MASTER_PORT": "a"},
    ],
    ids=str,
    indirect=True,
)
def test_variables_that_give_no_place_are_refused(environment):
    stated = ", ".join(f"{name}={environment.get(name, '')}" for name in WHOLE)
    with pytest.raises(TrainingError, match=f"the environment has {stated}, .*: unset WORLD_SIZE"):
        join().__enter__()


def member(environment: dict[str, str]) -> None:
    """Join a group of two; the second process exits before the last exchange."""
    os.environ.update(environment)
    with join() as world:
        ranks = [world.rank, world.size, world.local_rank, world.local_size]
        assert ranks == [int(environment[name]) for name in VARIABLES], ranks
        assert world.sum_ints(world.rank + 1, 10) == [3, 20] and world.highest(world.rank) == [1]
        if world.rank == 1:
            os._exit(0)
        try:
            world.sum_ints(1)
        except Ended:
            os._exit(42)


def test_a_process_group_has_ranks_and_a_process_that_dies_ends_the_other():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    # They are the third and the second of four on the machine, so all numbers differ.
    numbers = [(str(rank), "2", str(2 - rank), "4") for rank in (0, 1)]
    forks = multiprocessing.get_context("forkserver")  # which imports torch once
    forks.set_forkserver_preload(["spider.training.stage"])
    processes = [
        forks.Process(target=member, args=({**address, **dict(zip(VARIABLES, own, strict=True))},))
        for own in numbers
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [42, 0]


@pytest.mark.parametrize("error", [*GONE, *OWN], ids=str)
def test_an_exchange_with_a_process_that_is_gone_raises_ended_and_no_other_error_does(error):
    if error in GONE:
        gone = "another process of this training is gone"
        with pytest.raises(Ended, match=gone) as raised, peers_required():
            raise error
        assert raised.value.__cause__ is error
    else:
        with pytest.raises(type(error)) as raised, peers_required():
            raise error
        assert raised.value is error
