"""Time two workflows side by side, each from an empty folder and on one core.

The first is a configuration of this checkout. The second is the default run of another checkout, with the
programs of its ``.venv``. When the machine changes its speed, it does so for both. In the second round they
change cores. zpaq is off.

    python benchmarks/paired.py --other CHECKOUT [--config FILE] [--rounds N] [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from threading import Thread

import yaml
from common import ROOT, parser, report, spread

from spider.config import merged
from spider.files import write_json


def timed(checkout: Path, config: Path, folder: Path, core: int, figures: list[dict[str, float]]) -> None:
    """Run the workflow of a checkout on one core, and append its seconds and its processor's seconds."""
    raw = yaml.safe_load(config.read_text())
    for run in raw["runs"].values():
        if run["evaluation"].get("zpaq"):
            run["evaluation"]["zpaq"] = False
    folder.mkdir()
    write_json(folder / "config.json", merged(raw, {"results": str(folder / "results")}))
    programs = checkout / ".venv/bin"
    command = ["taskset", "-c", str(core), programs / "snakemake", "--cores", "1", "--quiet", "all"]
    command += ["--snakefile", checkout / "Snakefile", "--configfile", folder / "config.json"]
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"the workflow of {checkout} failed")
    figures.append({"seconds": seconds, "processor": usage.ru_utime + usage.ru_stime})


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--other", type=Path, required=True, help="another checkout, whose default run is timed"
    )
    options.add_argument("--config", type=Path, default=ROOT / "presets/ngram-cpu.yaml", help="configuration")
    options.add_argument("--rounds", type=int, default=2, help="times that each runs (default: 2)")
    chosen = options.parse_args()
    config, other = chosen.config, chosen.other.resolve() / "config.yaml"
    if chosen.quick:
        config = other = ROOT / "presets/smoke.yaml"
    figures: dict[str, list[dict[str, float]]] = {"this": [], "other": []}
    with tempfile.TemporaryDirectory() as scratch:
        for round in range(1 if chosen.quick else chosen.rounds):
            jobs = [
                Thread(
                    target=timed, args=(checkout, path, Path(scratch) / f"{name}{round}", core, figures[name])
                )
                for name, checkout, path, core in (
                    ("this", ROOT, config, round % 2),
                    ("other", chosen.other.resolve(), other, 1 - round % 2),
                )
            ]
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()
    rows = []
    for what in ("seconds", "processor"):
        this, others = ([one[what] for one in figures[name]] for name in ("this", "other"))
        ratios = [a / b for a, b in zip(this, others, strict=True)]
        rows.append([what, *(f"{sum(times) / len(times):.0f}" for times in (this, others)), spread(ratios)])
    columns = ["", config.name, f"default run of {chosen.other.name}", "ratio"]
    report("Side by side, one core each", columns, rows, figures, chosen, ["torch", "snakemake"])


if __name__ == "__main__":
    main()
