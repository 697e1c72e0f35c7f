"""Advice about the cause between two runs, on trainings and evaluations that were recorded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spider.results import write_config

from .followed import advised, changed
from .listing import ROOT
from .test_commands import CONFIG

RUNS = changed(CONFIG, {"tracking": {}})
#: A change of the code that alters the weights.
EDIT = """
_factor = lr_factor

def lr_factor(*arguments):
    return 0.5 * _factor(*arguments)
"""


@pytest.fixture
def project(tmp_path, shards, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPIDER_WORKFLOW", "w")  # nothing is sent
    shutil.copyfile(shards.parent / "000.parquet", "toy.parquet")
    return tmp_path


def jobs() -> Iterator[tuple[object, ...]]:
    """Yield the commands of a workflow's jobs that train a stage."""
    config = ("--config", write_config(Path("results"), RUNS))
    yield *config, "data", "download", "toy", "000", "--output", "results/raw/toy/000.parquet"
    yield *config, "data", "encode", "toy", "000", "results/raw/toy/000.parquet"
    yield *config, "data", "index", "toy", "--output", "results/shards/toy/metadata.json"
    for command in ("train", "evaluate"):
        yield *config, command, "r/a", "--threads", 1


def git(folder: Path, *words: object) -> str:
    return subprocess.check_output(["git", "-C", folder, *map(str, words)], text=True)


def with_code(code: Path, *commands: tuple[object, ...], fails: bool = False) -> str:
    """Run commands with the code of a folder, and return what they print, after checking the status."""
    program = "import json, sys; from spider.cli import cli; "
    program += "[cli.main(words, standalone_mode=False) for words in json.loads(sys.argv[1])]"
    words = [sys.executable, "-c", program, json.dumps([[str(word) for word in one] for one in commands])]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def test_a_stage_of_other_code_is_audited_with_that_code_by_a_worktree(project):
    git(project, "clone", "--quiet", ROOT, "clone")
    module = project / "clone/spider/training/schedule.py"
    plain = module.read_text()
    module.write_text(plain + EDIT)
    with_code(project / "clone", *jobs())
    module.write_text(plain)
    audit = ("audit", "results/runs/r/a", "--only", "replay", "--threads", 1)
    advised(
        with_code(project / "clone", audit),
        "trust/replay.py",
        "and the code has changed since; run the audit with PYTHONPATH set to a worktree of",
    )
    why = with_code(project / "clone", ("why", "results/runs/r/a/train.json"))
    found = re.search(r"commit (\w+)-dirty with the changes in (tracking/code/\w+\.patch)", why)
    assert found, why
    git(project / "clone", "worktree", "add", "--quiet", project / "again", found[1])
    git(project / "again", "apply", "--whitespace=nowarn", project / "results" / found[2])
    said = with_code(project / "again", audit)
    assert "1 stretch of 1 trained again with the same bytes" in said, said
