"""Train jobs one after the other, as one of the processes that `torchrun` starts for `test_parallel`.

    torchrun --nproc-per-node N parallel_job.py JOBS.json

A job is ``{"spec", "folder", "data", "stop", "kill", "record", "replayed", "whole"}``. After ``stop`` steps
only the last process gets a SIGTERM. After ``kill`` steps it gets a SIGKILL. A spec with fp8 computes it
emulated. A ``replayed`` one replays its micro-batches, as on a GPU. The model of a ``whole`` one has no
units.

Process r of N writes ``seen-N-r.npy``, the windows of its steps. It adds a line to ``read-N-r.txt`` for each
step, also in a training that is killed: the position after it, and the digest of its windows. Unless
``record`` is false, it also writes ``record-N-r.json``: the number of parameter values that it holds
(``held``) and of all (``all``). Its ``alike`` lists, for two micro-batches, whether the gradients of all
processes were equal afterwards. Its ``units`` has for each unit of the model the share of its values that the
process held inside of its call, and after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from spider.common.errors import Preempted
from spider.common.files import digest
from spider.config import StageSpec
from spider.data.loader import Loader, MixedLoader
from spider.model import build_model
from spider.model.interface import Model
from spider.model.spider.model import Spider
from spider.processes.parallel import (
    exchange_gradients,
    full_tensor,
    local,
    replicate,
    shard,
    unit_parameters,
)
from spider.processes.world import World, join
from spider.training import build, loop, precision
from spider.training.stage import train


def train_one(job: dict[str, Any], world: World) -> None:
    folder, seen = Path(job["folder"]), []
    spec = StageSpec.model_validate(job["spec"])
    name = f"{world.size}-{world.rank}"

    def noting(kind: type[Loader]) -> type[Loader]:
        class Noting(kind):  # type: ignore[valid-type, misc]
            def __next__(self) -> Any:
                seen.append((batch := super().__next__()).rows_BT1)
                with open(folder / f"read-{name}.txt", "a") as read:
                    read.write(f"{batch.position['sample']} {digest(batch.rows_BT1.tolist())}\n")
                return batch

        return Noting

    def on_step(step: int) -> None:
        for key, sent in (("stop", signal.SIGTERM), ("kill", signal.SIGKILL)):
            if step == job.get(key) and world.rank == world.size - 1:
                os.kill(os.getpid(), sent)

    loop.Loader, loop.MixedLoader = noting(Loader), noting(MixedLoader)
    with contextlib.suppress(Preempted), pytest.MonkeyPatch.context() as patch:
        if job.get("replayed"):
            patch.setattr(build, "why_eager", lambda *given, **options: None)
        if job.get("whole"):
            patch.setattr(Spider, "units", lambda self: {})
        train(spec, folder, Path(job["data"]), on_step=on_step, world=world)
    np.save(folder / f"seen-{name}.npy", np.stack(seen))
    if job.get("record", True):
        (folder / f"record-{name}.json").write_text(json.dumps(inspect(spec, world)))


def inspect(spec: StageSpec, world: World) -> dict[str, Any]:
    """Return what ``record-N-r.json`` holds."""
    torch.manual_seed(0)
    model = build_model(spec.model).train()
    units = watch_units(model)
    if spec.parallel == "fsdp":
        shard(model, world)
    wrapped = model if spec.parallel == "fsdp" else replicate(model, world)
    sizes = {"held": sum(local(p).numel() for p in model.parameters()), "all": model.num_parameters()}
    alike = []
    torch.manual_seed(world.rank)
    for last in (False, True):
        x = torch.randint(32, 127, (1, 33))
        with exchange_gradients(wrapped, last):
            wrapped(x[:, :-1], x[:, 1:]).loss.backward()
        gradients = [full_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        mine = torch.stack([g.norm() for g in gradients]) if gradients else torch.full((1,), world.rank + 0.5)
        theirs = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(theirs, mine)
        alike.append(all(torch.equal(mine, other) for other in theirs))
    return {**sizes, "alike": alike, "units": units}


def watch_units(model: Model) -> dict[str, list[float]]:
    """Return what a forward pass fills: the shares of each unit's values inside of its call and after it."""
    titles = {module: name for name, module in model.named_modules()}
    found: dict[str, list[float]] = {}

    def share(unit: nn.Module) -> float:
        parameters = [model.get_parameter(name) for name in names[unit]]
        return sum(local(p).numel() for p in parameters) / sum(p.numel() for p in parameters)

    def through(unit: nn.Module, call: Any, *inputs: Any) -> Any:
        def inside(*given: Any) -> Any:
            found[titles[unit]] = [share(unit)]
            return call(*given)

        result = type(model).through(model, unit, inside, *inputs)
        found[titles[unit]].append(share(unit))
        return result

    owned = {unit: set().union(*parts) for unit, parts in unit_parameters(model).items()}
    names = {unit: [name for name, p in model.named_parameters() if p in own] for unit, own in owned.items()}
    model.through = through  # type: ignore[method-assign]
    return found


def emulate_fp8(patch: pytest.MonkeyPatch) -> None:
    swap = precision.to_fp8
    patch.setattr(precision, "has_fp8", lambda device: True)
    patch.setattr(precision, "to_fp8", lambda *args, **options: swap(*args, **{**options, "emulate": True}))


def main() -> None:
    torch.set_num_threads(1)
    emulate_fp8(pytest.MonkeyPatch())
    with join() as world:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            train_one(job, world)


if __name__ == "__main__":
    main()
