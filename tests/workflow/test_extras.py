"""Extras add commands, rules and blocks of the configuration, and the core works without them."""

import os
import subprocess
import sys

import pytest

from .conftest import jobs_in
from .test_module import Foreign

#: Python imports a module of this name at its start.
HIDE = """
import importlib.metadata, sys
found = importlib.metadata.entry_points
def others(**given):
    return [] if given.get("group", "").startswith("spider.") else found(**given)
importlib.metadata.entry_points = others
sys.modules |= {"spider_lab": None, "spider_trust": None}
"""
PACKAGE = '''
from pathlib import Path

import click

from spider.config import Block

RULES = Path(__file__).with_name("own.smk")

class Wider(Block):
    hidden: tuple[str, ...] = ("small-wide",)

    def expand(self, runs):
        return {"small-wide": {**runs["small"], "seed": 7}}

@click.command()
@click.argument("name", default="you")
def hail(name):
    """Greet."""
    click.echo(f"hail {name}")
'''
RULES = """
plan.wanted.append("<results>/hail.txt")
plan.measured_by.append(lambda run: [f"<results>/runs/{run}/hail.txt"])


rule hail:
    output:
        "<results>/{place,.*}hail.txt",
    params:
        spider=command,
    shell:
        "{params.spider} report hail {wildcards.place} > {output}"
"""
POINTS = """
[spider.commands]
hail = demo:hail
report hail = demo:hail
[spider.rules]
demo = demo:RULES
[spider.config]
wider = demo:Wider
"""


def with_path(folder):
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def spider(workflow, path, *words):
    """Run `spider` in the folder of a workflow, and return what it prints."""
    workflow.command()
    done = subprocess.run(
        [sys.executable, "-m", "spider.cli", *words],
        cwd=workflow.folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.fixture
def demo(tmp_path_factory):
    """Return PYTHONPATH with an extra of one package."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "demo").mkdir()
    (folder / "demo/__init__.py").write_text(PACKAGE)
    (folder / "demo/own.smk").write_text(RULES)
    (folder / "demo-1.dist-info").mkdir()
    (folder / "demo-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: demo-pages\nVersion: 1\n")
    (folder / "demo-1.dist-info/entry_points.txt").write_text(POINTS)
    return with_path(folder)


def test_the_core_works_without_its_extras(workflow, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(HIDE)
    path, workflow.forked = with_path(folder), False
    assert "extra" not in spider(workflow, path, "--help")
    assert "verdicts is of the extra lab, which is not installed; run `pip" in spider(
        workflow, path, "verdicts"
    )
    assert "small" in spider(workflow, path, "describe", "small")
    plan = workflow("--dry-run", PYTHONPATH=path)
    assert "train" in plan and "compare" in plan
    workflow.config["ladders"] = {}
    refused = workflow("--dry-run", PYTHONPATH=path, fails=True)
    assert "ladders: is of the extra lab, which is not installed; run `pip" in refused


def test_an_extra_adds_commands_rules_and_runs(workflow, demo):
    workflow.forked = False
    assert "hail      demo-pages" in spider(workflow, demo, "--help").replace("  hail  ", "hail  ", 1)
    assert "demo-pages" in spider(workflow, demo, "report", "--help")
    assert spider(workflow, demo, "report", "hail", "Ada") == "hail Ada\n"
    assert jobs_in(workflow("--dry-run", PYTHONPATH=demo))["hail"] == 2
    assert jobs_in(workflow("--dry-run", "runs/small", PYTHONPATH=demo))["hail"] == 1
    workflow("results/runs/small/hail.txt", PYTHONPATH=demo)
    assert (workflow.results / "runs/small/hail.txt").read_text() == "hail runs/small/\n"

    workflow.config["wider"] = {}
    plan = jobs_in(workflow("--dry-run", PYTHONPATH=demo))
    assert plan["train"] == 2 and plan["report"] == 1  # The run of the extra is hidden.
    assert jobs_in(workflow("--dry-run", "runs/small-wide", PYTHONPATH=demo))["train"] == 2
    workflow.config["wider"] = {"hiden": []}
    wrong = workflow("--dry-run", PYTHONPATH=demo, fails=True)
    assert 'wider.hiden: unknown key; did you mean "hidden"?' in wrong
    workflow.config |= {"wider": {}, "runs": {"small": workflow.run, "small-wide": workflow.run}}
    wrong = workflow("--dry-run", PYTHONPATH=demo, fails=True)
    assert "runs.small-wide: wider makes a run of this name" in wrong


def test_a_workflow_around_ours_has_the_rules_of_extras(tmp_path, demo):
    foreign = Foreign(tmp_path)
    foreign.forked = False
    foreign.write(renamed="as spider_*")
    assert "spider_hail" in foreign("--dry-run", "results/hail.txt", PYTHONPATH=demo)
