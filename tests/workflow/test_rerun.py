"""A change of settings, files or code runs only the jobs that it affects."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spider.common.files import digest, read_json, write_json
from spider.provenance.made import Made, made_path

from .conftest import ROOT, jobs_in, untracked


@pytest.fixture
def workflow(trained):
    """Return a copy of the finished workflow, which a test may change."""
    return trained


def weights(workflow, *stages):
    return {stage: workflow.receipt(stage)["weights"] for stage in stages}


@pytest.mark.parametrize("lost", ["folder", "records"])
def test_edits_count_whatever_snakemake_remembers(workflow, lost):
    """Its folder may be removed after an error, and its records may be empty after a power cut."""
    if lost == "folder":
        shutil.rmtree(workflow.folder / ".snakemake")
    else:
        for path in (workflow.folder / ".snakemake/metadata").rglob("*"):
            if path.is_file():
                path.write_text("")
    assert workflow.planned() == {}
    workflow.run["evaluation"]["max_bytes"] = 3000
    assert workflow.planned()["evaluate"] == 2
    workflow.run["defaults"]["lr"] = 2e-3
    assert workflow.planned()["train"] == 2
    workflow.config["datasets"]["text"]["validation"] = 0.2
    assert workflow.planned()["encode"] == 1
    done = subprocess.run(
        [sys.executable, "-m", "spider.cli", "evaluate", "small/first"],
        cwd=workflow.folder,
        capture_output=True,
        text=True,
    )
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
    workflow.run["defaults"]["lr"] = 1e-3
    workflow.run["evaluation"]["prompts"] = ["Document 8"]
    assert workflow.planned() == {"sample": 2, "compare": 1, "report": 1}


def test_two_checkouts_of_one_results_folder_know_what_the_other_has_made(workflow, tmp_path_factory):
    other = untracked(tmp_path_factory.mktemp("other"))
    shutil.copy2(workflow.folder / "text.jsonl", other.folder)
    workflow.config["results"] = other.config["results"] = str(workflow.folder / "results")
    assert workflow.planned() == {} and other.planned() == {}
    other.run["evaluation"]["prompts"] = ["Document 7"]
    sample = str(workflow.stage("first") / "sample.txt")
    other(sample)
    assert workflow.planned(sample) == {"sample": 1}


def test_losing_a_figure_draws_again_and_scores_nothing(workflow):
    figure, scores = (workflow.stage("first") / name for name in ("loss.svg", "evaluation.json"))
    before, written = figure.read_bytes(), scores.stat().st_mtime_ns
    figure.unlink()
    assert workflow.planned() == {"draw": 1, "report": 1}
    workflow()
    assert figure.read_bytes() == before and scores.stat().st_mtime_ns == written
    assert workflow.planned() == {}


def test_another_prompt_writes_another_sample_and_scores_nothing(workflow):
    scores = [workflow.stage(stage) / "evaluation.json" for stage in ("first", "second")]
    written = [path.stat().st_mtime_ns for path in scores]
    workflow.run["evaluation"] |= {"prompts": ["Document 7"]}
    assert workflow.planned() == {"sample": 2, "compare": 1, "report": 1}
    workflow()
    assert (workflow.stage("second") / "sample.txt").read_text().startswith("Document 7")
    assert read_json(workflow.stage("second") / "sample.json")["prompt"] == "Document 7"
    assert "<b>Document 7</b>" in (workflow.results / "report/runs/small.html").read_text()
    assert [path.stat().st_mtime_ns for path in scores] == written
    assert workflow.planned() == {}


def test_a_stage_without_checkpoints_and_receipt_is_trained_again(workflow):
    before = workflow.receipt("second")["weights"]
    shutil.rmtree(workflow.stage("second") / "checkpoints")
    (workflow.stage("second") / "sample.txt").unlink()
    output = workflow(fails=True)
    remedy = (
        "delete results/runs/small/second/train.json and run `snakemake results/runs/small/second/train.json`"
    )
    assert remedy in output + (workflow.results / "logs/sample/small/second.log").read_text()
    (workflow.stage("second") / "train.json").unlink()
    workflow("results/runs/small/second/sample.txt")
    assert workflow.receipt("second")["weights"] == before
    steps = [json.loads(line)["step"] for line in (workflow.stage("second") / "metrics.jsonl").open()]
    assert steps == sorted(set(steps))


def test_touching_source_files_retrains_nothing(workflow):
    touched = [ROOT / "workflow/Snakefile", *(ROOT / "rules").glob("*.smk"), *(ROOT / "spider").rglob("*.py")]
    before = {path: path.stat() for path in touched}
    try:
        for path in touched:
            os.utime(path)
        assert workflow.planned() == {}
    finally:
        for path, stat in before.items():
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


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


def test_a_new_key_in_every_block_reruns_nothing(workflow, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(GROW)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "SPIDER_TRACKING": "off"}
    code = "import spider.config as c; print(*(b.__name__ for b in (c.Config, *c.Block.__subclasses__())"
    code += " if f'new_key_of_{b.__name__.lower()}' not in b.model_fields), len(c.Block.__subclasses__()))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 10, done
    assert "Nothing to be done" in workflow("--dry-run", PYTHONPATH=path)

    before, log = weights(workflow, "first", "second"), workflow.stage("second") / "metrics.jsonl"
    written = log.stat().st_mtime_ns
    command = [sys.executable, "-m", "spider.cli", "--config", "results/config.yaml", "train"]
    done = subprocess.run(
        [*command, "small/second"], cwd=workflow.folder, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert weights(workflow, "first", "second") == before
    assert log.stat().st_mtime_ns == written


def test_what_decides_no_result_retrains_nothing(workflow):
    """Smaller micro-batches may need a warm-up of their own."""
    assert workflow.planned() == {}
    workflow.run["stages"][0] |= {"ckpt_every": 7, "log_every": 3}
    workflow.run["parallel"] = "fsdp"
    assert workflow.planned() == {}
    workflow.run["resources"]["processes"] = 2
    assert "download" not in workflow.planned() and workflow.planned()["warmup"] == 1


def test_a_new_warm_up_retrains_nothing(workflow):
    """The jobs of the stages run again. The trainer finds a finished stage and trains no step."""
    before, log = weights(workflow, "first"), workflow.stage("first") / "metrics.jsonl"
    written = log.stat().st_mtime_ns
    printed = workflow("results/runs/small/first/train.json", "--forcerun", "warmup")
    assert "start warmup small" in printed and "start train small" in printed
    assert weights(workflow, "first") == before
    assert log.stat().st_mtime_ns == written


def test_smaller_micro_batches_of_the_same_steps_continue_a_stage(workflow):
    """The second stage is left after step 50. Both stages get a new warm-up, the first one trains no step."""
    first, second = workflow.stage("first"), workflow.stage("second")
    before, written = weights(workflow, "first"), (first / "metrics.jsonl").stat().st_mtime_ns
    rows = (second / "metrics.jsonl").read_text()
    for name in ("checkpoints/step-00000060", "checkpoints/best", "train.json"):
        path = second / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    workflow.run["defaults"] |= {"micro_batch": 2, "grad_accum": 2}
    printed = workflow("results/runs/small/second/train.json")
    assert "start warmup small" in printed
    said = (workflow.results / "logs/train/small/second.log").read_text()
    assert (
        "going on from step-00000050" in said
        and "goes on with 1 CPU threads (processes: 1, micro-batches of 2)" in said
    )
    assert workflow.receipt("second")["global_step"] == 60
    assert (second / "metrics.jsonl").read_text() == rows and not list(second.glob("superseded-*"))
    assert weights(workflow, "first") == before and (first / "metrics.jsonl").stat().st_mtime_ns == written
    assert "train" not in workflow.planned()


def test_appending_a_stage_trains_that_stage_only(workflow):
    before = weights(workflow, "first", "second")
    workflow.run["stages"].append({"name": "third", "max_steps": 5, "warmup_steps": 0})
    once = ("train", "evaluate", "stage_baselines", "sample", "draw", "compare", "report")
    assert workflow.planned() == dict.fromkeys(once, 1)
    workflow()
    assert weights(workflow, "first", "second") == before
    assert workflow.receipt("third")["global_step"] == 65


def test_changing_the_second_stage_retrains_it_and_keeps_the_old_checkpoints(workflow):
    before = weights(workflow, "first", "second")
    workflow.run["stages"][1]["lr"] = 5e-4
    assert workflow.planned()["train"] == 1
    workflow("--until", "train")
    after = weights(workflow, "first", "second")
    assert after["first"] == before["first"]
    assert after["second"] != before["second"]
    kept = list(workflow.stage("second").glob("superseded-*/checkpoints/step-*"))
    assert kept, "the checkpoints of the replaced stage are gone"


def test_snakemakes_report_has_the_text_the_figures_and_the_tables(workflow, tmp_path):
    page = tmp_path / "report.html"
    workflow("--report", str(page))
    text = page.read_text()
    for shown in ("general-purpose compressors", "bpb.svg", "loss.svg", "sample.txt", "table.md"):
        assert shown in text
    assert Path(workflow.results / "report/table.md").read_text().count("small") >= 2


def made_by_other_code(workflow, output, module):
    """Let the record of an output say that another version of a module has made it."""
    path = made_path(workflow.results, output)
    made, code = Made.read(path), {"version": "1", "commit": None, "modules": {module: "0" * 16}}
    write_json(workflow.results / "code" / f"{digest(code)}.json", code)
    made.with_job(-1, code=digest(code)).write(path)


def test_outputs_of_other_code_are_reused_and_named(workflow):
    """The dry run names the modules that were edited since."""
    module = "spider/evaluation/generate.py"
    made_by_other_code(workflow, "runs/small/second/sample.json", module)
    assert f"sample: made by other code ({module})" in workflow("--dry-run")
    assert workflow.planned() == {}

    workflow.config["strict_code"] = True
    printed = workflow("--dry-run")
    assert jobs_in(printed)["sample"] == 1
    assert f"sample: made by other code ({module}); it runs again" in printed


def test_strict_code_trains_again_what_other_code_has_trained(workflow):
    module, before = "spider/training/loop.py", workflow.receipt("second")["weights"]
    workflow.config["strict_code"] = True
    assert workflow.planned() == {}
    made_by_other_code(workflow, "runs/small/second/train.json", module)
    target = "results/runs/small/second/train.json"
    assert workflow.planned(target) == {"train": 1}
    printed = workflow(target)
    assert f"train: made by other code ({module}); it runs again" in printed
    assert list(workflow.stage("second").glob("superseded-*/checkpoints/step-*")), "it was not trained again"
    assert workflow.receipt("second")["weights"] == before
    assert workflow.planned(target) == {}
