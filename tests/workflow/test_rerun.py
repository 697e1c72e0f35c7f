"""A change of settings, files or code runs only the jobs that it affects."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from spider.common.files import digest, read_json, write_json
from spider.provenance.made import Made, made_path
from tests.forkserver import spider

from .conftest import ROOT, jobs_in, untracked

TARGET = "results/runs/small/second/train.json"


@pytest.fixture
def workflow(trained):
    """Return a copy of the finished workflow, which a test may change."""
    return trained


def weights(workflow, *stages):
    return {stage: workflow.receipt(stage)["weights"] for stage in stages}


def test_edits_count_whatever_snakemake_remembers(workflow):
    """Its folder may be removed after an error."""
    shutil.rmtree(workflow.folder / ".snakemake")
    workflow.run["evaluation"]["max_bytes"] = 3000
    assert workflow.planned()["evaluate"] == 2
    workflow.run["defaults"]["lr"] = 2e-3
    assert workflow.planned()["train"] == 2
    workflow.config["datasets"]["text"]["validation"] = 0.2
    assert workflow.planned()["encode"] == 1
    command = [spider(), "evaluate", "small/first"]
    done = subprocess.run(command, cwd=workflow.folder, capture_output=True, text=True)
    said = "results/runs/small/first/train.json: was trained with other settings than runs.small has now"
    assert done.returncode == 1 and said in done.stderr


def test_results_of_an_earlier_version_get_records(workflow):
    shutil.rmtree(workflow.results / "made")
    workflow.run["evaluation"]["prompts"] = ["Document 7"]
    assert workflow.planned()["sample"] == 2  # Snakemake remembers.
    workflow("--until", "sample")
    shutil.rmtree(workflow.folder / ".snakemake")
    workflow.run["defaults"]["lr"] = 2e-3
    assert workflow.planned()["train"] == 2


def test_two_checkouts_of_one_results_folder_know_what_the_other_has_made(workflow, tmp_path_factory):
    other = untracked(tmp_path_factory.mktemp("other"))
    shutil.copy2(workflow.folder / "text.jsonl", other.folder)
    workflow.config["results"] = other.config["results"] = str(workflow.folder / "results")
    other.run["evaluation"]["prompts"] = ["Document 7"]
    sample = str(workflow.stage("first") / "sample.txt")
    assert other.planned(sample) == {"sample": 1}
    other(sample)
    assert workflow.planned(sample) == {"sample": 1}


def test_another_prompt_and_a_lost_figure_are_made_again_and_nothing_is_scored(workflow):
    scores = [workflow.stage(stage) / "evaluation.json" for stage in ("first", "second")]
    written = [path.stat().st_mtime_ns for path in scores]
    figure = workflow.stage("first") / "loss.svg"
    before = figure.read_bytes()
    figure.unlink()
    workflow.run["evaluation"] |= {"prompts": ["Document 7"]}
    assert workflow.planned() == {"draw": 1, "sample": 2, "compare": 1, "report": 1}
    workflow()
    assert figure.read_bytes() == before and [path.stat().st_mtime_ns for path in scores] == written
    assert (workflow.stage("second") / "sample.txt").read_text().startswith("Document 7")
    assert read_json(workflow.stage("second") / "sample.json")["prompt"] == "Document 7"
    assert "<b>Document 7</b>" in (workflow.results / "report/runs/small.html").read_text()
    assert workflow.planned() == {}


def test_a_stage_without_checkpoints_and_receipt_is_trained_again(workflow):
    before = workflow.receipt("second")["weights"]
    shutil.rmtree(workflow.stage("second") / "checkpoints")
    (sample := workflow.stage("second") / "sample.txt").unlink()
    output = workflow(f"{sample.relative_to(workflow.folder)}", fails=True)
    assert f"delete {TARGET} and run `snakemake {TARGET}`" in output
    (workflow.stage("second") / "train.json").unlink()
    workflow(TARGET)
    assert workflow.receipt("second")["weights"] == before
    steps = [json.loads(line)["step"] for line in (workflow.stage("second") / "metrics.jsonl").open()]
    assert steps == sorted(set(steps))


#: Adds a key to the class of every block of the configuration.
GROW = """
import pydantic

Meta = type(pydantic.BaseModel)
make = Meta.__new__

def grown(meta, name, bases, namespace, *rest, **options):
    inherited = [base for one in bases for base in one.__mro__]
    if any((base.__module__, base.__name__) == ("spider.config.block", "Block") for base in inherited):
        namespace.setdefault("__annotations__", {})[f"new_key_of_{name.lower()}"] = int
        namespace[f"new_key_of_{name.lower()}"] = 3
    return make(meta, name, bases, namespace, *rest, **options)

