"""Configurations are planned without starting a job."""

import contextlib
import copy
import re
import resource
import subprocess

import pytest
import torch
import yaml

from tests.forkserver import python
from tests.shown_commands import shown, words
from tests.unit.data.hub_server import closed_port

from .conftest import PATIENCE, ROOT, SNAKEMAKE, finished, jobs_in
from .test_presets import RUNS, STAGES


@contextlib.contextmanager
def planning_takes_at_most(starts):
    """Bound the processor time of the child processes, in starts of Snakemake on the same machine."""
    before = processor_seconds()
    yield
    planned = processor_seconds()
    subprocess.run([SNAKEMAKE, "--version"], check=True, capture_output=True)
    assert planned - before < starts * (processor_seconds() - planned)


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def test_the_default_configuration_is_planned_in_three_starts_of_snakemake():
    command = [str(SNAKEMAKE), "--cores", "1", "--dry-run", "--forceall"]
    with planning_takes_at_most(starts=3):
        planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert planned.returncode == 0, planned.stderr


def planned_by(line):
    """Return the arguments of Snakemake in a line of the docs, as a hashable value."""
    given = [word for word in words(line) if not re.match(r"PIP_\w+=", word)]
    if given[0] == "make":
        options = dict(word.partition("=")[::2] for word in given[2:])
        given = ["snakemake", *words(options.get("ARGS", ""))]
        given += ["--configfile", options["CONFIG"]] if "CONFIG" in options else []
    return tuple(sorted({" ".join(pair) for pair in _options(given[1:])} - {"-n", "--"}))


def _options(arguments):
    """Yield each option with its value, and each target."""
    at = 0
    while at < len(arguments):
        takes = 2 if arguments[at] in WITH_A_VALUE else 1
        yield arguments[at : at + takes]
        at += takes


WITH_A_VALUE = (
    "--configfile",
    "--config",
    "--cores",
    "--workflow-profile",
    "--report",
    "--resources",
    "--sdm",
)
#: These need results or the user's own files, or have a test of their own.
NOT_PLANS = {
    "--unlock",
    "--report results/report.html",
    "--lint",
    "--sdm apptainer",
    "--configfile mixture.yaml",
    "datasets/web",
}
#: `test_presets.py` plans these, with the files that their user brings.
PLANNED_ELSEWHERE = {f"--configfile presets/{name}.yaml" for name in (*STAGES, *RUNS)}


def together():
    """Return options and targets of all lines that are shown, those of one configuration together."""
    plans = {}
    for line in {
        planned_by(line) for program in ("make run", "snakemake") for line in shown(program).values()
    }:
        if {*line} & (NOT_PLANS | PLANNED_ELSEWHERE):
            continue
        if line == ("ladders/gpt",):
            line = ("--configfile presets/ladder-cpu.yaml", *line)
        alone = [
            part for part in line if part.startswith(("--configfile", "--config ", "--delete", "runs/demo"))
        ]
        plans.setdefault(alone[0].partition("-lr")[0] if alone else "config.yaml", set()).update(line)
    return plans


@pytest.mark.parametrize("name", sorted(together()))
def test_every_command_line_that_is_shown_can_be_planned(name, tmp_path):
    parts = together()[name]
    options = [word for part in parts if part.startswith("-") for word in part.split(" ")]
    targets = [part for part in parts if not part.startswith("-")]
    if name == "runs/demo":  # The grid on the page, or a run of it.
        page = (ROOT / "docs/sweeps.md").read_text()
        (block, *_) = re.findall(r"^```yaml\n(runs:.*?grid:.*?)```", page, re.S | re.M)
        plain = yaml.safe_load((ROOT / "config.yaml").read_text())
        plain["runs"] |= yaml.safe_load(block)["runs"]
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump(plain))
        options += ["--configfile", str(tmp_path / "grid.yaml")]
    # No server listens at this address, so a plan that contacts the hub fails or waits.
    environment = ENVIRONMENT | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [python(), SNAKEMAKE, "--cores", "1", "--dry-run", *options, "--", "all", *targets]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    jobs = jobs_in(done.stdout)
    if name.endswith("spider-1b.yaml"):
        assert jobs["download"] == jobs["encode"] == 3  # of 4 GB of text each, and a rest
        assert jobs["train"] == jobs["evaluate"] == jobs["sample"] == jobs["draw"] == 3


