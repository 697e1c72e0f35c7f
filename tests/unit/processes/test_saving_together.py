"""Four processes save a checkpoint together, and any number of processes reads it, with the real gloo."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spider.checkpoints import save as saving
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.parts import parts_of
from spider.checkpoints.records import steps
from spider.checkpoints.save import Saver, clean, save
from spider.common import files
from spider.common.errors import CheckpointError, Diverged, Ended
from spider.common.results import StageFolder
from spider.config import StageSpec
from spider.processes.parallel import local
from spider.processes.world import join
from spider.training.stage import train
from tests.unit.records import saved

SHAPES = {
    "model.long": (1003, 7),
    "model.four": (4, 3),
    "model.two": (2, 3, 2),
    "model.one": (1, 5),
    "model.scalar": (),
    "model.whole": (40, 30),
    "model.vector": (6,),
    "optimizer.long.momentum": (1003, 7),
    "optimizer.long.step": (),
    "ema.long": (1003, 7),
}
#: These are sharded, and the others are held by all processes.
CUT = {name for name, shape in SHAPES.items() if shape and name != "model.whole"}


def state() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}
    return tensors | {"model.four": tensors["model.four"].bfloat16()}


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {n: distribute_tensor(t, mesh, [Shard(0)]) if n in CUT else t for n, t in tensors.items()}


def start_and_wait(saver: Saver, tensors: dict[str, torch.Tensor], step: int) -> None:
    """Save, and settle as `Trainer` does."""
    saver.start(tensors, saved(step))
    while not any(saver._world.highest(saver.failed, saver._pending is None or saver._pending.done())):
        pass
    saver.settle()


def save_in_all_ways(root: Path) -> None:
    """Save at steps 1 and 3, replicated at step 1 of ``ddp``; fail at 2; die at 4."""
    with join() as world:
        last = world.rank == world.size - 1
        tensors = sharded(state())
        tensors["optimizer.long.step"] += world.rank  # a process without rows does not count steps
        saver = Saver(root, None, world)
        start_and_wait(saver, tensors, 1)
        assert saver.newest is not None and saver.newest.path == root / "step-00000001"
        size = sum(copy.nbytes for copy in saver._copies.values())
        whole = sum(tensor.nbytes for tensor in state().values())
        assert size < 1.3 * whole / world.size, "a process copies its share only"
        start_and_wait(Saver(root / "ddp", None, world), state(), 1)

        bad = state()
        bad["ema.long"][-1, -1] = float("nan")
        with pytest.raises(Diverged, match=r"the state is not finite: ema\.long$"):
            saver.start(sharded(bad), saved(2))

        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        with pytest.raises(CheckpointError, match=r"step-00000002: saving failed: .*File too large.* needs"):
            start_and_wait(saver, tensors, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert not world.first or not list(root.glob(".step*")), "the first process removes the rest"
        start_and_wait(saver, tensors, 3)

        if last:
            saving.save_file = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
        saver.start(tensors, saved(4))
        with pytest.raises(Ended):
            saver.settle()
        saver.close()
        os._exit(0)  # the group cannot end without the process that is gone


def read_back(root: Path) -> None:
    """Load sharded and replicated, and save again."""
    with join() as world:
        good, bad = Checkpoint.newest_good(root)
        assert good is not None and good.manifest.global_step == 3 and not bad
        expected = sharded(state())
        empty = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        good.load_into(empty)
        assert all(torch.equal(local(empty[name]), local(expected[name])) for name in expected)
        whole = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        good.load_into(whole)
        assert all(torch.equal(whole[name], tensor) for name, tensor in state().items())
        start_and_wait(Saver(root / str(world.size), None, world), empty, 5)


def train_on_a_full_disk(spec: StageSpec, folder: Path, data: Path) -> None:
    """Train in all processes, first while the last one cannot write its files."""
    with join() as world:
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not world.first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        with pytest.raises(CheckpointError, match=r"step-00000002: saving failed: .*File too large"):
            train(spec, folder, data, world=world)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert not steps(StageFolder(folder).checkpoints)
        assert train(spec, folder, data, world=world).steps == 6


def run_together(processes: int, member: Any, *given: Any) -> list[int | None]:
    """Run a function in several processes and return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    forks = multiprocessing.get_context("forkserver")  # which imports torch once
    forks.set_forkserver_preload(["spider.training.stage", "torch.distributed.tensor"])
    members = []
    for rank in map(str, range(processes)):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
        environment = {**meeting, **place, "LOCAL_WORLD_SIZE": str(processes)}
        members.append(forks.Process(target=enter, args=(environment, member, *given)))
    for process in members:
        process.start()
    for process in members:
        process.join(120)
        process.kill()
    return [process.exitcode for process in members]


