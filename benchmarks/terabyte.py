"""Simulate how a terabyte of FineWeb-Edu is prepared on 64 nodes: time, disk, and what breaks first.

    python benchmarks/terabyte.py [--validation 0.0001] [--exact] [--quick] [--json FILE]

Snakemake plans the real workflow, in a dry run that is timed: download, near duplicates, decontamination, a
tokenizer, encoding, index and packed rows. Memory, time limits, threads, inputs and outputs of each job are
those of the plan. A job starts as soon as its inputs are there and a node has the cores and the memory, as by
Slurm. How long a job takes is not measured at this size: it is the text by the rates of `RATES`, or a quarter
of the requested time beyond the first half hour, because requests are four times what was measured, or more.
Nothing is downloaded, and a disk that all nodes share has no limit here.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import PROGRAMS, ROOT, parser, report

from spider.common.files import write_json

NODES, CORES, MEMORY_MB = 64, 32, 256_000
#: Bytes of text in a part (`spider.data.listing.PART_BYTES`), and in a byte of its compressed parquet file.
PART, PACKED = 4e9, 1.7
#: Bytes of text a second of one core, from docs/LOG.md: "cleaning of data" of 2026-11-25, and "Tokenizers".
RATES = {"signatures": 31.1e6, "contaminated": 63e6, "encode": 8.2e6}
#: Assumed, not measured: bytes a second of a download, and downloads at a time.
LINE, AT_ONCE = 50e6, 20
#: Seconds that a job takes to start, as the rules measure it, with the interpreter and the imports.
START = 20
#: Bytes of disk for a byte of text: raw files, signatures of near duplicates, shards of 4.64 bytes a token.
#: While a part's signatures are written, its words take three times its text.
RAW, SIGNATURES, SHARDS, WORDS = 1 / PACKED, 120 / 2000, 2 / 4.64, 3


class Job(NamedTuple):
    """A job of the plan."""

    rule: str
    cores: int
    mem_mb: int
    minutes: int
    inputs: list[str]
    outputs: list[str]

    def asked(self) -> list[int]:
        """Return the cores and the memory that it takes of a node; too much memory is all of it."""
        return [self.cores, min(self.mem_mb, MEMORY_MB)]

    def seconds(self) -> float:
        """Return how long it takes."""
        if self.rule == "download":
            return START + PART / PACKED / LINE
        if self.rule in RATES:
            return START + PART / RATES[self.rule]
        return START + max(0, self.minutes - 30) * 60 / 4


def plan(size: str, validation: float, exact: bool, folder: Path) -> tuple[list[Job], float]:
    """Return the jobs of the real plan, and the seconds that Snakemake takes to make it."""
    files = [f"sample/350BT/{number:03d}_00000.parquet" for number in range(300)]
    source = {"kind": "hub", "repo": "HuggingFaceFW/fineweb-edu", "revision": "main", "files": files}
    cleaning = {"exact": True, "near": None if exact else 0.8, "decontaminate": True}
    web = {
        "source": source | {"take": size},
        "validation": validation,
        "cleaning": cleaning,
        "tokenizer": "bpe",
    }
    run = {"data": "web", "model": "gpt-cpu", "stages": [{"name": "main", "max_steps": 1}]}
    blocks = {"datasets": {"web": web}, "runs": {"none": run}, "results": str(folder / "results")}
    blocks |= {"tokenizers": {"bpe": {"data": "web", "vocab_size": 32768, "max_bytes": 2_000_000_000}}}
    write_json(folder / "config.json", blocks)
    command = [PROGRAMS / "snakemake", "--snakefile", ROOT / "Snakefile", "--dry-run", "--quiet", "progress"]
    command += ["--cores", "1000", "--resources", f"mem_mb={10**9}", "--default-resources", "mem_mb=2000"]
    command += ["runtime=120", "--configfile", folder / "config.json"]
    command += ["--", folder / "results/shards/web/packed-2048.json"]
    began = time.perf_counter()
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    took = time.perf_counter() - began
    jobs = []
    for rule, block in re.findall(r"(?m)^rule (\S+):\n((?:    .*\n)+)", printed):
        lines = dict(line.strip().split(": ", 1) for line in block.splitlines() if ": " in line)
        asked = dict(pair.split("=", 1) for pair in lines["resources"].split(", ") if "=" in pair)
        given = (int(lines.get("threads", 1)), int(asked["mem_mb"]), int(asked["runtime"]))
        files = (lines.get(one, "").split(", ") for one in ("input", "output"))
        jobs.append(Job(rule.partition("_web_")[0], *given, *files))
    return jobs, took


def simulate(jobs: list[Job]) -> tuple[dict[int, float], int]:
    """Return when each job ends, and the number of jobs in the longest chain.

    A job that fits on no node gets a whole one.
    """
    made = {file: number for number, job in enumerate(jobs) for file in job.outputs}
    waits = [{made[file] for file in job.inputs if file in made} for job in jobs]
    depth = [1] * len(jobs)
    readers = defaultdict(list)
    for number, one in ((number, one) for number, needed in enumerate(waits) for one in needed):
        readers[one].append(number)
    free, line = np.tile([CORES, MEMORY_MB], (NODES, 1)), AT_ONCE
    ready = [number for number, needed in enumerate(waits) if not needed]
    running: list[tuple[float, int, int]] = []
    ends, now = {}, 0.0
    while ready or running:
        for number in list(ready):
            fits = np.flatnonzero((free >= jobs[number].asked()).all(1))
            if len(fits) and (line or jobs[number].rule != "download"):
                ready.remove(number)
                free[fits[0]] -= jobs[number].asked()
                line -= jobs[number].rule == "download"
                heapq.heappush(running, (now + jobs[number].seconds(), number, int(fits[0])))
        now, number, node = heapq.heappop(running)
        ends[number] = now
        free[node] += jobs[number].asked()
        line += jobs[number].rule == "download"
        for one in readers[number]:
            depth[one] = max(depth[one], depth[number] + 1)
            waits[one].remove(number)
            if not waits[one]:
                ready.append(one)
    return ends, max(depth)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--validation", type=float, default=0.005, help="share that is held out")
    arguments.add_argument("--exact", action="store_true", help="find no near duplicates")
    options = arguments.parse_args()
    size = "40 GB" if options.quick else "1 TB"
    with tempfile.TemporaryDirectory() as folder:
        jobs, planning = plan(size, options.validation, options.exact, Path(folder))
    ends, chain = simulate(jobs)
    rows, figures = [], {}
    for rule in dict.fromkeys(job.rule for job in jobs):
        own = [(job, ends[number]) for number, job in enumerate(jobs) if job.rule == rule]
        figures[rule] = [len(own), sum(job.seconds() * job.cores for job, _ in own) / 3600]
        figures[rule] += [max(job.seconds() for job, _ in own) / 60, max(job.minutes for job, _ in own)]
        figures[rule] += [max(job.mem_mb for job, _ in own) / 1000, max(end for _, end in own) / 3600]
        rows.append([rule, *(f"{value:,.1f}".removesuffix(".0") for value in figures[rule])])
    parts, near = sum(job.rule == "download" for job in jobs), not options.exact
    total = {
        "wall time, hours": max(ends.values()) / 3600,
        "core-hours": sum(values[1] for values in figures.values()),
        "Snakemake plans, seconds": planning,
        "jobs one after the other": chain,
        "jobs that no node holds": sum(job.mem_mb > MEMORY_MB for job in jobs),
        "disk that stays, TB": parts * PART / 1e12 * (RAW + SHARDS + near * SIGNATURES),
        "disk of words at one time, TB": near * WORDS * min(parts, NODES * CORES) * PART / 1e12,
    }
    rows += [[name, f"{value:,.1f}", *[""] * 5] for name, value in total.items()]
    columns = ["", "jobs", "core-hours", "longest, min", "time limit, min", "memory, GB", "all done, h"]
    report(f"{size} on {NODES} nodes", columns, rows, {**figures, **total}, options, ["snakemake"])


if __name__ == "__main__":
    main()
