"""Jobs of real workflows on made GPUs: none shares a GPU with another, and no GPU idles while a job waits.

Snakemake, the Snakefile and the claims are real. The computing is not: a job takes its GPUs as `spider` does,
and writes empty outputs instead of using them.
"""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from spider.config import load_config
from spider.processes.gpus import bounds
from tests.forkserver import python

from .conftest import PATIENCE, ROOT, finished

#: Starts snakemake, whose jobs find the command beside the interpreter. Torch sees no GPU here.
DRIVER = """
import sys
import spider.workflow.start
import snakemake.cli
sys.modules.pop("pynvml", None)
sys.executable = sys.argv.pop(1)
spider.workflow.start.lacking_gpus = lambda gpus: None
snakemake.cli.main(sys.argv[1:])
"""

#: Stands for the command of a job, and notes when a job of a run has which GPUs. A warm-up has its GPU until
#: as many warm-ups as there are GPUs have begun.
SPIDER = """
import json, os, sys, time
from pathlib import Path
sys.modules.pop("pynvml", None)
from spider.config import load_config
from spider.processes.gpus import VISIBLE, claimed
from spider.common.results import CompressedFolder, Results

words = sys.argv[1:]
config = load_config(Path(words[words.index("--config") + 1]))
command, name = words[words.index("--log") + 2 :][:2]
if command == "overlap":
    Results(Path(config.results)).overlap(name).touch()
    sys.exit()
run, _, stage = name.partition("/")
folder = Results(Path(config.results)).stage(run, stage)
outputs = {
    "warmup": lambda: [Results(Path(config.results)).warmup(run, config.stage(run, stage).shape)],
    "train": lambda: [folder.receipt],
    "evaluate": lambda: [folder.evaluation, folder.checkpoint_scores],
    "sample": lambda: [folder.sample, folder.sample_text],
}[command]()
gpus = config.runs[run].resources.gpus
with claimed(gpus if command == "train" else min(1, gpus)):
    note = [command, name, os.environ[VISIBLE].split(","), time.monotonic()]
    begun = Path(os.environ["TIMELINE"]).with_name(f"warm-{Path.cwd().name}-{run}")
    while command == "warmup" and gpus:
        begun.touch()
        if len([*begun.parent.glob("warm-*")]) >= min(len(config.runs), int(os.environ["MADE_GPUS"]) / gpus):
            break
        time.sleep(0.01)
    if not gpus:
        time.sleep(0.3)
    with open(os.environ["TIMELINE"], "a") as file:
        file.write(json.dumps([*note, time.monotonic()]) + "\\n")
for output in outputs:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("")
"""

RUN: dict[str, Any] = {
    "data": "text",
    "model": {"family": "gpt", "preset": "gpt-cpu"},
    "stages": [{"name": "a", "max_steps": 1}, {"name": "b", "max_steps": 1}],
    "resources": {"gpus": 1, "mem_mb": 10, "threads": 1},
}


