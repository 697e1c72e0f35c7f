"""The targets of the Makefile, in a folder with links to the project's files, with this environment."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .conftest import PATIENCE, ROOT


def make(folder, *words, fails=False):
    """Run `make` in the folder with this environment instead of .venv, and return what it prints."""
    for name in ("Makefile", "Snakefile", "workflow", "rules", "profiles"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    command = ["make", "--old-file", ".venv/run-ready", f"BIN={Path(sys.executable).parent}", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    printed = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, printed
    return printed


@pytest.mark.parametrize("words", ["runs/small --dry-run", "--dry-run runs/small"])
def test_a_target_may_follow_the_configuration_of_make_run(workflow, words):
    (workflow.folder / "other.yaml").write_text(yaml.safe_dump(workflow.config))
    printed = make(workflow.folder, "run", "CONFIG=other.yaml", f"ARGS={words}")
    assert "runs/small" in printed and "evaluate" in printed and "compare" not in printed


@pytest.mark.parametrize("target", ["run", "report"])
def test_make_names_a_configuration_that_cannot_be_read_with_the_line(tmp_path, target):
    (tmp_path / "broken.yaml").write_text("runs: {}\ndatasets: [\n")
    printed = make(tmp_path, target, "CONFIG=broken.yaml", fails=True)
    assert "broken.yaml: not valid YAML" in printed and "line 3" in printed and "Traceback" not in printed
    printed = make(tmp_path, target, "CONFIG=missing.yaml", fails=True)
    assert "missing.yaml: no such file" in printed and "Traceback" not in printed
    assert "config.yaml: no such file" in make(tmp_path, target, fails=True)


def test_make_report_writes_into_the_results_folder_of_the_configuration(trained):
    (trained.folder / "results").rename(trained.folder / "elsewhere")
    trained.config["results"] = "elsewhere"
    (trained.folder / "other.yaml").write_text(yaml.safe_dump(trained.config))
    make(trained.folder, "run", "CONFIG=other.yaml", "ARGS=--touch")
    make(trained.folder, "report", "CONFIG=other.yaml")
    text = (trained.folder / "elsewhere/report.html").read_text()
    shown = ("report/runs/small.html", "general-purpose compressors", "loss.svg", "sample.txt", "table.md")
    assert all(name in text for name in shown)
    assert not (trained.folder / "results").exists()


def test_make_findings_runs_each_script_and_fails_with_the_name_of_one_that_changed(tmp_path):
    (tmp_path / "findings").mkdir()
    for name, status in (("a b", 0), ("c", 1), ("d", 0)):
        (tmp_path / f"findings/{name}.sh").write_text(f"echo seen {name}; exit {status}")
    printed = make(tmp_path, "findings", fails=True)
    assert all(f"seen {name}" in printed for name in ("a b", "c", "d"))
    assert re.findall("(.*): not as it says", printed) == ["findings/c.sh"]
