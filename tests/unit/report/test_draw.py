"""Run `spider report draw` in a process that cannot import torch."""

import subprocess
import sys

import yaml

from spider.common.files import read_json
from spider.report.page import FIGURES
from tests.unit.report.finished import config_of, finished_run

#: A module that is None in `sys.modules` cannot be imported.
DRAW = """
import sys
sys.modules["torch"] = None
from spider.cli import main
sys.argv = ["spider", *sys.argv[1:]]
main()
"""


def test_figures_are_drawn_again_without_torch_and_the_job_notes_its_code(tmp_path):
    _, results = finished_run(tmp_path / "results")
    folder = results.stage("small", "second")
    figures = [folder.path / name for name in FIGURES]
    before = [path.read_bytes() for path in figures]
    for path in figures:
        path.unlink()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_of(results.root)))
    words = [sys.executable, "-c", DRAW, "--log", "draw.log", "report", "draw", "small/second"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.read_bytes() for path in figures] == before
    noted = read_json(tmp_path / "draw.json")
    code = read_json(results.root / f"code/{noted['code']}.json")
    assert "spider/report/figures.py" in code["modules"] and "spider/model/layers.py" not in code["modules"]
