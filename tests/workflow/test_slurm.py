"""The workflow on a real Slurm: killed, out of time, on two nodes, on GPUs, with wrong site values.

Data and warm-up are made once on this machine by profiles/default. A test then sends mostly one training to
Slurm, by profiles/slurm with the values of a site.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from spider.common.files import read_json
from tests.forkserver import spider

from .conftest import PATIENCE, ROOT, Workflow, finished, untracked
from .slurm import Slurm, queue, running
from .test_cleaning import made, three_parts

STEPS = 100
FIRST = "results/runs/small/first/train.json"

#: Another workflow, which has ours as a module.
MODULE = f"""
configfile: "config.yaml"

module spider:
    snakefile: {str(ROOT / "Snakefile")!r}
    config: config

use rule * from spider
"""


class Cluster(Workflow):
    """A workflow folder that is shared with the nodes of a cluster."""

    forked = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.profile = folder / "site"
        self.snakefile, self.python = ROOT / "Snakefile", Path(sys.executable)
        self.environment: dict[str, str] = {}
        self.options = ["--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "5"]

    def site(self, gpu_partition: str = "gpu", **values: object) -> None:
        """Write the Slurm profile with these values at its top and this partition for jobs with GPUs."""
        text = (ROOT / "profiles/slurm/config.yaml").read_text()
        for name, value in values.items():
            text, replaced = re.subn(rf"(?m)^(  {name}:) \S+", rf"\1 {value}", text)
            assert replaced == 1, f"the profile has no {name} at its top"
        self.profile.mkdir(exist_ok=True)
        (self.profile / "config.yaml").write_text(text)
        partitions = (ROOT / "profiles/slurm/partitions.yaml").read_text()
        assert "  gpu: " in partitions
        (self.profile / "partitions.yaml").write_text(partitions.replace("  gpu: ", f"  {gpu_partition}: "))

    def command(self, *arguments: str) -> list[str]:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        profile = ["--snakefile", str(self.snakefile), "--workflow-profile", str(self.profile)]
        return [str(self.python), "-m", "snakemake", *profile, *self.options, *arguments]

    def start(self, *arguments: str, forked: bool = False, **environment: str) -> subprocess.Popen[str]:
        return super().start(*arguments, forked=forked, **self.environment, **environment)

    def waits_for(self) -> str:
        return queue()

    def steps(self) -> list[int]:
        """Return the steps that the first stage has logged."""
        return [json.loads(line)["step"] for line in (self.stage("first") / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with running() as slurm:
        yield slurm


@pytest.fixture(scope="module")
def prepared(slurm: Slurm, prepared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Return a workflow with data and warm-up, and no training."""
    folder = tmp_path_factory.mktemp("for-slurm")
    shutil.copytree(prepared_folder, folder, dirs_exist_ok=True, symlinks=True)
    workflow = untracked(folder)
    workflow.run["stages"][0]["max_steps"] = STEPS
    workflow.run["defaults"] |= {"micro_batch": 2, "grad_accum": 2}  # Two processes have the same shape.
    workflow("--until", "warmup")
    return workflow


@pytest.fixture
def cluster(prepared: Workflow, tmp_path: Path) -> Cluster:
    """Return a copy of the prepared workflow, to train on Slurm."""
    return copied(prepared, tmp_path)


def copied(prepared: Workflow, folder: Path, **resources: object) -> Cluster:
    shutil.copytree(prepared.folder, folder, dirs_exist_ok=True, symlinks=True)
    made = Cluster(folder)
    made.config = copy.deepcopy(prepared.config)
    made.run["resources"] |= resources
    made.site(longest=90)
    return made


Started = tuple[Cluster, subprocess.Popen[str]]


def started_among_spaces(prepared: Workflow, home: Path, **resources: object) -> Cluster:
    """Return a copy in a folder with a space in its name, and with such an environment."""
    (home / "my environment").symlink_to(sys.prefix)
    cluster = copied(prepared, home / "my project", **resources)
    cluster.python = home / "my environment/bin/python"
    cluster.environment = {"XDG_CACHE_HOME": str(home / "cache")}
    return cluster


