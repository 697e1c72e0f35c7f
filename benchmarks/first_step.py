"""How long a stage takes until its first training step is done, compiled, without a warm-up and after one.

Cold: nothing was ever compiled. Warm: the warm-up rule ran, in another process. Each is measured in fresh
processes in turn, every one with empty folders of its own for all that torch and its compilers keep, so what
makes the difference is in the warm-up's file. The warm-up's own time is told too: a run pays it once.

    python benchmarks/first_step.py [--quick] [--json FILE] [--config FILE] [--precision bf16|fp8]

The run is the first of the configuration (default: config.yaml, with --quick the smoke preset), compiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import parser, report
from steps import first_steps, spec_of

ROOT = Path(__file__).parents[1]

WARM_UP = """
import sys
from pathlib import Path
from spider.config import StageSpec
from spider.training.warmup import warm_up
warm_up(StageSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
"""


def own_caches(folder: Path) -> dict[str, str]:
    """Variables that make torch, its compilers and temporary files start from nothing."""
    folder.mkdir(parents=True)
    names = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    places = {name: folder / name.lower() for name in names}
    for place in places.values():
        place.mkdir()
    return {name: str(place) for name, place in places.items()}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--config", type=Path, help="configuration (default: the default run's)")
    options.add_argument("--precision", choices=["bf16", "fp8"], default="bf16")
    chosen = options.parse_args()
    configuration = chosen.config or ROOT / ("presets/smoke.yaml" if chosen.quick else "config.yaml")
    spec = spec_of(configuration, compile=True, precision=chosen.precision)
    folder = Path(tempfile.mkdtemp(prefix="spider-first-step-"))
    try:
        found = measure(spec, folder, rounds=1 if chosen.quick else 2)
    finally:
        shutil.rmtree(folder)
    cold, warm = found["cold"], found["warm"]
    rows = [
        [what, *(f"{way[what]:.2f}" for way in (cold, warm)), f"{cold[what] / warm[what]:.1f}x"]
        for what in ("import", "build", "first step", "second step", "to the first step's end")
    ]
    rows.append(["the warm-up itself", "", f"{found['warm_up']:.2f}", ""])
    report(
        f"Seconds to the first step of {spec.run} ({spec.model.preset}), {chosen.precision}, compiled",
        ["what", "cold", "warm", "faster"],
        rows,
        found,
        chosen,
        ["torch", "torchao"],
    )


def measure(spec: Any, folder: Path, rounds: int) -> dict[str, Any]:
    """Median seconds of each part, cold and warm, over ``rounds`` processes of each."""
    record = folder / f"warmup-{spec.shape}.json"
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", WARM_UP, spec.model_dump_json(), str(record)],
        env={**os.environ, **own_caches(folder / "warming")},
        check=True,
    )
    took = time.perf_counter() - began
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for i in range(rounds):
        for name, warmup in (("cold", None), ("warm", record)):
            place = folder / f"{name}-{i}"
            steps = first_steps(spec, place, 3, warmup=warmup, environment=own_caches(place / "caches"))
            if "error" in steps:
                sys.exit(f"{name}: {steps['error']}")
            first, second, _ = steps["steps"]
            found[name].append(
                {
                    "import": steps["imported"],
                    "build": steps["built"] - steps["imported"],
                    "first step": first,
                    "second step": second,
                    "to the first step's end": steps["built"] + first,
                }
            )
    medians = {
        name: {what: median(times[what] for times in each) for what in each[0]}
        for name, each in found.items()
    }
    return {**medians, "warm_up": took}


if __name__ == "__main__":
    main()
