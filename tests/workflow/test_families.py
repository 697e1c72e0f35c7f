"""A family is one folder: the smallest goes through the real workflow, and no line of Spider knows of it."""

import os
import signal
import time

import pytest
from click.testing import CliRunner

from spider import load_model
from spider.cli import cli
from spider.files import read_json

from .conftest import ROOT

#: Jobs import the family as a user's would be, from the path.
PATH = {"PYTHONPATH": str(ROOT)}


def spider(*command: object) -> str:
    """What a command says that is called in this process: it knows the family, and has imported torch."""
    done = CliRunner().invoke(cli, ["--config", "config.yaml", *map(str, command)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_smallest_family_goes_through_the_whole_workflow(prepared, monkeypatch):
    workflow = prepared  # the text is the same for all families
    monkeypatch.chdir(workflow.folder)
    monkeypatch.setenv("SPIDER_TRACKING", "off")  # as `spider` would say to what this process starts
    workflow.run["model"] = {"family": "tests.families.toy", "width": 8}
    first, second = workflow.run["stages"]
    first["max_steps"], second["max_steps"] = 400, 15
    workflow.run["defaults"]["ckpt_every"] = 20
    workflow.command()  # writes the configuration
    assert "embedding" in spider("describe", "small")

    process = workflow.start(**PATH)
    checkpoints = workflow.stage("first") / "checkpoints"
    deadline = time.monotonic() + 300
    while not list(checkpoints.glob("step-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    if not list(checkpoints.glob("step-*")):
        pytest.fail(output)
    assert not (workflow.stage("first") / "train.json").exists(), "it was killed too late"
    workflow(**PATH)

    for stage in ("first", "second"):
        scored = read_json(workflow.stage(stage) / "evaluation.json")
        assert 0 < scored["bpb"] < 9
        rows = (workflow.stage(stage) / "metrics.jsonl").read_text().splitlines()
        assert len(rows) == len(set(rows)) > 2
    assert read_json(workflow.stage("first") / "train.json")["steps"] == 400
    page = (workflow.results / "report/runs/small.html").read_text()
    assert "second" in page and "not finished" not in page
    assert "Nothing to be done" in workflow("--dry-run", **PATH)

    written = spider("generate", workflow.stage("second"), "--bytes", 20)
    assert written.strip()
    exported = workflow.folder / "exported"
    spider("checkpoint", "export", workflow.stage("second"), exported)
    model, config = load_model(exported)
    trained, _ = load_model(workflow.stage("second"))
    assert (config.family, config.width) == ("tests.families.toy", 8)
    for name, tensor in model.state_dict().items():
        assert tensor.equal(trained.state_dict()[name]), name