@pytest.fixture(scope="module")
def alone(prepared: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """Start a training on one node.

    This fixture and the next one start early, because a test mostly waits for its jobs.
    """
    home = tmp_path_factory.mktemp("alone")
    cluster = started_among_spaces(prepared, home, gpus=1, runtime=60)
    # Its GPUs are files, which a training refuses, so torch takes them for real GPUs.
    (stub := home / "stub").mkdir()
    (stub / "sitecustomize.py").write_text(
        "import sys\nif {'warmup', 'train'} & {*sys.orig_argv}:\n"
        "    import torch\n    torch.cuda.init = lambda: None\n"
    )
    path = os.pathsep.join(filter(None, [str(stub), os.environ.get("PYTHONPATH")]))
    cluster.environment |= {"PYTHONPATH": path}
    return cluster, cluster.start(FIRST)


@pytest.fixture(scope="module")
def generic(alone: Started, prepared: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """Start a training of another workflow by `cluster-generic`, with the two files in the docs."""
    cluster = started_among_spaces(prepared, tmp_path_factory.mktemp("generic"))
    cluster.snakefile = cluster.folder / "Snakefile"
    cluster.snakefile.write_text(MODULE)
    page = (ROOT / "docs/cluster.md").read_text()
    folder = cluster.folder / "profiles/other"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "status"):
        (block,) = re.findall(rf"(?s)```\w+\n((?:#!\S+\n)?# profiles/other/{name}.*?)```", page)
        (folder / name).write_text(block)
    (folder / "status").chmod(0o755)
    cluster.profile, cluster.options = folder, ["--latency-wait", "5"]
    cluster.options += ["--seconds-between-status-checks", "1"]
    return cluster, cluster.start(FIRST)


def succeeded(started: Started, patience: float = 2 * PATIENCE) -> str:
    """Wait until a workflow succeeds, and return what it printed."""
    output, status = finished(started[1], patience, queue)
    assert status == 0, output
    return output


def until(ready: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for a condition, and print the queue once a minute."""
    began = printed = time.monotonic()
    while not ready():
        if (now := time.monotonic()) - printed >= 60:
            printed = now
            print(f"after {now - began:.0f} s: {queue()}", flush=True)
        assert now - began < seconds, f"waited in vain: {queue()}"
        time.sleep(0.1)


def cancelled(cluster: Cluster, slurm: Slurm) -> dict[str, str]:
    """Cancel a training in the middle, and return Slurm's description of its job."""
    checkpoints = cluster.stage("first") / "checkpoints"
    until(lambda: len(list(checkpoints.glob("step-*[0-9]"))) >= 2)
    (number,) = slurm.jobs("train", cluster.folder)
    slurm("scancel", number)
    return slurm.described(number)


def resumed(cluster: Cluster, output: str) -> str:
    """Check the logs of all jobs of a training, and return the id of the last one."""
    numbers = re.findall(r"rule_train/small_first/(\d+)\.log\)\.", output)
    log = (cluster.folder / f"logs/slurm/rule_train/small_first/{numbers[0]}.log").read_text()
    assert "SIGTERM: stopped after step" in log and "exit status 75" in log
    steps, last = cluster.steps(), cluster.run["stages"][0]["max_steps"]
    assert [step for step in steps if not step % 5] == list(range(5, last + 1, 5))
    assert steps == sorted(set(steps))
    assert len(steps) < last // 5 + len(numbers)  # A stop between two rows logs one row more.
    return str(numbers[-1])


def test_a_cancelled_training_resumes_and_ends_with_the_same_weights(alone, generic, slurm):
    """The other training is sent by another scheduler's two files in the docs. Both paths have a space.

    Job scripts name the interpreter without quotes, so they use a link without a space.
    """
    cluster, _ = alone
    requested = cancelled(cluster, slurm)
    # These are the values of the run's `resources:`.
    assert requested["Partition"] == "gpu" and requested["TresPerJob"] == "gres:gpu:1"
    assert requested["MinMemoryNode"] == "6000M" and requested["TimeLimit"] == "01:00:00"
    assert requested["Requeue"] == "1"

    printed = {cluster: succeeded(alone), generic[0]: succeeded(generic)}
    again = slurm.described(resumed(cluster, printed[cluster]))
    assert again["JobState"] == "COMPLETED"
    assert again["TimeLimit"] == "01:30:00"  # Twice the first limit, up to the cap.
    receipts = [one.receipt("first") for one in printed]
    assert receipts[0]["weights"] == receipts[1]["weights"] and receipts[0]["global_step"] == STEPS
    for one, output in printed.items():
        home = one.folder.parent
        (link,) = (home / "cache/spider/environments").iterdir()
        assert os.readlink(link) == str(home / "my environment")
        assert f"jobs use this environment through {link}" in output


@pytest.mark.long
def test_two_nodes_train_together_and_resume_together(prepared, tmp_path, slurm):
    cluster = copied(prepared, tmp_path, nodes=2, processes=2)
    started = cluster, cluster.start(FIRST)
    cancelled(cluster, slurm)
    job = slurm.described(resumed(cluster, succeeded(started)))
    assert job["JobState"] == "COMPLETED"
    assert job["NumNodes"] == "2" and job["NodeList"] == "one,two" and job["NumTasks"] == "2"
    assert "gpu" not in job["TRES"]
    assert cluster.receipt("first")["global_step"] == STEPS
    assert "2 processes (ddp)" in (cluster.results / "logs/train/small/first.log").read_text()


def test_a_partition_or_a_size_that_the_cluster_lacks_is_named_with_its_setting(cluster):
    cluster.site(gpu_partition="fast")
    cluster.run["resources"] |= {"gpus": 1}
    output = cluster(FIRST, "--retries", "1", fails=True)
    assert "this cluster has no partition fast: name those of your site in" in output
    assert "profiles/slurm/partitions.yaml" in output

    doctor = [spider(), "doctor", "--workflow-profile", "site", "--seconds", "60"]
    done = subprocess.run(doctor, cwd=cluster.folder, capture_output=True, text=True)
    (line,) = (line for line in done.stdout.splitlines() if "partitions:" in line)
    assert done.returncode == 1 and line.startswith("problem  partitions: this cluster has no partition fast")
    cluster.site()
    done = subprocess.run(doctor, cwd=cluster.folder, capture_output=True, text=True)
    assert "ok       partitions: cpu, gpu, as site/partitions.yaml names them" in done.stdout

    cluster.run["resources"] |= {"gpus": 8, "processes": 1, "threads": 6}
    output = cluster(FIRST, "--retries", "0", fails=True)
    assert "--cpus-per-task=6" in output and "--gpus=8" in output
    assert "every node of the partition is smaller: set threads, mem_mb, gpus and nodes under" in output


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_training_past_its_time_limit_resumes_with_a_longer_one(cluster, slurm):
    cluster.site(warning=30)
    cluster.run["resources"]["runtime"] = 2
    cluster.run["stages"][0]["max_steps"] = 4000
    output = cluster(FIRST, patience=1500)
    last = slurm.described(resumed(cluster, output))
    assert last["JobState"] == "COMPLETED" and last["TimeLimit"] > "00:02:00"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_slurm_requeues_a_preempted_training_which_resumes(cluster, slurm):
    cluster.run["stages"][0]["max_steps"] = 1000
    process = cluster.start(FIRST, "--retries", "0")
    checkpoints = cluster.stage("first") / "checkpoints"
    until(lambda: len(list(checkpoints.glob("step-*[0-9]"))) >= 2)
    (number,) = slurm.jobs("train", cluster.folder)
    slurm("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    until(lambda: slurm.described(number)["Restarts"] == "1")
    output = succeeded((cluster, process), patience=900)
    assert slurm.described(number)["JobState"] == "COMPLETED" and "restart" not in output
    steps = cluster.steps()
    assert [step for step in steps if not step % 5] == list(range(5, 1001, 5))
    assert steps == sorted(set(steps))


@pytest.mark.long
def test_a_stage_of_a_tokenizers_packed_rows_runs_on_slurm(prepared, tmp_path, slurm):
    cluster = copied(prepared, tmp_path)
    cluster.config["datasets"]["text-bpe"] = {"like": "text", "tokenizer": "bpe"}
    cluster.config["tokenizers"] = {"bpe": {"data": "text", "vocab_size": 300}}
    first = cluster.run["stages"][0] | {"max_steps": 5, "packing": "best_fit"}
    model = {"preset": "gpt-cpu", "hidden": 32, "layers": 2, "heads": 2}
    cluster.config["runs"]["bpe"] = {**cluster.run, "data": "text-bpe", "model": model, "stages": [first]}
    output = cluster("results/runs/bpe/first/train.json", patience=2 * PATIENCE)
    for rule in ("tokenizer", "encode", "pack", "train"):
        assert re.search(rf"rule_{rule}/", output), f"{rule} did not run on Slurm"
    assert read_json(tmp_path / "results/runs/bpe/first/train.json")["global_step"] == 5


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_smoke_preset_runs_on_slurm(tmp_path, slurm):
    cluster = Cluster(tmp_path)
    cluster.site(longest=90)
    cluster("--configfile", str(ROOT / "presets/smoke.yaml"), patience=1200)
    assert read_json(tmp_path / "results/smoke/report/summary.json")["runs"]["smoke"]["order"]


def test_cleaning_on_two_nodes_removes_the_same_documents(cluster, tmp_path_factory):
    three_parts(cluster)("datasets/text", "--jobs", "4")
    here = three_parts(Workflow(tmp_path_factory.mktemp("here")))
    here.config["tracking"] = {"enabled": False}
    here("datasets/text")
    assert made(cluster) == made(here)
