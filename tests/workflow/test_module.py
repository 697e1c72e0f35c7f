"""Another workflow has ours as a module, and uses a score in a rule of its own."""

import re
import shutil
import subprocess

import pytest
import yaml
from mlflow import MlflowClient

from spider.common.files import read_json
from spider.provenance.made import jobs

from .conftest import ROOT, SNAKEMAKE, Workflow

OURS = repr(str(ROOT / "Snakefile"))

#: Its names and its shell prefix must not affect ours.
FOREIGN = """
import os

CONFIG, RESULTS, PATH = config["threshold"], "mine", os.environ["PATH"]
shell.prefix("export MINE=yes; ")

pathvars:
    results="mine"

rule target:
    input:
        "mine/verdict.txt"

module spider:
    snakefile: {snakefile}
    config: config["spider"]
    {prefix}

use rule * from spider {renamed}

rule judge:
    input:
        "{results}/runs/small/first/evaluation.json"
    output:
        "<results>/verdict.txt"
    log:
        "<results>/judge.log"
    params:
        path=PATH,
        worst=CONFIG,
    shell:
        '''
        test "$MINE" = yes
        test "$PATH" = {{params.path:q}}
        python3 judge.py {{input:q}} {{output:q}} {{params.worst}}
        '''
"""

#: The script of its rule. A `run:` block would fail where the path of the interpreter has a space.
JUDGE = """
import json, sys

evaluation, verdict, worst = sys.argv[1:]
bpb = json.load(open(evaluation))["bpb"]
open(verdict, "w").write(f"{'good' if bpb < float(worst) else 'bad'} {bpb}")
"""

#: Rules of the same names as ours. They need `use rule ... as`.
HOMONYMS = """
rule all:
    input:
        rules.target.input

rule train:
    shell:
        "false"
"""


class Foreign(Workflow):
    """A folder with another workflow, whose configuration has Spider's as one of its blocks."""

    def write(self, prefix="", renamed="", results="results", rest="", snakefile=OURS):
        """Write the Snakefile of the other workflow and the script of its rule."""
        text = FOREIGN.format(
            snakefile=snakefile,
            prefix=f'prefix: "{prefix}"' if prefix else "",
            renamed=renamed,
            results=results,
        )
        (self.folder / "Snakefile").write_text(text + rest)
        (self.folder / "judge.py").write_text(JUDGE)
        return self

    def command(self, *arguments):
        config = {"threshold": 9, "spider": self.config}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        options = ["--configfile", "config.yaml", "--rerun-triggers", "mtime", "input", "params"]
        return [str(SNAKEMAKE), *options, "--cores", "2", *arguments]

    def verdict(self, results):
        verdict, bpb = (self.folder / "mine/verdict.txt").read_text().split()
        evaluation = read_json(self.folder / results / "runs/small/first/evaluation.json")
        return verdict, float(bpb) == evaluation["bpb"]

    def recorded(self, results="results"):
        """Return the rules of the jobs that were recorded, and those that MLflow shows."""
        finished = {job.rule for job in jobs(self.folder / results) if job.status == "finished"}
        client = MlflowClient(f"sqlite:///{self.folder / results}/mlflow.db")
        shown = client.search_runs([client.get_experiment_by_name("Pipeline").experiment_id])
        return finished, {run.data.tags.get("spider.rule") for run in shown} - {None}


@pytest.fixture
def foreign(tmp_path):
    """Return a workflow of one short stage without tracking, which costs each job some seconds."""
    made = Foreign(tmp_path)
    del made.run["stages"][1]
    made.run["stages"][0]["max_steps"] = 8
    made.config["tracking"] = {"enabled": False}
    return made


def test_renamed_rules_use_the_outputs_of_our_own_names_and_the_other_way_round(prepared, foreign):
    foreign.write(renamed="as spider_*", rest=HOMONYMS)
    output = foreign()
    assert "spider_train" in output and "spider_encode" not in output  # `prepared` made the data.
    assert foreign.verdict("results") == ("good", True)
    snapshot = yaml.safe_load((foreign.results / "config.yaml").read_text())
    assert snapshot == {**foreign.config, "results": "results"}

    foreign.write()  # The same rules under their own names have nothing to do either.
    assert "Nothing to be done" in foreign("--dry-run")
    alone = Workflow(foreign.folder)
    alone.config = foreign.config
    # Our workflow alone makes only the files that the other one does not need.
    rest = ("baselines", "stage_baselines", "sample", "draw", "compare", "report")
    assert alone.planned() == dict.fromkeys(rest, 1)

    before = foreign.receipt("first")["weights"]
    foreign.run["stages"][0]["lr"] = 5e-4  # The jobs read the changed value.
    foreign.config["tracking"] = {"enabled": True}
    foreign("results/runs/small/first/train.json")
    assert foreign.receipt("first")["weights"] != before
    # The store receives the jobs from before there was one too, all by the names that they have in our rules.
    own = {"download", "encode", "index", "warmup", "train", "overlap", "evaluate"}
    assert foreign.recorded() == (own, own)


def test_a_prefix_moves_all_outputs_and_a_mirror_restores_them(foreign):
    foreign.config["mirror"] = str(foreign.folder / "mirror")
    foreign.write(prefix="byte", results="byte/results")
    runs = re.compile(r"rule (download|train|evaluate):")
    assert runs.search(foreign("target"))
    assert foreign.verdict("byte/results") == ("good", True)
    assert not foreign.results.exists()
    assert (foreign.folder / "byte/results/logs/train/small/first.log").exists()
    assert "Nothing to be done" in foreign("--dry-run")

    evaluation = (foreign.folder / "byte/results/runs/small/first/evaluation.json").read_bytes()
    shutil.rmtree(foreign.folder / "byte")
    output = foreign("target")
    assert "restored in" in output and not runs.search(output)
    assert (foreign.folder / "byte/results/runs/small/first/evaluation.json").read_bytes() == evaluation


def test_a_prefix_before_an_absolute_path_is_refused(foreign):
    foreign.config["results"] = str(foreign.folder / "elsewhere")
    printed = foreign.write(prefix="byte")("--dry-run", fails=True)
    assert "is absolute, and a module's `prefix:` cannot move it" in printed


def test_the_catalogues_way_to_deploy_a_tag_plans_and_runs(foreign, tmp_path_factory):
    """Snakedeploy writes a module whose Snakefile is `workflow/Snakefile` of a tag."""
    repository = tmp_path_factory.mktemp("repository")
    for name in ("rules", "workflow", "config", ".snakemake-workflow-catalog.yml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, repository / name)
    settings = yaml.safe_load((repository / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert settings["report"] is True and not any(settings["software-stack-deployment"].values())
    git = ["git", "-C", str(repository), "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Release"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    foreign.write(snakefile=f"gitfile({str(repository)!r}, path='workflow/Snakefile', tag='v1')")
    shutil.rmtree(repository / "rules")  # Only the tag has the rules now.
    foreign("datasets/text")
    assert (foreign.results / "shards/text/metadata.json").exists()


def test_the_catalogue_finds_every_page_that_its_configuration_names():
    text = (ROOT / "config/README.md").read_text()
    paths = re.findall(r"\]\(([^)#]+)", text)
    assert paths and all((ROOT / "config" / path).exists() for path in paths)
