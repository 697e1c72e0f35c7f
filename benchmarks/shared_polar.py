"""Muon's polar factors in two processes: each computes all of them, or they share them (DDP, FSDP).

Two processes of one thread each update the default run's model (``--preset`` another) with random gradients.
Of a step there is told how many polar factors a process computes, how long these and their exchange take by
the clock and of its processor time, and how long the optimizer takes in all; medians, of the slower process.

    python benchmarks/shared_polar.py [--preset NAME] [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import parser, report
from torch import Tensor

from spider.config import OptimizerConfig, load_config
from spider.config.model import model_block
from spider.model import build_model
from spider.processes.launch import launch
from spider.processes.parallel import shard
from spider.processes.world import ALONE, join
from spider.training import optim

ROOT = Path(__file__).parents[1]
WAYS = {"each all of them": (False, False), "shared, DDP": (True, False), "shared, FSDP": (True, True)}
TIMES = ("polar_seconds", "polar_processor_seconds", "step_seconds")


def measure(preset: str | None, way: str, repeats: int) -> dict[str, Any]:
    """What one of the two processes finds."""
    shared, cut = WAYS[way]
    with join() as world:
        (run,) = load_config(ROOT / "config.yaml").runs.values()
        config = run.model if preset is None else type(run.model).model_validate(model_block(preset))
        torch.manual_seed(0)
        model = build_model(config)
        if cut:
            shard(model, world)
        settings = OptimizerConfig(kind="muon")
        optimizer = optim.build_optimizer(
            model, settings, 1e-3, torch.bfloat16, world=world if shared else ALONE
        )
        share_out, polar, factors = optim.share_out, optim.polar, [0]
        seconds, used, steps = [0.0], [0.0], []

        def counted(u_Nrc: Tensor) -> Tensor:
            factors[-1] += len(u_Nrc)
            return polar(u_Nrc)

        def timed(*given: Any) -> Tensor:
            began, processor = time.perf_counter(), time.process_time()
            shares = share_out(counted, *given[1:])
            seconds[-1] += time.perf_counter() - began
            used[-1] += time.process_time() - processor
            return shares

        optim.share_out = timed
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for _ in range(repeats + 1):
            dist.barrier()
            factors.append(0)
            seconds.append(0.0)
            used.append(0.0)
            began = time.perf_counter()
            optimizer.step()
            steps.append(time.perf_counter() - began)
        slower = torch.tensor([median(seconds[2:]), median(used[2:]), median(steps[1:])])
        dist.all_reduce(slower, dist.ReduceOp.MAX)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
        dist.all_gather(counts, torch.tensor([factors[-1]]))
        return {
            "factors": [int(n) for n in counts],
            **dict(zip(TIMES, slower.tolist(), strict=True)),
        }


def main() -> None:
    if sys.argv[1:2] == ["--process"]:
        _, _, preset, way, repeats, output = sys.argv
        torch.set_num_threads(1)
        found = measure(preset or None, way, int(repeats))
        Path(output).write_text(json.dumps(found))  # both know the same
        return
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--preset", default="", help="a model's preset, in place of the default run's")
    asked = options.parse_args()
    figures, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for i, way in enumerate(WAYS):
            output = Path(folder) / f"{i}.json"
            given = [__file__, "--process", asked.preset, way, str(2 if asked.quick else 15), str(output)]
            if launch(2, given):
                sys.exit(f"{way}: a process failed")
            figures[way] = told = json.loads(output.read_text())
            took = [f"{1000 * told[name]:.1f}" for name in TIMES]
            rows.append([way, " and ".join(map(str, told["factors"])), *took])
    report(
        "Two processes",
        ["polar factors", "a process", "ms", "processor ms", "step ms"],
        rows,
        figures,
        asked,
        ["torch"],
    )


if __name__ == "__main__":
    main()
