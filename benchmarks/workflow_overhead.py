"""What the workflow adds to its commands: Snakemake against the same `spider` commands in a row.

    python benchmarks/workflow_overhead.py [--quick] [--json FILE]

One job runs at a time, on all cores, in an empty folder. Two measures:

- in turn, and then the other way round: the smoke preset with one step a stage by Snakemake, and the commands
  that it printed by `bash` one after the other. Not tracked: by hand, each command starts a sender of its
  own, which a workflow's jobs share, so that tracking would speak for the workflow.
- inside: one run's seconds less those of its jobs, which Snakemake's own `benchmark:` files hold, and the
  processor seconds of the Snakemake process alone, which what else the machine does disturbs least. They are
  given for the same runs and, tracked, for the default run.

``--quick`` leaves out the default run, and takes one turn instead of two.
"""

from __future__ import annotations

import contextlib
import csv
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import yaml
from common import arguments, report

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent
DEFAULT = ROOT / "config.yaml"


class Measured(NamedTuple):
    """A run of the workflow."""

    seconds: float
    processor: float
    """Seconds that Snakemake itself was at work."""
    inside: list[float]
    """Seconds of each of its jobs."""
    commands: list[str]
    """In the order in which they ran."""

    @property
    def added(self) -> float:
        return self.seconds - sum(self.inside)


def short_smoke(folder: Path) -> Path:
    """The smoke preset with as little work in its jobs as can be."""
    config = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())
    for stage in config["runs"]["smoke"]["stages"]:
        stage |= {"max_steps": 1, "warmup_steps": 0}
    config["tracking"] = {"enabled": False}
    path = folder / "short.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def snakemake(configuration: Path, folder: Path, *arguments: str) -> tuple[str, float, float]:
    """Run the workflow in ``folder``, one job at a time: what it printed, seconds, those it was at work."""
    command = [PROGRAMS / "snakemake", "--snakefile", ROOT / "Snakefile", "--workflow-profile", "none"]
    command += ["--configfile", configuration, "--cores", "all", "--config", "results=results"]
    command += ["--resources", "place=1", "--default-resources", "place=1", "--printshellcmds", *arguments]
    printed, used, begun = folder / "printed.txt", 0.0, time.perf_counter()
    with open(printed, "w") as output:
        running = psutil.Popen(command, cwd=folder, stdout=output, stderr=output)
        while running.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = running.cpu_times()
                used = max(used, times.user + times.system)  # a process that has ended has none
            time.sleep(0.02)
    seconds = time.perf_counter() - begun
    if running.returncode:
        sys.exit(printed.read_text())
    return printed.read_text(), seconds, used


def workflow(configuration: Path, folder: Path) -> Measured:
    """The workflow from nothing to report."""
    folder.mkdir()
    printed, seconds, processor = snakemake(configuration, folder)
    jobs = []
    for path in (folder / "results/benchmarks").rglob("*.tsv"):
        with open(path) as file:
            jobs += [float(row["s"]) for row in csv.DictReader(file, delimiter="\t")]
    found = re.findall(r"(?m)^Shell command: (spider .+)$", printed)
    if len(found) != len(jobs):
        sys.exit(f"{len(jobs)} jobs, but {len(found)} commands in what Snakemake printed:\n{printed}")
    return Measured(seconds, processor, jobs, found)


def by_hand(commands: list[str], configuration: Path, folder: Path) -> float:
    """Seconds of the same commands in a row."""
    (folder / "results").mkdir(parents=True)
    (folder / "results/config.yaml").write_bytes(configuration.read_bytes())
    path = f"export PATH='{PROGRAMS}':\"$PATH\"; "
    begun = time.perf_counter()
    for command in commands:
        done = subprocess.run(["bash", "-c", path + command], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{command}\n{done.stderr}")
    return time.perf_counter() - begun


def in_turn(configuration: Path, folder: Path, turns: int) -> tuple[list[Measured], list[float]]:
    """The workflow and its commands in a row, each of them first as often as the other."""
    smoke: list[Measured] = []
    hand: list[float] = []
    for turn in range(turns):
        if not turn % 2:
            smoke.append(workflow(configuration, folder / f"smoke-{turn}"))
        snapshot = folder / "smoke-0/results/config.yaml"
        hand.append(by_hand(smoke[0].commands, snapshot, folder / f"hand-{turn}"))
        if turn % 2:
            smoke.append(workflow(configuration, folder / f"smoke-{turn}"))
    return smoke, hand


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        short = short_smoke(folder)
        smoke, hand = in_turn(short, folder, 1 if options.quick else 2)
        _, planning, _ = snakemake(short, folder / "smoke-0", "--dry-run", "--forceall")
        default = None if options.quick else workflow(DEFAULT, folder / "default")

    jobs = len(smoke[0].inside)
    difference = median(one.seconds - other for one, other in zip(smoke, hand, strict=True))
    processor = median(one.processor for one in smoke)
    added = median(one.added for one in smoke)
    rows = [
        ["smoke preset, shortened: jobs", str(jobs), ""],
        ["  by Snakemake", f"{median(one.seconds for one in smoke):.1f} s", ""],
        ["  the same commands in a row", f"{median(hand):.1f} s", ""],
        ["  more by Snakemake, a job", f"{difference / jobs:.2f} s", "< 2 s"],
        ["  outside of its jobs, a job", f"{added / jobs:.2f} s", "< 2 s"],
        ["  Snakemake at work, in all", f"{processor:.1f} s", ""],
        ["  planning alone", f"{planning:.1f} s", ""],
    ]
    figures = {
        "jobs": jobs,
        "smoke_seconds": [one.seconds for one in smoke],
        "by_hand_seconds": hand,
        "difference_per_job": difference / jobs,
        "processor_seconds": processor,
        "outside_per_job": added / jobs,
        "planning_seconds": planning,
    }
    if default:
        count, share = len(default.inside), default.added / default.seconds
        rows += [
            ["default run: jobs", str(count), ""],
            ["  by Snakemake", f"{default.seconds:.1f} s", ""],
            ["  outside of its jobs, a job", f"{default.added / count:.2f} s", "< 2 s"],
            ["  outside of its jobs, of the whole", f"{share:.1%}", "< 3%"],
            ["  Snakemake at work, in all", f"{default.processor:.1f} s", ""],
        ]
        figures |= {
            "default_seconds": default.seconds,
            "default_outside": default.added,
            "default_share": share,
        }
    report("What the workflow adds", ["", "measured", "goal"], rows, figures, options, ["snakemake"])


if __name__ == "__main__":
    main()
