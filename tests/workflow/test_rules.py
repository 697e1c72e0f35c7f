"""Every rule has a log, a benchmark, resources and a partition in a plan with the profile for Slurm."""

import copy
import logging
import re
import subprocess
from types import SimpleNamespace

from snakemake_executor_plugin_slurm.partitions import get_best_partition, read_partition_file

from tests.forkserver import python

from .conftest import ROOT, SNAKEMAKE, Workflow

PROFILE = ROOT / "profiles/slurm"

#: Rules whose command runs a model. The others request no GPU.
WITH_A_MODEL = {"warmup", "train", "evaluate", "evaluate_compressed", "sample", "compress"}
WITH_A_MODEL |= {"evaluate_foreign", "audit"}
#: Rules of about a second, which run where Snakemake runs.
LOCAL = {"draw", "compare", "report", "claim_forecast", "forecast", "ladders"}


def with_every_rule(workflow: Workflow) -> None:
    """Change the configuration so that a plan has jobs of every rule. One run requests no GPU."""
    config = workflow.config
    text = config["datasets"]["text"]
    cleaning = {"exact": True, "near": 0.9, "decontaminate": True}
    config["datasets"]["indexed"] = {**text, "ngram": 0.3, "cleaning": cleaning}
    config["datasets"]["deleted"] = {**text, "temp": True}
    config["datasets"]["text-bpe"] = {"like": "text", "tokenizer": "bpe"}
    config["tokenizers"] = {"bpe": {"data": "text", "vocab_size": 300}}
    small = workflow.run
    del small["stages"][1]
    small["resources"] |= {"gpus": 1}
    indexed, packed, swept = (copy.deepcopy(small) for _ in range(3))
    small["compress"] = {}
    indexed["data"] = "indexed"
    indexed["model"]["ngram"] = {}
    packed |= {"data": "text-bpe", "model": {"preset": "gpt-cpu", "hidden": 32, "layers": 2, "heads": 2}}
    packed["stages"][0]["packing"] = "best_fit"
    packed["resources"]["gpus"] = 0
    sizes = [32, 64, 96]
    rungs = [{"flops": flops, "sizes": sizes} for flops in (1e9, 2e9)]
    swept |= {"size": "model.hidden", "rungs": rungs, "target": {"flops": 1e10, "sizes": [128]}}
    swept["data"] = "deleted"
    swept["stages"][0].pop("max_steps")
    config["runs"] |= {"indexed": indexed, "packed": packed}
    config["ladders"] = {"swept": swept}
    config["foreign"] = {"gpt2": "gpt2"}
    config |= {"audit": {"small": True}, "trace": ["indexed"]}
    (workflow.folder / "gpt2").mkdir()


def planned_jobs(workflow: Workflow, *options: str) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    """Return the rule of each job in a plan, the lines that describe it, and its resources."""
    workflow.command()  # writes the configuration
    command = [python(), SNAKEMAKE, "--snakefile", ROOT / "Snakefile", "--dry-run", "--forceall"]
    command += ["--quiet", "progress", *options]
    printed = subprocess.run(command, cwd=workflow.folder, capture_output=True, text=True, check=True).stdout
    jobs = []
    for rule, block in re.findall(r"(?m)^(?:local)?rule (\S+):\n((?:    .*\n)+)", printed):
        lines = dict(line.strip().split(": ", 1) for line in block.splitlines() if ": " in line)
        resources = dict(pair.split("=", 1) for pair in lines.get("resources", "").split(", ") if "=" in pair)
        jobs.append((rule, lines, resources))
    return jobs


def partition(rule: str, lines: dict[str, str], resources: dict[str, str]) -> str | None:
    """Return the partition that the Slurm executor sends a job to."""
    if named := resources.get("slurm_partition"):
        return named
    job = SimpleNamespace(
        name=rule,
        threads=int(lines.get("threads", "1")),
        resources={key: int(value) for key, value in resources.items() if value.isdecimal()},
    )
    return get_best_partition(read_partition_file(PROFILE / "partitions.yaml"), job, logging.getLogger())


def test_every_rule_requests_memory_and_time_and_gets_the_partition_of_its_gpus(workflow):
    with_every_rule(workflow)
    jobs = planned_jobs(workflow, "--workflow-profile", str(PROFILE))
    command = [python(), SNAKEMAKE, "--snakefile", ROOT / "Snakefile", "--list-rules"]
    listed = subprocess.run(command, cwd=workflow.folder, capture_output=True, text=True).stdout
    rules = set(re.findall(r"^\w+$", listed, re.M)) - {"all"}
    jobs = [job for job in jobs if job[0] != "all"]
    assert {rule for rule, _, _ in jobs} == rules
    for rule, lines, resources in jobs:
        assert lines["log"].startswith("results/logs/"), rule
        assert lines["benchmark"].startswith("results/benchmarks/"), rule
        assert int(resources["mem_mb"]) >= 200 and int(resources["runtime"]) >= 5, rule
        gpus = int(rule in WITH_A_MODEL and "run=packed" not in lines["wildcards"])
        assert int(resources.get("gpu", 0)) == gpus, rule
        assert partition(rule, lines, resources) == ("gpu" if gpus else "cpu"), rule


def test_a_site_with_one_partition_gets_all_jobs_there(tmp_path):
    text = (PROFILE / "partitions.yaml").read_text()
    one = re.sub(r"(?m)^  cpu:.*\n", "", text)
    (tmp_path / "partitions.yaml").write_text(one)
    (only,) = read_partition_file(tmp_path / "partitions.yaml")
    for gpus in (0, 1, 16):
        job = SimpleNamespace(name="train", threads=1, resources={"gpu": gpus, "runtime": 1440})
        assert get_best_partition([only], job, logging.getLogger()) == only.name
