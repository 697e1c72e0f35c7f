"""The workflow on a real Slurm: killed, out of time, on two nodes, on GPUs, with wrong site values.

Data and warm-up are made once on this machine by profiles/default; what a test is about, a training mostly,
is then sent to Slurm by profiles/slurm with a site's values in it, as a person would write them.
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

from spider.files import read_json

from .conftest import PATIENCE, ROOT, Workflow, finished, untracked
from .slurm import Slurm, queue, running

STEPS = 100
FIRST = "results/runs/small/first/train.json"

#: Somebody else's workflow.
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

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return super().start(*arguments, **self.environment, **environment)

    def waits_for(self) -> str:
        return queue()

    def steps(self) -> list[int]:
        """The steps of which the first stage has logged figures."""
        return [json.loads(line)["step"] for line in (self.stage("first") / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with running() as slurm:
        yield slurm


@pytest.fixture(scope="module")
def prepared(slurm: Slurm, prepared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """A folder in which all is done but the training."""
    folder = tmp_path_factory.mktemp("for-slurm")
    shutil.copytree(prepared_folder, folder, dirs_exist_ok=True, symlinks=True)
    workflow = untracked(folder)
    workflow.run["stages"][0]["max_steps"] = STEPS
    workflow.run["defaults"] |= {"micro_batch": 2, "grad_accum": 2}  # of the same shape in two processes
    workflow("--until", "warmup")
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


def started_among_spaces(prepared: Workflow, home: Path, **resources: object) -> Cluster:
    """In a folder with a space in its name, to be started by an environment of such a folder."""
    (home / "my environment").symlink_to(sys.prefix)
    cluster = copied(prepared, home / "my project", **resources)
    cluster.python = home / "my environment/bin/python"
    cluster.environment = {"XDG_CACHE_HOME": str(home / "cache")}
    return cluster


@pytest.fixture(scope="module")
def alone(prepared: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """One training on one node.

    Like the next two it is started early, as most of the time is waiting.
    """
    home = tmp_path_factory.mktemp("alone")
    cluster = started_among_spaces(prepared, home, gpus=1, runtime=60)
    # Its GPUs are files: a training would be refused for want of real ones, so torch takes them for real.
    (stub := home / "stub").mkdir()
    (stub / "sitecustomize.py").write_text(
        "import sys\nif {'warmup', 'train'} & {*sys.orig_argv}:\n"
        "    import torch\n    torch.cuda.init = lambda: None\n"
    )
    path = os.pathsep.join(filter(None, [str(stub), os.environ.get("PYTHONPATH")]))
    cluster.environment |= {"PYTHONPATH": path}
    return cluster, cluster.start(FIRST)


@pytest.fixture(scope="module")
def together(alone: Started, prepared: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """One training on two nodes."""
    cluster = copied(prepared, tmp_path_factory.mktemp("together"), nodes=2, processes=2)
    return cluster, cluster.start(FIRST)


@pytest.fixture(scope="module")
def generic(together: Started, prepared: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """One training of a workflow that has ours as a module, sent by `cluster-generic`, with the two files
    that the documentation shows."""
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
    return cluster, cluster.start(FIRST)


def succeeded(started: Started, patience: float = 2 * PATIENCE) -> str:
    """Wait for a workflow's success; what it said."""
    output, status = finished(started[1], patience, queue)
    assert status == 0, output
    return output


