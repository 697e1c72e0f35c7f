"""`snakemake --sdm apptainer`: a job takes its packages from an image, and its code from the checkout.

The image here is the environment of the tests, behind a program that is called as Apptainer is.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import ROOT, SNAKEMAKE, Workflow

APPTAINER = """#!/bin/sh
test "$1" = --version && exec echo apptainer version 1.4.5
echo "$@" >> "$CALLS"
while [ "$1" != bash ]; do shift; done
exec env PATH="$IMAGE_PATH" "$@"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables with which a job finds `spider` in the image only."""
    image = tmp_path / "image"
    image.mkdir()
    (image / "spider").write_text(
        f'#!/bin/sh\necho "$PYTHONPATH" > path\nexec "{SNAKEMAKE.parent}/spider" "$@"\n'
    )
    apptainer = tmp_path / "bin/apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(APPTAINER)
    for program in (apptainer, image / "spider"):
        program.chmod(0o755)
    (tmp_path / "spider.sif").touch()
    return {
        "PATH": f"{apptainer.parent}:{os.environ['PATH']}",
        "IMAGE_PATH": f"{image}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
    }


def test_jobs_run_in_the_image_with_the_code_of_the_checkout(workflow: Workflow, environment: dict[str, str]):
    refused = workflow("--sdm", "apptainer", fails=True)
    assert "error: --sdm apptainer needs an image: set `container: spider.sif`" in refused
    workflow.config["container"] = "spider.sif"
    workflow("--sdm", "apptainer", "--apptainer-args=--nv", "datasets/text", **environment)
    calls = Path(environment["CALLS"]).read_text().splitlines()
    assert all("--nv" in call and " spider.sif bash -c " in call for call in calls)
    assert sum(" data encode text " in call for call in calls) == 1
    searched = (workflow.folder / "path").read_text().strip().split(":")
    assert searched == [str(ROOT), *map(str, ROOT.glob("extras/*"))]
    assert not workflow.planned("datasets/text"), "the same results as without an image"