Meta.__new__ = grown
"""


def test_a_new_key_in_every_block_and_what_decides_no_result_rerun_nothing(workflow, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(GROW)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code = "import spider.config as c; print(*(b.__name__ for b in (c.Config, *c.Block.__subclasses__())"
    code += " if f'new_key_of_{b.__name__.lower()}' not in b.model_fields), len(c.Block.__subclasses__()))"
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 10, done
    workflow.run["stages"][0] |= {"ckpt_every": 7, "log_every": 3}
    workflow.run["parallel"] = "fsdp"
    workflow.forked = False
    requests = ["--set-resources", "encode:mem_mb=5000", "download:runtime=77", "index:runtime=99"]
    assert "Nothing to be done" in workflow("--dry-run", *requests, PYTHONPATH=path)


def test_touching_source_files_reruns_nothing(workflow):
    touched = [ROOT / "workflow/Snakefile", *(ROOT / "rules").glob("*.smk"), *(ROOT / "spider").rglob("*.py")]
    before = {path: path.stat() for path in touched}
    try:
        for path in touched:
            os.utime(path)
        assert workflow.planned() == {}
    finally:
        for path, stat in before.items():
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_smaller_micro_batches_of_the_same_steps_continue_a_stage(workflow):
    """The second stage is left after step 50. Both stages get a new warm-up, the first one trains no step."""
    first, second = workflow.stage("first"), workflow.stage("second")
    before, written = weights(workflow, "first"), (first / "metrics.jsonl").stat().st_mtime_ns
    rows = (second / "metrics.jsonl").read_text()
    shutil.rmtree(second / "checkpoints/step-00000060")
    (second / "checkpoints/best").unlink(missing_ok=True)
    (second / "train.json").unlink()
    workflow.run["defaults"] |= {"micro_batch": 2, "grad_accum": 2}
    printed = workflow(TARGET)
    assert "start warmup small" in printed and "start train small/first" in printed
    said = (workflow.results / "logs/train/small/second.log").read_text()
    assert "going on from step-00000050" in said
    assert "goes on with 1 CPU threads (processes: 1, micro-batches of 2)" in said
    assert workflow.receipt("second")["global_step"] == 60
    assert (second / "metrics.jsonl").read_text() == rows and not list(second.glob("superseded-*"))
    assert weights(workflow, "first") == before and (first / "metrics.jsonl").stat().st_mtime_ns == written
    assert "train" not in workflow.planned()


def test_a_changed_and_an_appended_stage_are_trained_and_the_old_checkpoints_kept(workflow):
    before = weights(workflow, "first", "second")
    workflow.run["stages"][1]["lr"] = 5e-4
    workflow.run["stages"].append({"name": "third", "max_steps": 5, "warmup_steps": 0})
    twice = dict.fromkeys(("train", "evaluate", "stage_baselines", "sample", "draw"), 2)
    assert workflow.planned() == twice | {"compare": 1, "report": 1}
    workflow("results/runs/small/third/train.json")
    after = weights(workflow, "first", "second")
    assert after["first"] == before["first"] and after["second"] != before["second"]
    assert workflow.receipt("third")["global_step"] == 65
    assert list(workflow.stage("second").glob("superseded-*/checkpoints/step-*"))


def test_outputs_of_other_code_are_reused_and_named_or_made_again_if_that_is_wanted(workflow):
    """A record says that another version of a module has made the output."""
    modules = {"sample": "spider/evaluation/generate.py", "train": "spider/training/loop.py"}
    before = weights(workflow, "second")
    for name, module in modules.items():
        path = made_path(workflow.results, f"runs/small/second/{name}.json")
        code = {"version": "1", "commit": None, "modules": {module: "0" * 16}}
        write_json(workflow.results / "code" / f"{digest(code)}.json", code)
        Made.read(path).with_job(-1, code=digest(code)).write(path)
    named = [f"{rule}: made by other code ({module})" for rule, module in modules.items()]
    printed = workflow("--dry-run")
    assert all(one in printed for one in named) and jobs_in(printed) == {}

    workflow.config["strict_code"] = True
    printed = workflow("--dry-run")
    assert jobs_in(printed)["sample"] == jobs_in(printed)["train"] == 1
    assert all(f"{one}; it runs again" in printed for one in named)
    assert f"{named[1]}; it runs again" in workflow(TARGET)
    assert list(workflow.stage("second").glob("superseded-*/checkpoints/step-*")), "it was not trained again"
    assert weights(workflow, "second") == before and workflow.planned(TARGET) == {}
