"""Measure what Snakemake adds to the jobs of a workflow.

    python benchmarks/workflow_overhead.py [--other CHECKOUT] [--quick] [--json FILE]

The default run (with ``--quick`` the smoke preset with one step for each stage) runs in an empty folder, one
job at a time on all cores. The seconds outside of its jobs are those of the run less those in Snakemake's own
`benchmark:` files. The processor seconds of the Snakemake process depend least on other work of the machine.

With ``--other``, the code of another checkout plans the same finished run, in turn with this one.
"""

from __future__ import annotations

import contextlib
import csv
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml
from common import PROGRAMS, ROOT, parser, report


def short_smoke(folder: Path) -> Path:
    """Write the smoke preset with as little work as possible in its jobs; return the file."""
    config = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())
    for stage in config["runs"]["smoke"]["stages"]:
        stage |= {"max_steps": 1, "warmup_steps": 0}
    path = folder / "short.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def snakemake(configuration: Path, folder: Path, *options: str, code: Path = ROOT) -> tuple[float, float]:
    """Run the workflow, one job at a time; return its seconds and Snakemake's processor seconds."""
    command = [PROGRAMS / "snakemake", "--snakefile", code / "Snakefile", "--workflow-profile", "none"]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    command += ["--configfile", configuration, "--cores", "all", "--config", "results=results"]
    command += ["--resources", "place=1", "--default-resources", "place=1", *options]
    printed, used, began = folder / "printed.txt", 0.0, time.perf_counter()
    with open(printed, "w") as output:
        running = psutil.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
        while running.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = running.cpu_times()
                used = max(used, times.user + times.system)  # a process that has ended reports zero
            time.sleep(0.02)
    if running.returncode:
        sys.exit(printed.read_text())
    return time.perf_counter() - began, used


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--other", type=Path, help="A checkout whose code plans the same run.")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        configuration = short_smoke(folder) if options.quick else ROOT / "config.yaml"
        seconds, processor = snakemake(configuration, folder)
        codes = [ROOT, options.other.resolve()] if options.other else [ROOT]
        plans = [
            [snakemake(configuration, folder, "--dry-run", code=code)[1] for code in codes] for _ in range(5)
        ]
        planning, *other = (statistics.median(column) for column in zip(*plans, strict=True))
        jobs = []
        for path in (folder / "results/benchmarks").rglob("*.tsv"):
            with open(path) as file:
                jobs += [float(row["s"]) for row in csv.DictReader(file, delimiter="\t")]
    outside = seconds - sum(jobs)
    rows = [
        ["jobs", str(len(jobs)), ""],
        ["the whole run", f"{seconds:.1f} s", ""],
        ["outside of its jobs, for each job", f"{outside / len(jobs):.2f} s", "< 2 s"],
        ["outside of its jobs, of the whole", f"{outside / seconds:.1%}", "" if options.quick else "< 3%"],
        ["Snakemake's processor time", f"{processor:.1f} s", ""],
        ["processor time of planning, when nothing is to be done", f"{planning:.2f} s", ""],
    ]
    if other:
        rows.append(["that of the other code", f"{other[0]:.2f} s", f"ratio {planning / other[0]:.3f}"])
    figures = {
        "jobs": len(jobs),
        "seconds": seconds,
        "outside_seconds": outside,
        "processor_seconds": processor,
        "planning_seconds": planning,
    }
    report("What the workflow adds", ["", "measured", "goal"], rows, figures, options, ["snakemake"])


if __name__ == "__main__":
    main()
