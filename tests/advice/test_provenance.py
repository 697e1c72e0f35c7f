"""Advice about the cause between two runs, on trainings and evaluations that were recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.trust_checkout import EDITS
from spider.results import write_config
from tests.unit.provenance.test_checkout import git

from .followed import advised, changed
from .listing import ROOT
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


def jobs(plain: dict[str, Any], *runs: str, evaluated: bool = True) -> Iterator[tuple[object, ...]]:
    """Yield the commands of a workflow's jobs that make these runs."""
    results = Path(plain.get("results", "results"))
    config = ("--config", write_config(results, plain))
    for data in plain["datasets"]:
        raw = results / f"raw/{data}/000.parquet"
        yield *config, "data", "download", data, "000", "--output", raw
        yield *config, "data", "encode", data, "000", raw
        yield *config, "data", "index", data, "--output", results / f"shards/{data}/metadata.json"
    for run in runs:
        yield *config, "train", f"{run}/a", "--threads", 1
        if evaluated:
            yield *config, "evaluate", f"{run}/a", "--threads", 1


def make(*arguments: Any, **options: bool) -> None:
    for words in jobs(*arguments, **options):
        spider(*words)


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
    advised(
        refusal(*BISECTED),
        "provenance/bisection.py",
        "{}: {} since {} was made from it; bring it back, or train both runs again",
    )
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


def with_code(code: Path, *commands: tuple[object, ...], fails: bool = False) -> str:
    """Run commands with the code of a folder, and return what they print, after checking the status."""
    program = "import json, sys; from spider.cli import cli; "
    program += "[cli.main(words, standalone_mode=False) for words in json.loads(sys.argv[1])]"
    words = [sys.executable, "-c", program, json.dumps([[str(word) for word in one] for one in commands])]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def test_a_stage_of_other_code_is_audited_with_that_code_by_a_clone(project):
    git(project, "clone", "--quiet", ROOT, "clone")
    shutil.copytree(ROOT / "spider", project / "clone/spider", dirs_exist_ok=True)
    ((name, text),) = EDITS["rate"].items()
    plain = (project / "clone" / name).read_text()
    (project / "clone" / name).write_text(plain + text)
    with_code(project / "clone", *jobs(RUNS, "r"))
    (project / "clone" / name).write_text(plain)
    audit = ("audit", "results/runs/r/a", "--only", "replay", "--threads", 1)
    said = with_code(project / "clone", audit)
    advised(
        said,
        "audit/replay.py",
        "and the code has changed since; run the audit with PYTHONPATH set to a folder of `spider checkout`",
    )
    shutil.copytree(project / "clone", project / "installed", ignore=shutil.ignore_patterns(".git"))
    checkout = ("--config", "results/config.yaml", "checkout", "r/a", "again")
    advised(
        with_code(project / "installed", checkout, fails=True),
        "provenance/checkout.py",
        "clone the repository, and run this again with PYTHONPATH set to the clone",
    )
    with_code(project / "clone", checkout)
    said = with_code(project / "again", audit)
    assert "1 stretch of 1 trained again with the same bytes" in said, said
