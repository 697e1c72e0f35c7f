"""Memory and exchange of a sharded GPT: layer by layer, and as one unit, which sums gradients once a step.

    python benchmarks/fsdp.py [--depth 40] [--turns 9] [--json FILE]

Memory is the peak of one of eight processes in a step of two micro-batches of 2,048 tokens in bf16, with all
activations recomputed. It is counted on fake tensors, which have no values, and so needs no device. The
exposed exchange is what a pass of four processes of gloo takes beyond one without exchange, while all four
compute at once.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import parser, report
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from spider.common import files
from spider.config import load_config
from spider.model import build_model
from spider.model.gpt.config import GPTConfig
from spider.model.gpt.model import GPT
from spider.processes import parallel
from spider.processes.world import World
from spider.training.optim import build_optimizer

WAYS = "whole", "layers"
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sharded(way: str, compute: torch.dtype, world: World, **sizes: int | str) -> GPT:
    """Return a GPT that is sharded in a way; with ``alone`` it is not."""
    model = build_model(GPTConfig(family="gpt", **sizes)).train()
    assert isinstance(model, GPT)
    if way == "whole":
        model.units = dict
    if way != "alone":
        parallel.shard(model, world, compute)
    return model


def run(model: GPT, tokens: int, compute: torch.dtype) -> None:
    x = torch.zeros(1, tokens, dtype=torch.int64)
    with torch.autocast("cpu", compute, enabled=compute != torch.float32):
        loss = model(x, x).loss
    loss.backward()


def peak_memory(_: int, way: str, depth: int, output: Path) -> None:
    """Write the peak bytes of a step of two micro-batches."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh, world = parallel.init_device_mesh("cpu", (8,)), World(size=8)
    parallel.init_device_mesh = lambda *given: mesh
    config = load_config(Path("presets/gpt-d12.yaml")).runs["gpt-d12"].optimizer
    sizes = {"depth": depth, "vocab_size": 32_768, "checkpointing": "full"}
    with FakeTensorMode():
        model = sharded(way, torch.bfloat16, world, **sizes)
        optimizer = build_optimizer(model, config, 1.0, torch.bfloat16, world=world)
        tracker = MemTracker()
        tracker.track_external(model, *optimizer.tensors(model).values())
        with tracker:
            for last in (False, True):
                model.set_requires_gradient_sync(last or way == "layers")
                tracker.reset_mod_stats()
                run(model, 2048, torch.bfloat16)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    files.write_json(output, int(peak["Total"]))


def pass_seconds(rank: int, processes: int, folder: Path, turns: int, depth: int) -> None:
    """Write the median seconds of a pass by kind and way."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    world, found = World(rank, processes), dict[str, dict[str, float]]()
    for kind, compute in KINDS.items():
        models = {way: sharded(way, compute, world, depth=depth, vocab_size=4096) for way in ("alone", *WAYS)}
        seconds: dict[str, list[float]] = {way: [] for way in models}
        for _ in range(turns + 1):  # the first one allocates
            for way, model in models.items():
                dist.barrier()
                began = time.perf_counter()
                run(model, 256, compute)
                dist.barrier()
                seconds[way].append(time.perf_counter() - began)
        found[kind] = {way: median(each[1:]) for way, each in seconds.items()}
    if rank == 0:
        files.write_json(folder / "seconds.json", found)
    dist.destroy_process_group()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--depth", type=int, default=40)
    options.add_argument("--turns", type=int, default=9)
    options = options.parse_args()
    depth, turns, small = (4, 2, 2) if options.quick else (options.depth, options.turns, 4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counting = [mp.spawn(peak_memory, (way, depth, folder / way), join=False) for way in WAYS]
        while not all(process.join() for process in counting):
            pass
        memory = {way: files.read_json(folder / way) for way in WAYS}
        mp.spawn(pass_seconds, (4, folder, turns, small), nprocs=4)
        found = files.read_json(folder / "seconds.json")
    rows = [
        [
            "peak GB",
            *(f"{memory[way] / 1e9:.1f}" for way in WAYS),
            f"{memory['layers'] / memory['whole']:.3f}",
        ]
    ]
    for kind, seconds in found.items():
        exposed = [seconds[way] - seconds["alone"] for way in WAYS]
        of = f"exposed ms of gloo, {kind} ({1000 * seconds['alone']:.0f} alone)"
        rows.append([of, *(f"{1000 * one:.0f}" for one in exposed), f"{exposed[1] / exposed[0]:.2f}"])
    figures = {"memory": memory, "seconds": found}
    report("A sharded step", ["", "whole", "layer by layer", "ratio"], rows, figures, options, ["torch"])


if __name__ == "__main__":
    main()
