"""The jobs of a workflow read the configuration that it started with, even after an edit of the file."""

import copy

import pytest
import yaml

from spider.common.files import read_json
from spider.common.results import StageFolder
from spider.config import load_config

from .conftest import PATIENCE, finished, untracked, wait_for
from .test_module import Foreign

#: A scheduler that edits the configuration before a job starts, and passes on no variable.
SUBMIT = """#!/bin/sh
cp edited.yaml config.yaml
nohup env -i PATH="$PATH" HOME="$HOME" PYTHONPATH="$PYTHONPATH" sh "$1" > job.log 2>&1 &
echo $!
"""
SUBMITTED = ["--executor", "cluster-generic", "--cluster-generic-submit-cmd", "./submit", "--jobs", "2"]
SUBMITTED += ["--latency-wait", "5", "--seconds-between-status-checks", "1"]


def test_a_second_invocation_does_not_change_the_jobs_of_the_first(prepared):
    started_with = copy.deepcopy(prepared.config)
    prepared.run["stages"][0]["max_steps"] = started_with["runs"]["small"]["stages"][0]["max_steps"] = 60
    first = prepared.start("results/runs/small/second/train.json")
    checkpoints = StageFolder(prepared.stage("first")).checkpoints
    wait_for(lambda: list(checkpoints.glob("step-*")), first, seconds=PATIENCE)

    prepared.run["stages"][1]["lr"] = 5e-4
    prepared.config["datasets"]["more"] = prepared.config["datasets"]["text"]
    prepared("results/raw/more/000.parquet")
    assert yaml.safe_load((prepared.results / "config.yaml").read_text()) == prepared.config

    output, status = finished(first, PATIENCE)
    assert status == 0, output
    assert (
        prepared.receipt("second")["identity"] == load_config(started_with).stage("small", "second").identity
    )
    kept = [yaml.safe_load(path.read_text()) for path in (prepared.results / "configs").iterdir()]
    assert started_with in kept and prepared.config in kept


@pytest.mark.parametrize("kind", [untracked, Foreign])
def test_jobs_of_a_scheduler_do_not_read_an_edited_configuration(tmp_path, kind):
    made = kind(tmp_path)
    made.config["tracking"] = {"enabled": False}
    edited = copy.deepcopy(made.config)
    edited["datasets"]["text"]["validation"] = 0.5
    if kind is Foreign:
        made.write()
        (tmp_path / "edited.yaml").write_text(yaml.safe_dump({"threshold": 9, "spider": edited}))
    else:
        (tmp_path / "edited.yaml").write_text("runs: [")
    (tmp_path / "submit").write_text(SUBMIT)
    (tmp_path / "submit").chmod(0o755)
    made("datasets/text", *SUBMITTED)
    assert (tmp_path / "config.yaml").read_text() == (tmp_path / "edited.yaml").read_text()
    assert read_json(made.results / "shards/text/metadata.json")["validation"] == 0.1
    assert made.planned("datasets/text") == {}
