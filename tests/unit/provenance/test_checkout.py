"""`spider checkout` restores code that was not committed; without records it says what is missing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.trust_checkout import EDITS, RUNS, again
from spider import codefiles
from spider.cli import cli
from spider.files import write_json
from spider.provenance.checkout import checkout
from spider.provenance.lineage import Lineage
from spider.results import Results, write_config
from spider.tracking import code, job

CONFIG = {
    "datasets": {"text": {"source": {"kind": "local", "files": ["text.jsonl"]}}},
    "runs": {"r": {"data": "text", "model": {"preset": "tiny"}, "stages": [{"name": "a", "max_steps": 1}]}},
}


def git(folder, *words):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Record a training by a project with uncommitted changes, and return its results folder."""
    project = tmp_path / "project"
    (project / "spider").mkdir(parents=True)
    (project / "spider/a.py").write_text("A = 1\n")
    (project / "spider/b.py").write_text("B = 1\n")
    git(project, "init", "--quiet")
    git(project, "add", ".")
    git(project, "commit", "-qm", "one")
    commit = subprocess.check_output(["git", "-C", project, "rev-parse", "HEAD"], text=True).strip()
    (project / "spider/a.py").write_text("A = 2\n")
    (project / "spider/new.py").write_text("NEW = 'é'\n")
    monkeypatch.setenv("SPIDER_WORKFLOW", "w")  # nothing is sent
    monkeypatch.setattr(code, "ROOT", project)
    monkeypatch.setattr(codefiles, "ROOT", project)
    monkeypatch.setattr(code, "git_commit", lambda: f"{commit}-dirty")
    codefiles.code_files.cache_clear()
    code.patch.cache_clear()
    monkeypatch.setattr(code, "imported", codefiles.code_files)
    monkeypatch.chdir(tmp_path)
    root = Path("results")
    snapshot = write_config(root, CONFIG)
    (tmp_path / "text.jsonl").write_text("{}")
    receipt = Results(root).stage("r", "a").receipt
    own = [tmp_path / "text.jsonl"]
    with job("train", "r/a", results=root, inputs=own, outputs=[receipt], config=snapshot):
        write_json(receipt, {"weights": "w"})
    yield root
    codefiles.code_files.cache_clear()
    code.patch.cache_clear()


def test_uncommitted_code_configuration_and_files_are_restored(made, tmp_path):
    for name in ("a.py", "new.py"):
        (tmp_path / "project/spider" / name).unlink()
    folder = tmp_path / "folder"
    *warnings, last = checkout(Lineage(made), "r", "a", folder)
    assert warnings == []
    assert last.startswith(f'cd {folder} && PYTHONPATH="$PWD" snakemake --cores ')
    assert (folder / "spider/a.py").read_text() == "A = 2\n"
    assert (folder / "spider/b.py").read_text() == "B = 1\n"
    assert (folder / "spider/new.py").read_text() == "NEW = 'é'\n"
    assert (folder / "text.jsonl").resolve() == tmp_path / "text.jsonl"
    assert "results: results" in (folder / "config.yaml").read_text()
    with pytest.raises(ValueError, match="not an empty folder"):
        checkout(Lineage(made), "r", "a", folder)


def test_a_changed_file_and_other_code_are_named(made, tmp_path):
    (tmp_path / "text.jsonl").write_text("{ }")
    with job("index", "text", results=made, outputs=[tmp_path / "text.jsonl"]):
        pass
    lines = checkout(Lineage(made), "r", "a", tmp_path / "folder")
    assert f"warning: {tmp_path}/text.jsonl has changed since, so the bytes will differ" in lines


def test_what_is_missing_is_said(made, tmp_path, monkeypatch):
    run = CliRunner().invoke
    (tmp_path / "config.yaml").write_text((made / "config.yaml").read_text())
    done = run(cli, ["checkout", "r", "folder"], catch_exceptions=False)
    assert done.exit_code == 0 and "snakemake" in done.output
    monkeypatch.setattr(code, "ROOT", tmp_path / "site-packages")
    with pytest.raises(ValueError, match="without a git repository"):
        checkout(Lineage(made), "r", "a", tmp_path / "other")
    monkeypatch.setattr(code, "ROOT", tmp_path / "project")
    Results(made).stage("r", "a").receipt.write_text("{}")
    with pytest.raises(ValueError, match="no job recorded the commit"):
        checkout(Lineage(made), "r", "a", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.long
def test_training_in_a_checkout_gives_the_same_bytes(tmp_path):
    first, second = again(tmp_path, RUNS["spider, muon"], EDITS["new module"])
    assert first == second
