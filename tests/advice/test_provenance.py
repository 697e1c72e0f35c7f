"""Advice about the cause between two runs, on trainings and evaluations that were recorded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.provenance.checkout import checkout
from spider.provenance.lineage import Lineage
from spider.results import write_config
from spider.tracking import code
from tests.unit.provenance.test_checkout import git, made  # noqa: F401 (a fixture)

from .followed import advised, changed, refused
from .test_commands import CONFIG, refusal, spider

RUNS = changed(
    CONFIG, {"tracking": {}, "runs.s": changed(CONFIG["runs"]["r"], {"stages": [{"name": "a", "lr": 1e-4}]})}
)
BISECTED = ("diff", "results/runs/r/a", "results/runs/s/a", "--bisect", "--dry-run")


@pytest.fixture
def project(tmp_path, shards, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPIDER_WORKFLOW", "w")  # nothing is sent
    shutil.copyfile(shards.parent / "000.parquet", "toy.parquet")
    return tmp_path


def make(plain: dict[str, Any], *runs: str, evaluated: bool = True) -> None:
    """Run the jobs of a workflow that make these runs."""
    results = Path(plain.get("results", "results"))
    config = ("--config", write_config(results, plain))
    for data in plain["datasets"]:
        raw = results / f"raw/{data}/000.parquet"
        spider(*config, "data", "download", data, "000", "--output", raw)
        spider(*config, "data", "encode", data, "000", raw)
        spider(*config, "data", "index", data, "--output", results / f"shards/{data}/metadata.json")
    for run in runs:
        spider(*config, "train", f"{run}/a", "--threads", 1)
        if evaluated:
            spider(*config, "evaluate", f"{run}/a", "--threads", 1)


def test_two_runs_of_one_folder_are_evaluated(project):
    make(RUNS, "r")
    make(RUNS | {"results": "elsewhere"}, "s")
    said = refusal(*(word.replace("results/runs/s", "elsewhere/runs/s") for word in BISECTED))
    advised(said, "cli/provenance.py", "bisection needs two runs of one results folder; train both in one")
    make(RUNS, "s", evaluated=False)
    advised(
        refusal(*BISECTED),
        "provenance/bisection.py",
        "{}: is not evaluated; run the workflow to its end first",
    )
    make(RUNS, "s")
    assert "lr: 0.003 / 0.0001" in spider(*BISECTED)


def test_a_file_is_brought_back_or_both_runs_trained_again(project):
    make(RUNS, "r", "s")
    (project / "toy.parquet").rename(project / "aside")
    gone = "{}: {} since {} was made from it; bring it back, or train both runs again"
    advised(refusal(*BISECTED), "provenance/bisection.py", gone)
    (project / "aside").rename(project / "toy.parquet")
    assert "lr: 0.003 / 0.0001" in spider(*BISECTED)
    table = pq.read_table("toy.parquet")
    pq.write_table(pa.concat_tables([table, table]), "toy.parquet")
    assert "has changed since" in refusal(*BISECTED)
    make(RUNS, "r", "s")
    assert "lr: 0.003 / 0.0001" in spider(*BISECTED)


def test_a_dataset_of_other_settings_gets_another_name(project):
    make(RUNS, "r")
    other = changed(RUNS, {"datasets.toy.validation": 0.2})
    make(other, "s")
    advised(
        refusal(*BISECTED),
        "provenance/bisection.py",
        "is not the same for {} and {}; give one of them another name, and train that run again",
    )
    other = changed(RUNS, {"datasets.more": other["datasets"]["toy"], "runs.s.data": "more"})
    make(other, "s")
    assert "data: " in spider(*BISECTED)


def test_an_installed_spider_is_replaced_by_a_clone(made, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(code, "ROOT", tmp_path / "site-packages")
    with refused("provenance/checkout.py", "clone the repository, and give this command there"):
        checkout(Lineage(made), "r", "a", tmp_path / "folder")
    git(tmp_path, "clone", "--quiet", "project", "clone")
    monkeypatch.setattr(code, "ROOT", tmp_path / "clone")
    assert checkout(Lineage(made), "r", "a", tmp_path / "folder")
    assert (tmp_path / "folder/spider/new.py").exists()