class Machine:
    """Workflows on a machine with made GPUs."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.folder = folder
        self.timeline = folder / "timeline.jsonl"
        (folder / "spider").write_text(f"#!{python()}" + SPIDER)
        (folder / "spider").chmod(0o755)
        self.environment = {
            **os.environ,
            "MADE_GPUS": str(gpus),
            "PYTHONPATH": f"{ROOT / 'tests/made_gpus'}:{ROOT}",
            "TIMELINE": str(self.timeline),
            "SPIDER_GPU_LOCKS": str(folder / "locks"),
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def start(self, name: str, config: Any, *arguments: str) -> subprocess.Popen[str]:
        """Start snakemake in a folder of this name with this configuration, on 32 cores."""
        folder = self.folder / name
        for dataset in config["datasets"]:
            encoded = folder / "results/shards" / dataset
            encoded.mkdir(parents=True, exist_ok=True)
            for name in ("metadata.json", "packed-2048.json"):
                (encoded / name).touch()
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        snakefile, profile = ROOT / "Snakefile", ROOT / "profiles/default"
        options = ["--snakefile", str(snakefile), "--profile", str(profile), "--cores", "32"]
        return subprocess.Popen(
            [python(), "-c", DRIVER, str(self.folder / "python"), *options, *arguments],
            cwd=folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, config: Any, *arguments: str) -> str:
        output, status = finished(self.start("one", config, *arguments), PATIENCE)
        assert status == 0 and "Traceback" not in output, output
        return output

    def jobs(self) -> list[list[Any]]:
        """Return command, stage, GPUs, begin and end of each job, in the order of their begins."""
        return sorted(map(json.loads, self.timeline.read_text().splitlines()), key=lambda job: job[3])

    def used(self) -> set[str]:
        """Return the GPUs that jobs used, after checking that no two jobs had one at the same time."""
        last: dict[str, list[Any]] = {}
        for job in self.jobs():
            for gpu in job[2]:
                assert gpu not in last or last[gpu][4] <= job[3], (last[gpu], job)
                last[gpu] = job
        return {*last}


def runs(number: int, **resources: int) -> dict[str, Any]:
    """Return a configuration of this number of runs on one GPU each."""
    run = {**RUN, "resources": RUN["resources"] | resources}
    datasets = {"text": {"source": {"kind": "pydocs"}}}
    named = dict.fromkeys([f"r{i}" for i in range(number)], run)
    return {"datasets": datasets, "runs": named, "tracking": {"enabled": False}}


def targets(number: int) -> list[str]:
    """Return the scores and samples of all stages of these runs."""
    names = ("evaluation.json", "sample.json")
    return [f"results/runs/r{i}/{stage}/{name}" for i in range(number) for stage in "ab" for name in names]


def test_jobs_of_one_gpu_use_all_gpus_and_share_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 8)
    machine.run(runs(8), *targets(8))
    jobs = machine.jobs()
    assert len(jobs) == 8 * 7 and {len(job[2]) for job in jobs} == {1}
    assert len(machine.used()) == 8


def test_a_preset_for_eight_gpus_trains_one_run_at_a_time(tmp_path: Path) -> None:
    machine, path = Machine(tmp_path, 8), ROOT / "presets/miniseries-gpt.yaml"
    trained = [*load_config(path).runs][:3]
    config = {**yaml.safe_load(path.read_text()), "results": "results", "tracking": {"enabled": False}}
    machine.run(config, *(f"results/runs/{run}/main/train.json" for run in trained))
    assert [len(job[2]) for job in machine.jobs() if job[0] == "train"] == [8, 8, 8]
    assert len(machine.used()) == 8


def test_jobs_at_once_request_no_more_memory_than_there_is_and_no_gpu_without_one(tmp_path: Path) -> None:
    machine, most = Machine(tmp_path, 0), bounds()["mem_mb"]
    machine.run(runs(2, gpus=0, mem_mb=most * 6 // 10), *targets(2)[::4])
    jobs = machine.jobs()
    assert len(jobs) == 6 and all(one[4] <= next_[3] for one, next_ in pairwise(jobs))
    assert [job[2] for job in jobs] == [[""]] * 6


def test_two_workflows_side_by_side_share_no_gpu(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    started = [machine.start(name, runs(2), *targets(2)) for name in ("one", "two")]
    for process in started:
        output, status = finished(process, PATIENCE)
        assert status == 0, output
    assert machine.used() == {"0", "1"} and len(machine.jobs()) == 28


def test_the_dry_run_says_the_bounds_and_a_user_sets_others(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    assert "All jobs at once use at most gpu=2 mem_mb=" in machine.run(runs(1), "--dry-run", *targets(1))
    own = ["--resources", "gpu=1", "mem=1GB", "--"]
    assert "All jobs at once" not in machine.run(runs(1), "--dry-run", *own, *targets(1))
