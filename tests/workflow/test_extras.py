"""Extras add commands, rules and blocks of the configuration, and the core works without them."""

import os
import subprocess
import sys

import pytest
import yaml

from tests.forkserver import python

from .conftest import jobs_in
from .test_module import Foreign

#: Hides the extras from this process, as if they were not installed, and gives three commands.
HIDDEN = """
import importlib.metadata, sys
found = importlib.metadata.entry_points
def others(**given):
    return [] if given.get("group", "").startswith("spider.") else found(**given)
importlib.metadata.entry_points = others
sys.modules |= {"spider_lab": None, "spider_trust": None}
from click.testing import CliRunner
from spider.cli import cli
for words in ("--help", "verdicts", "describe small", "--config ladders.yaml describe small"):
    done = CliRunner().invoke(cli, words.split())
    print(done.output, done.exception)
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


def spider(workflow, path, *words):
    """Run `spider` in the folder of a workflow, and return what it prints."""
    workflow.command()
    command = [python(), "-m", "spider.cli", *words]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=workflow.folder, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return PYTHONPATH with an extra of one package."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "demo").mkdir()
    (folder / "demo/__init__.py").write_text(PACKAGE)
    (folder / "demo/own.smk").write_text(RULES)
    (folder / "demo-1.dist-info").mkdir()
    (folder / "demo-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: demo-pages\nVersion: 1\n")
    (folder / "demo-1.dist-info/entry_points.txt").write_text(POINTS)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def test_the_core_works_without_its_extras(workflow):
    (workflow.folder / "ladders.yaml").write_text(yaml.safe_dump(workflow.config | {"ladders": {}}))
    workflow.command()
    command = [sys.executable, "-c", HIDDEN]
    said = subprocess.run(command, cwd=workflow.folder, capture_output=True, text=True).stdout
    assert "verdicts is of the extra lab, which is not installed; run `pip" in said
    assert "ladders: is of the extra lab, which is not installed; run `pip" in said
    assert "parameters" in said and "Commands of extras" not in said


def test_an_extra_adds_commands_rules_and_runs(workflow, demo):
    """The run of its block is hidden, and trained like any other."""
    workflow.config["wider"] = {}
    assert "hail      demo-pages" in spider(workflow, demo, "--help").replace("  hail  ", "hail  ", 1)
    assert spider(workflow, demo, "report", "hail", "Ada") == "hail Ada\n"
    plan = jobs_in(workflow("--dry-run", PYTHONPATH=demo))
    assert (plan["hail"], plan["train"], plan["report"]) == (2, 2, 1)
    plan = jobs_in(workflow("--dry-run", "runs/small-wide", PYTHONPATH=demo))
    assert (plan["hail"], plan["train"]) == (1, 2)
    workflow("results/runs/small/hail.txt", PYTHONPATH=demo)
    assert (workflow.results / "runs/small/hail.txt").read_text() == "hail runs/small/\n"
    workflow.config["wider"] = {"hiden": []}
    wrong = spider(workflow, demo, "describe", "small")
    assert 'wider.hiden: unknown key; did you mean "hidden"?' in wrong
    workflow.config |= {"wider": {}, "runs": {"small": workflow.run, "small-wide": workflow.run}}
    wrong = spider(workflow, demo, "describe", "small")
    assert "runs.small-wide: wider makes a run of this name" in wrong


def test_a_workflow_around_ours_has_the_rules_of_extras(tmp_path, demo):
    foreign = Foreign(tmp_path)
    foreign.write(renamed="as spider_*")
    assert "spider_hail" in foreign("--dry-run", "results/hail.txt", PYTHONPATH=demo)
