"""The first steps of a training stage, by the real engine on made-up text, in a process of their own.

A process each, because memory that a training leaves behind, compiled code and torch's settings would favour
or burden the next one; and because one that runs out of memory should not end the others.

The clock stands still for nobody: a step's time is that between the ends of two steps, each after the device
has finished all its work.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml

from spider.config import Config, StageSpec, load_config, merged

STAGE = "steps"


def config_of(configuration: Path, *, stage: dict[str, Any] | None = None, **changes: Any) -> Config:
    """The first run of a configuration with ``changes`` to it, and one ``stage`` of these settings (default:
    one that never ends nor saves). No memory is read."""
    raw = yaml.safe_load(configuration.read_text())
    name, run = next(iter(raw["runs"].items()))
    if isinstance(run["model"], str):
        run["model"] = {"preset": run["model"]}
    endless = {"max_steps": 10**6, "ckpt_every": 10**6, "log_every": 10**6, "schedule": "constant"}
    endless["ckpt_minutes"] = None
    run["model"] |= {"memory": None}
    run = merged(run, changes) | {"stages": [{"name": STAGE, **(stage or endless)}]}
    return load_config(raw | {"runs": {name: run}})


def spec_of(configuration: Path, **changes: Any) -> StageSpec:
    """The stage of `config_of`."""
    config = config_of(configuration, **changes)
    return config.stage(next(iter(config.runs)), STAGE)


def first_steps(
    spec: StageSpec,
    folder: Path,
    steps: int,
    *,
    settle: int = 0,
    warmup: Path | None = None,
    profile: bool = False,
    environment: dict[str, str] | None = None,
    data: Path | None = None,
) -> dict[str, Any]:
    """Train a stage's first steps.

    Args:
        folder: for the training and its data.
        data: encoded text (default: made up).
        settle: memory is counted from after this many steps.
        warmup: record of a warm-up of this shape; None: there was none.
        profile: whether to tell what the last step consists of.
        environment: variables of the process besides this one's.

    Returns:
        ``imported`` and ``built``, seconds from the start of the process until the modules were there, and
        until there were model, optimizer and data; ``steps``, seconds of each step; ``peak_memory`` in bytes,
        of the device's allocator or on a CPU of the process; ``device``; ``compiled_again``, graphs that were
        compiled after ``settle`` steps; with ``profile``, ``parts``: name, seconds and calls of each kernel,
        or on a CPU of each operator without those inside. Or only ``error``, one line.
    """
    order = {
        "spec": spec.model_dump(mode="json"),
        "folder": str(folder),
        "steps": steps,
        "settle": settle,
        "warmup": str(warmup) if warmup else None,
        "profile": profile,
        "data": str(data) if data else None,
        "began": time.time(),
    }
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(order)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": said[-1] if said else f"ended with status {done.returncode}"}


def main(order: dict[str, Any]) -> dict[str, Any]:
    """What `first_steps` describes, in this process."""
    import torch

    from spider.training import stage
    from spider.training.precision import device_name
    from spider.training.warmup import forget_peak, peak_memory_mb

    imported = time.time() - order["began"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Path(order["data"] or Path(order["folder"], "data"))
    if order["data"] is None:
        from spider.data.mock import make_mock_data

        make_mock_data(data)
    marks: list[float] = []
    graphs = [0]

    def mark() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    class Trainer(stage.Trainer):
        def run(self, *args: Any, **options: Any) -> Any:
            mark()
            return super().run(*args, **options)

    class Enough(Exception):
        pass

    activities = torch.profiler.supported_activities()
    profiler = torch.profiler.profile(activities=activities) if order["profile"] else nullcontext()

    def on_step(number: int) -> None:
        mark()
        if number == order["settle"]:
            forget_peak(device)
            graphs.append(_graphs())
        if number == order["steps"] - 1:
            profiler.__enter__()
        if number == order["steps"]:
            profiler.__exit__(None, None, None)
            raise Enough

    stage.Trainer = Trainer  # type: ignore[misc]
    mark()
    try:
        stage.train(
            StageSpec.model_validate(order["spec"]),
            Path(order["folder"], "training"),
            data,
            warmup=Path(order["warmup"]) if order["warmup"] else None,
            on_step=on_step,
        )
    except Enough:
        pass
    except ValueError as error:
        sys.exit(str(error).splitlines()[0])
    began, built, *_ = marks
    return {
        "imported": imported,
        "built": imported + built - began,
        "steps": [after - before for before, after in itertools.pairwise(marks[1:])],
        "peak_memory": 1e6 * peak_memory_mb(device),
        "device": device_name(device),
        "compiled_again": _graphs() - graphs[-1],
        "parts": _parts(profiler) if order["profile"] else None,
    }


def _graphs() -> int:
    """How many this process has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def _parts(profiler: Any) -> list[tuple[str, float, int]]:
    from device_time import kernel_times

    if kernels := kernel_times(profiler):
        return [(name, sum(us) / 1e6, len(us)) for name, us in kernels.items()]
    averages = profiler.key_averages()
    return [(event.key, event.self_cpu_time_total / 1e6, event.count) for event in averages]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
