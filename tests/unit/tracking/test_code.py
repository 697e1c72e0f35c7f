"""Each job records the code and the environment that made its outputs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spider.files import read_json, sha256
from spider.tracking import close_pipeline, open_pipeline

PROJECT = Path(__file__).parents[3]
JOB = """
import sys
from pathlib import Path
from spider import tracking
with tracking.job("encode", "x", results=Path(sys.argv[1])):
    import spider.data.mixture
"""


@pytest.fixture
def checkout(tmp_path):
    """Return a checkout of the project's Python files, committed."""
    folder = tmp_path / "checkout"
    for name in ("spider", "kernels"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "Snakefile").write_text("rule all:\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "All")
    return folder


def git(folder, *words):
    return subprocess.run(
        ["git", "-C", str(folder), *words], check=True, capture_output=True, text=True
    ).stdout


def made_by(checkout, results, **variables):
    """Run a job by the code of a checkout, and return what it recorded of that code."""
    before = set((results / "tracking/code").glob("*.json"))
    done = subprocess.run(
        [sys.executable, "-c", JOB, results],
        env={"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin", "SPIDER_WORKFLOW": "w", **variables},
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (made,) = set((results / "tracking/code").glob("*.json")) - before
    (record,) = (results / "tracking/jobs").glob("*.json")
    assert read_json(record)["tags"]["spider.code"] == made.stem
    assert int(read_json(record)["tags"]["spider.threads"]) > 0
    return read_json(made)


def test_a_job_records_its_modules_and_the_commit(checkout, tmp_path):
    made = made_by(checkout, tmp_path)
    assert made["commit"] == git(checkout, "rev-parse", "HEAD").strip()
    assert "patch" not in made
    module = "spider/data/mixture.py"
    assert made["modules"][module] == sha256(checkout / module)[:16]
    assert "spider/data/loader.py" not in made["modules"]


def test_edits_and_new_files_are_restored_by_the_patch(checkout, tmp_path):
    clean = made_by(checkout, tmp_path)
    (checkout / "spider/data/mixture.py").write_text("token = value = 1\n")
    (checkout / "spider/new.py").write_text("x = 1\n")
    (checkout / "notes.txt").write_text("not code\n")
    made = made_by(checkout, tmp_path)
    assert made["tree"] != clean["tree"] and not made["redacted"]
    assert [name for name in made["modules"] if made["modules"][name] != clean["modules"][name]] == [
        "spider/data/mixture.py"
    ]
    git(checkout, "clone", "-q", ".", str(tmp_path / "again"))
    git(tmp_path / "again", "apply", str(tmp_path / f"tracking/code/{made['patch']}.patch"))
    assert (tmp_path / "again/spider/data/mixture.py").read_text() == "token = value = 1\n"
    assert (tmp_path / "again/spider/new.py").read_text() == "x = 1\n"
    assert not (tmp_path / "again/notes.txt").exists()


def test_the_patch_has_no_secrets(checkout, tmp_path):
    (checkout / "spider/new.py").write_text("key = 'hf_abcdefghijklmnopqrst'\nother = 'my-own-secret'\n")
    made = made_by(checkout, tmp_path, MY_PASSWORD="my-own-secret")
    text = (tmp_path / f"tracking/code/{made['patch']}.patch").read_text()
    assert made["redacted"] and "hf_" not in text and "my-own" not in text


def test_an_invocation_records_the_installed_packages(results):
    workflow = open_pipeline(results, {"results": "results", "tracking": {}})
    close_pipeline(results, workflow, "finished", timeout=0)
    tags = read_json(results / f"tracking/workflows/{workflow}.json")["tags"]
    packages = (results / f"tracking/code/{tags['spider.environment']}.requirements").read_text().splitlines()
    assert any(line.startswith("torch==") for line in packages) and packages == sorted(
        packages, key=str.lower
    )