def test_three_hundred_shards_ten_stages_and_three_runs_are_planned_in_five_starts_of_snakemake(workflow):
    (source,) = (dataset["source"] for dataset in workflow.config["datasets"].values())
    source["files"] = [f"text-{i}.jsonl" for i in range(300)]
    for name in source["files"]:
        (workflow.folder / name).touch()
    settings = {"max_steps": 30, "schedule": "constant", "warmup_steps": 0}
    workflow.run["stages"] = [{"name": f"stage{i}", **settings} for i in range(10)]
    workflow.config["runs"] |= {f"run{i}": {**workflow.run, "seed": i} for i in range(1, 3)}
    with planning_takes_at_most(starts=5):
        output, _ = finished(workflow.start("--dry-run"), PATIENCE)
    planned = jobs_in(output)
    assert planned["download"] == planned["encode"] == 300
    assert planned["train"] == planned["evaluate"] == 30 and planned["warmup"] == 3


def test_a_key_that_is_there_twice_is_refused_when_the_workflow_is_planned(workflow):
    """Snakemake parses the configuration itself, and takes the last one."""
    (more := workflow.folder / "more.json").write_text('{\n\t"results": "a",\n\t"results": "b"\n}')
    output = workflow("--dry-run", "--configfile", "config.yaml", "more.json", fails=True)
    assert f"error: {more}: the key 'results' is given in line 2 and again in line 3" in output
    assert "Traceback" not in output


def test_a_wrong_configuration_stops_before_any_job(workflow):
    workflow.run["stages"][1]["max_steps"] = -5
    output = workflow(fails=True)
    assert "\nerror: runs.small.stages[1].max_steps: must be positive (got -5)\n" in output
    assert "WorkflowError" not in output and "common.smk" not in output
    assert not workflow.results.exists()


def test_a_block_of_an_extra_that_names_no_run_or_dataset_is_refused_by_its_key(workflow):
    workflow.config |= {"audit": {"smal": True, "small": True}, "trace": ["tekst"]}
    lines = workflow("--dry-run", fails=True).splitlines()
    assert "error: audit.smal: no run 'smal'; did you mean \"small\"?" in lines
    assert "trace: no dataset 'tekst'; did you mean \"text\"?" in lines


def test_an_n_gram_split_encodes_its_dataset_again_and_no_other(workflow):
    datasets = workflow.config["datasets"]
    datasets["more"] = copy.deepcopy(datasets["text"])
    workflow("datasets/text", "datasets/more")
    datasets["more"]["ngram"] = 0.5
    assert workflow.planned("datasets/text", "datasets/more") == {"encode_with_ngrams": 1, "index": 1}


def test_results_of_another_version_are_refused_and_kept(workflow):
    workflow.results.mkdir()
    (workflow.results / "spider.json").write_text('{"format": 99, "spider": "9.0"}')
    assert "written by Spider 9.0 in format 99" in workflow(fails=True)
    assert [p.name for p in workflow.results.iterdir()] == ["spider.json"]


def test_the_linter_finds_only_what_the_docs_explain():
    """Each rule runs in the environment of Snakemake itself (docs/extending.md)."""
    command = [str(SNAKEMAKE), "--lint", "--configfile", "presets/ladder-cpu.yaml"]
    lints = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr.splitlines()
    about = [line.split()[2:4] for line in lints if line.startswith("Lints for")]
    assert {kind for kind, _ in about} == {"rule"}
    assert {rule for _, rule in about} >= {"download", "train", "report", "forecast", "ladders"}
    found = {line.strip() for line in lints if line.startswith("    * ")}
    assert found == {"* Specify a conda environment or container for each rule.:"}


def test_a_run_stops_before_any_job_if_a_text_lacks_a_column_or_the_hub_is_away(workflow):
    datasets = workflow.config["datasets"]
    datasets["text"]["text_column"] = "body"
    hub = {"kind": "hub", "repo": "acme/texts", "revision": "main", "files": ["a.parquet"]}
    datasets["more"] = {"source": hub, "validation": 0.1}
    away = {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port()}", "HF_HUB_DISABLE_XET": "1"}
    output = workflow("datasets/text", "datasets/more", fails=True, **away)
    assert "datasets.text: text.jsonl, line 1: has no 'body' (keys: 'id', 'text'); set text_column" in output
    assert "datasets.more: a.parquet of acme/texts@main: cannot reach" in output
    assert "Nothing was started" in output and "Traceback" not in output
    assert not (workflow.results / "raw").exists() and not (workflow.results / "logs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_plan_warns_of_a_missing_gpu_and_a_run_stops_before_any_job(workflow):
    workflow.run["resources"] = {"gpus": 2, "threads": 1}
    assert workflow("--dry-run").count("resources.gpus: the run asks for 2") == 1
    output = workflow(fails=True)
    assert "resources.gpus: the run asks for 2" in output and "Nothing was started" in output
    assert not (workflow.results / "raw").exists() and not (workflow.results / "shards").exists()
    # The jobs of a scheduler run on another machine.
    executor = ["--executor", "cluster-generic", "--cluster-generic-submit-cmd", "true", "--jobs", "1"]
    assert "resources.gpus" not in workflow("--dry-run", *executor)