def enter(environment: dict[str, str], member: Any, *given: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    member(*given)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return the folder of the checkpoints that four processes saved."""
    root = tmp_path_factory.mktemp("checkpoints")
    assert run_together(4, save_in_all_ways, root) == [0, 0, 0, -signal.SIGKILL]
    return root


def test_a_process_that_is_killed_while_it_saves_leaves_the_checkpoints_before(root):
    assert [path.name for path in steps(root)] == ["step-00000001", "step-00000003"]
    clean(root)  # what another process wrote after the first one had removed the hidden folder
    assert not list(root.glob(".step*"))


def test_any_number_of_processes_reads_what_four_have_saved(root):
    alone = save(root / "one", state(), saved(3)).manifest
    assert alone.format == 2 and Checkpoint.at(root / "step-00000003").manifest.format == 3
    for processes in (2, 3):
        assert run_together(processes, read_back, root) == [0] * processes
    for path in (root / "ddp/step-00000001", root / "2/step-00000005", root / "3/step-00000005"):
        found = Checkpoint.at(path, whole=True)
        assert (found.manifest.weights, found.manifest.averaged_weights) == (
            alone.weights,
            alone.averaged_weights,
        )
        read = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        found.load_into(read)
        assert all(torch.equal(read[name], tensor) for name, tensor in state().items())


def test_whole_tensors_keep_their_names_and_cut_ones_name_their_rows(root):
    cut = files.read_json(root / "step-00000003/model.safetensors.index.json")["weight_map"]
    assert [name for name in cut if name.startswith("model.long")] == [
        f"model.long[{first}:{last}]" for first, last in ((0, 251), (251, 502), (502, 753), (753, 1003))
    ]
    assert [name for name in cut if name.startswith("model.two")] == ["model.two[0:1]", "model.two[1:2]"]
    assert {"model.one", "model.scalar", "model.whole"} <= cut.keys()
    kinds = {(file, name.partition(".")[0]) for name, file in cut.items()}
    assert len(kinds) == len({*cut.values()}), "weights can be read without the optimizer's state"
    whole = files.read_json(root / "ddp/step-00000001/model.safetensors.index.json")["weight_map"]
    assert whole.keys() == SHAPES.keys() and len({*whole.values()}) > 4


def test_all_processes_of_a_training_raise_the_error_of_the_one_that_cannot_save(tmp_path, make_spec, shards):
    settings = {"micro_batch": 2, "grad_accum": 2, "ckpt_every": 2, "max_steps": 6}
    spec = make_spec(**settings).model_copy(update={"parallel": "fsdp"})
    assert run_together(2, train_on_a_full_disk, spec, tmp_path, shards) == [0, 0]


@pytest.mark.parametrize("damage", ["missing", "truncated", "of another save"])
def test_the_checkpoint_before_is_used_if_a_part_is_damaged(root, tmp_path, damage):
    for path in steps(root):
        shutil.copytree(path, tmp_path / path.name)
    newest = tmp_path / "step-00000003"
    part = sorted(newest.glob("model-*"))[-1]
    if damage == "missing":
        part.unlink()
    elif damage == "truncated":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        other = {name: tensor + 1 for name, tensor in state().items()}
        shutil.copyfile(next(save(tmp_path / "other", other, saved()).path.glob("model-*")), part)
    good, bad = Checkpoint.newest_good(tmp_path)
    assert good is not None and good.path.name == "step-00000001" and bad == [newest]


def test_a_tensor_of_another_shape_is_refused_once_though_it_is_cut(root):
    checkpoint = Checkpoint.at(root / "step-00000003")
    with pytest.raises(
        CheckpointError, match=r"model\.long has shape \[1003, 7\], and \[1004, 7\] in this"
    ) as e:
        checkpoint.load_into({**state(), "model.long": torch.zeros(1004, 7)})
    assert str(e.value).count("model.long") == 1


def test_whole_tensors_are_shared_out_by_size():
    parts = parts_of(state(), 3)
    sizes = [sum(p.bytes for part in parts.values() for p in part if p.rank == rank) for rank in range(3)]
    assert sum(sizes) == sum(tensor.nbytes for tensor in state().values())
    assert max(sizes) < 1.2 * min(sizes)
