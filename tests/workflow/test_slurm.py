"""The workflow on a real Slurm: killed, out of time, on two nodes, on GPUs, with wrong site values.

Data and warm-up are made once on this machine by profiles/default; what a test is about, a training mostly,
is then sent to Slurm by profiles/slurm with a site's values in it, as a person would write them.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from .conftest import PATIENCE, ROOT, SNAKEMAKE, Workflow
from .slurm import Slurm, running

STEPS = 150
FIRST = "results/runs/small/first/train.json"


class Cluster(Workflow):
    """A workflow folder that is shared with the nodes of a cluster."""

    def site(self, **values: object) -> None:
        """Write the Slurm profile with these values at its top."""
        text = (ROOT / "profiles/slurm/config.yaml").read_text()
        for name, value in values.items():
            text, replaced = re.subn(rf"(?m)^(  {name}:) \S+", rf"\1 {value}", text)
            assert replaced == 1, f"the profile has no {name} at its top"
        (self.folder / "site").mkdir(exist_ok=True)
        (self.folder / "site/config.yaml").write_text(text)

    def command(self, *arguments: str) -> list[str]:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        profile = ["--snakefile", str(ROOT / "Snakefile"), "--workflow-profile", str(self.folder / "site")]
        quick = ["--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "5"]
        return [str(SNAKEMAKE), *profile, *quick, *arguments]

    def steps(self) -> list[int]:
        """The steps of which the first stage has logged figures."""
        return [json.loads(line)["step"] for line in (self.stage("first") / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with running() as slurm:
        yield slurm


@pytest.fixture(scope="module")
def prepared(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """A folder in which all is done but the training."""
    workflow = Workflow(tmp_path_factory.mktemp("prepared"))
    workflow.config["tracking"] = {"enabled": False}
    workflow.run["stages"][0]["max_steps"] = STEPS
    workflow("--until", "index", "warmup")
    return workflow


@pytest.fixture
def cluster(prepared: Workflow, tmp_path: Path) -> Cluster:
    """A copy of it, to be trained on Slurm."""
    return copied(prepared, tmp_path)


def copied(prepared: Workflow, folder: Path, **resources: object) -> Cluster:
    shutil.copytree(prepared.folder, folder, dirs_exist_ok=True, symlinks=True)
    made = Cluster(folder)
    made.config = copy.deepcopy(prepared.config)
    made.run["resources"] |= resources
    made.site(longest=90)
    return made


Started = tuple[Cluster, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def alone(prepared: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """One training on one node; like the next two it is started early, as most of the time is waiting."""
    cluster = copied(prepared, tmp_path_factory.mktemp("alone"), gpus=1, runtime=60)
    return cluster, cluster.start(FIRST)


@pytest.fixture(scope="module")
def together(alone: Started, prepared: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """One training on two nodes."""
    cluster = copied(prepared, tmp_path_factory.mktemp("together"), nodes=2, processes=2)
    return cluster, cluster.start(FIRST, "--retries", "0", "--slurm-keep-successful-logs")


def finished(started: Started) -> str:
    """Wait for a workflow's success; what it said."""
    output, _ = started[1].communicate(timeout=PATIENCE)
    assert started[1].returncode == 0, output
    return output


def until(ready: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_a_cancelled_training_resumes_and_ends_as_if_it_had_not_been(
    alone, together, prepared, slurm, tmp_path
):
    cluster, _ = alone
    checkpoints = cluster.stage("first") / "checkpoints"
    until(lambda: len(list(checkpoints.glob("step-*[0-9]"))) >= 2)
    (number,) = slurm.jobs("train", cluster.folder)
    asked = slurm.seen(number)
    slurm("scancel", number)
    shutil.copytree(prepared.folder, tmp_path, dirs_exist_ok=True, symlinks=True)
    undisturbed = Workflow(tmp_path)
    undisturbed.config = prepared.config
    undisturbed(FIRST)
    output = finished(alone)
    (again,) = re.findall(r"rule_train/small_first/(\d+)\.log", output.split("Trying to restart job")[1])

    assert slurm.seen(number)["JobState"] == "CANCELLED"
    assert slurm.seen(again)["JobState"] == "COMPLETED"
    # Slurm was asked for what the run's `resources:` say, and the second time for longer, up to the cap.
    assert asked["Partition"] == "gpu" and asked["TresPerJob"] == "gres:gpu:1"
    assert asked["MinMemoryNode"] == "6000M" and asked["Requeue"] == "1"
    assert (asked["TimeLimit"], slurm.seen(again)["TimeLimit"]) == ("01:00:00", "01:30:00")

    assert cluster.receipt("first")["weights"] == undisturbed.receipt("first")["weights"]
    steps = cluster.steps()
    assert [step for step in steps if not step % 5] == list(range(5, STEPS + 1, 5))
    assert steps == sorted(set(steps)) and len(steps) <= STEPS // 5 + 1  # it was stopped between two lines


def test_two_nodes_train_together(together, slurm):
    cluster, _ = together
    (number,) = re.findall(r"rule_train/small_first/(\d+)\.log", finished(together))
    seen = slurm.seen(number)
    assert seen["NumNodes"] == "2" and seen["NodeList"] == "one,two" and seen["NumTasks"] == "2"
    assert "gpu" not in seen["TRES"]
    assert cluster.receipt("first")["global_step"] == STEPS
    log = (cluster.folder / f"logs/slurm/rule_train/small_first/{number}.log").read_text()
    assert "2 processes (ddp)" in log


def test_an_unknown_partition_is_named_with_where_to_set_it_and_costs_nothing(cluster):
    cluster.site(gpu_partition="fast")
    output = cluster(FIRST, "--retries", "1", fails=True)
    assert "this cluster has no partition fast: set cpu_partition and gpu_partition at the top of" in output
    assert "profiles/slurm/config.yaml" in output
    cluster.site()
    assert cluster.planned() == {"train": 2, "evaluate": 2, "compare": 1, "report": 1}


def test_more_than_a_node_has_is_refused_with_what_to_set(cluster):
    cluster.run["resources"] |= {"gpus": 8, "processes": 1, "threads": 6}
    output = cluster(FIRST, "--retries", "0", fails=True)
    assert "--cpus-per-task=6" in output and "--gpus=8" in output
    assert "no node of the partition is so large: set threads, mem_mb, gpus and nodes under" in output