def until(ready: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait; each minute it is printed what the scheduler waits for."""
    began = said = time.monotonic()
    while not ready():
        if (now := time.monotonic()) - said >= 60:
            said = now
            print(f"after {now - began:.0f} s: {queue()}", flush=True)
        assert now - began < seconds, f"waited in vain: {queue()}"
        time.sleep(0.1)


def cancelled(cluster: Cluster, slurm: Slurm) -> dict[str, str]:
    """Cancel a training in the middle; what Slurm had been asked for."""
    checkpoints = cluster.stage("first") / "checkpoints"
    until(lambda: len(list(checkpoints.glob("step-*[0-9]"))) >= 2)
    (number,) = slurm.jobs("train", cluster.folder)
    slurm("scancel", number)
    return slurm.seen(number)


def resumed(cluster: Cluster, output: str) -> str:
    """The job that Snakemake sent in a cancelled one's place, after a look at what all of them logged."""
    numbers = re.findall(r"rule_train/small_first/(\d+)\.log\)\.", output)
    log = (cluster.folder / f"logs/slurm/rule_train/small_first/{numbers[0]}.log").read_text()
    assert "SIGTERM: stopped after step" in log and "exit status 75" in log
    steps, last = cluster.steps(), cluster.run["stages"][0]["max_steps"]
    assert [step for step in steps if not step % 5] == list(range(5, last + 1, 5))
    assert steps == sorted(set(steps))
    assert len(steps) < last // 5 + len(numbers)  # a line more where it was stopped between two
    return str(numbers[-1])


def test_a_cancelled_training_resumes_and_ends_as_if_it_had_not_been(alone, together, generic, slurm):
    cluster, _ = alone
    asked = cancelled(cluster, slurm)
    # Slurm was asked for what the run's `resources:` say.
    assert asked["Partition"] == "gpu" and asked["TresPerJob"] == "gres:gpu:1" and asked["Requeue"] == "1"
    assert asked["MinMemoryNode"] == "6000M" and asked["TimeLimit"] == "01:00:00"
    cancelled(together[0], slurm)

    again = slurm.seen(resumed(cluster, succeeded(alone)))
    assert again["JobState"] == "COMPLETED"
    assert again["TimeLimit"] == "01:30:00"  # twice the first, up to the cap
    succeeded(generic)
    undisturbed, _ = generic
    assert cluster.receipt("first")["weights"] == undisturbed.receipt("first")["weights"]


@pytest.mark.long
def test_two_nodes_train_together_and_resume_together(together, slurm):
    cluster, _ = together
    seen = slurm.seen(resumed(cluster, succeeded(together)))
    assert seen["JobState"] == "COMPLETED"
    assert seen["NumNodes"] == "2" and seen["NodeList"] == "one,two" and seen["NumTasks"] == "2"
    assert "gpu" not in seen["TRES"]
    assert cluster.receipt("first")["global_step"] == STEPS
    assert "2 processes (ddp)" in (cluster.results / "logs/train/small/first.log").read_text()


def test_another_scheduler_is_served_by_the_two_files_that_the_documentation_shows(generic):
    cluster, _ = generic
    succeeded(generic)
    assert cluster.receipt("first")["global_step"] == STEPS


@pytest.mark.parametrize("started", ["alone", "generic"])
def test_an_environment_and_a_folder_with_spaces_are_no_obstacle(started, request):
    """Job scripts name the interpreter unquoted: such an environment is called by a link without a space; in
    the workflow of somebody else too, who has ours as a module."""
    cluster, process = request.getfixturevalue(started)
    output, home = succeeded((cluster, process)), cluster.folder.parent
    (link,) = (home / "cache/spider/environments").iterdir()
    assert os.readlink(link) == str(home / "my environment") and f"call this environment by {link}" in output
    assert cluster.receipt("first")["global_step"] == STEPS


def test_an_unknown_partition_is_named_with_where_to_set_it_and_costs_nothing(cluster):
    cluster.site(gpu_partition="fast")
    cluster.run["resources"] |= {"gpus": 1}
    output = cluster(FIRST, "--retries", "1", fails=True)
    assert "this cluster has no partition fast: name those of your site in" in output
    assert "profiles/slurm/partitions.yaml" in output
    del cluster.run["resources"]["gpus"]
    cluster.site()
    twice = dict.fromkeys(("train", "evaluate", "sample", "draw"), 2)
    assert cluster.planned() == {**twice, "compare": 1, "report": 1}


def test_more_than_a_node_has_is_refused_with_what_to_set(cluster):
    cluster.run["resources"] |= {"gpus": 8, "processes": 1, "threads": 6}
    output = cluster(FIRST, "--retries", "0", fails=True)
    assert "--cpus-per-task=6" in output and "--gpus=8" in output
    assert "every node of the partition is smaller: set threads, mem_mb, gpus and nodes under" in output


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_training_past_its_time_limit_is_sent_again_with_more_and_goes_on(cluster, slurm):
    cluster.site(warning=30)
    cluster.run["resources"]["runtime"] = 2
    cluster.run["stages"][0]["max_steps"] = 4000
    output = cluster(FIRST, patience=1500)
    last = slurm.seen(resumed(cluster, output))
    assert last["JobState"] == "COMPLETED" and last["TimeLimit"] > "00:02:00"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_preempted_training_is_requeued_by_slurm_and_goes_on(cluster, slurm):
    cluster.run["stages"][0]["max_steps"] = 1000
    process = cluster.start(FIRST, "--retries", "0")
    checkpoints = cluster.stage("first") / "checkpoints"
    until(lambda: len(list(checkpoints.glob("step-*[0-9]"))) >= 2)
    (number,) = slurm.jobs("train", cluster.folder)
    slurm("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    until(lambda: slurm.seen(number)["Restarts"] == "1")
    output = succeeded((cluster, process), patience=900)
    assert slurm.seen(number)["JobState"] == "COMPLETED" and "restart" not in output
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
        assert re.search(rf"rule_{rule}/", output), f"{rule} was no job of Slurm"
    assert read_json(tmp_path / "results/runs/bpe/first/train.json")["global_step"] == 5


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_smoke_preset_runs_on_slurm(tmp_path, slurm):
    cluster = Cluster(tmp_path)
    cluster.site(longest=90)
    cluster("--configfile", str(ROOT / "presets/smoke.yaml"), patience=1200)
    assert read_json(tmp_path / "results/smoke/report/summary.json")["runs"]["smoke"]["order"]
