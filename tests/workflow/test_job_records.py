"""The record of every job, of every rule, names every output that its rule declares."""

from __future__ import annotations

import copy
import re
import shutil

import pytest

from spider.files import read_json

from .conftest import ROOT, Workflow
from .test_tokenized import spider, standard_task

MEMORY = {"orders": [1, 2, 4, 6], "rare": 5, "pointers": [2, 4], "hidden": 8, "state": 8}


@pytest.fixture
def everything(tmp_path, monkeypatch):
    """A workflow, tracked, with jobs of every rule but `scaling`: one run with an n-gram index, one with a
    tokenizer, packed rows, a compressed model that adapts to the text, and a task of the harness."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = Workflow(tmp_path)
    made.config["datasets"]["text"]["memory"] = 0.5
    made.config["datasets"]["text-bpe"] = {"like": "text", "tokenizer": "bpe", "memory": 0}
    made.config["tokenizers"] = {"bpe": {"data": "text", "vocab_size": 300}}
    toy = {"family": "tests.families.toy", "width": 8}
    run = made.config["runs"].pop("small")
    run |= {"stages": [{"name": "first", "max_steps": 5, "warmup_steps": 0}]}
    bpe = copy.deepcopy(run) | {
        "data": "text-bpe",
        "model": toy,
        "compress": {"cap": 1_000_000, "windows": 4},
    }
    bpe["stages"][0]["packing"] = "best_fit"
    bpe["evaluation"]["ttt"] = {"chunk": 64}
    bpe["harness"] = {"tasks": ["mine"], "include": standard_task(made.folder)}
    made.config["runs"] = {"index": run | {"model": toy | {"memory": MEMORY}}, "bpe": bpe}
    return made


def rules() -> set[str]:
    """Every rule in the files of the workflow."""
    text = "\n".join(path.read_text() for path in (ROOT / "rules").glob("*.smk"))
    return set(re.findall(r"^ *rule (\w+):", text, re.M)) | set(
        re.findall(r"^ *use rule .* as (\w+)", text, re.M)
    )


def declared(workflow: Workflow, *targets: str) -> list[tuple[str, set[str]]]:
    """The rule and the declared outputs of every job of the workflow, done or not."""
    said = workflow("--dry-run", "--forceall", *targets, "--quiet", "host")
    blocks = re.findall(r"^(?:local)?rule (\w+):\n((?:    .+\n)+)", said, re.M)
    outputs = {name: re.findall(r"^    output: (.+)$", block, re.M) for name, block in blocks}
    assert outputs, said
    return [
        (name, set(output.split(", ")))
        for name, block in blocks
        for output in re.findall(r"^    output: (.+)$", block, re.M)
    ]


def unrecorded(workflow: Workflow, jobs: list[tuple[str, set[str]]]) -> dict[str, set[str]]:
    """By rule, the declared outputs of jobs that are missing in every record that names any of them."""
    root = str(workflow.results.relative_to(workflow.folder))
    found = [read_json(path) for path in (workflow.results / "tracking/jobs").glob("*.json")]
    recorded = [{f"{root}/{file['path']}" for file in record["outputs"]} for record in found]
    missing = {}
    for rule, outputs in jobs:
        if left := min((outputs - one for one in recorded), key=len):
            missing[rule] = left
    return missing


def test_every_job_of_every_rule_names_all_that_it_makes(everything):
    jobs = declared(everything)
    assert {rule for rule, _ in jobs} == rules() - {"scaling"}
    everything()
    assert unrecorded(everything, jobs) == {}

    # A law is fitted to a sweep of six runs at least: of one run that is done six times as if it were those.
    done = everything.results / "runs/index"
    run = everything.config["runs"].pop("index")
    grid = {"model": {f"w{width}": {**run["model"], "width": width} for width in (8, 16, 32)}}
    stages = [{"name": "first"}]
    run |= {"grid": grid | {"target_flops": {"small": 1e8, "large": 4e8}}, "stages": stages}
    everything.config |= {"runs": {"index": run}, "scaling": "index"}
    jobs = declared(everything, "results/report/scaling.json")
    for width in (8, 16, 32):
        for budget in ("small", "large"):
            shutil.copytree(done, everything.results / f"runs/index-w{width}-{budget}")
    spider(everything, "scaling")
    scaling = [job for job in jobs if job[0] == "scaling"]
    assert len(scaling) == 1 and unrecorded(everything, scaling) == {}

    scores = [read_json(path) for path in (everything.results / "tracking/evaluations").glob("*.json")]
    artifact = read_json(everything.results / "runs/bpe/first/artifact/evaluation.json")
    (sent,) = [one["metrics"] for one in scores if "artifact/bpb" in one["metrics"]]
    assert sent["artifact/ttt/bpb"] == artifact["ttt"]["bpb"]
