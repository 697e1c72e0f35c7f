"""A workflow of somebody else that takes ours as a module, and uses what it trained in a rule of its own."""

import pytest
import yaml

from spider.files import read_json

from .conftest import ROOT, SNAKEMAKE, Workflow

#: What it calls its own, and what it says to all shells, must not meet ours.
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
    snakefile: "{snakefile}"
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

#: Its own rule's script; not a `run:`, for which Snakemake names an interpreter with a space unquoted.
JUDGE = """
import json, sys

evaluation, verdict, worst = sys.argv[1:]
bpb = json.load(open(evaluation))["bpb"]
open(verdict, "w").write(f"{'good' if bpb < float(worst) else 'bad'} {bpb}")
"""

#: Rules that both have; they need names that tell them apart.
HOMONYMS = """
rule all:
    input:
        rules.target.input

rule train:
    shell:
        "false"
"""


class Foreign(Workflow):
    """A folder with a workflow of its own, whose configuration has Spider's as one of its blocks."""

    def say(self, prefix="", renamed="", results="results", rest=""):
        text = FOREIGN.format(
            snakefile=ROOT / "Snakefile",
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
        said, bpb = (self.folder / "mine/verdict.txt").read_text().split()
        evaluation = read_json(self.folder / results / "runs/small/first/evaluation.json")
        return said, float(bpb) == evaluation["bpb"]

    def recorded(self, results="results"):
        """Jobs that recorded themselves, as by hand: in a module no handler opens an invocation."""
        jobs = [read_json(path) for path in (self.folder / results / "tracking/jobs").glob("*.json")]
        return {job["tags"]["spider.rule"] for job in jobs if job["status"] == "finished"}


@pytest.fixture
def foreign(tmp_path):
    """Without tracking, which costs each job some seconds."""
    made = Foreign(tmp_path)
    del made.run["stages"][1]
    made.run["stages"][0]["max_steps"] = 8
    made.config["tracking"] = {"enabled": False}
    return made


def test_rules_under_other_names_train_on_what_was_made_and_what_they_made_is_used(prepared, foreign):
    foreign.say(renamed="as spider_*", rest=HOMONYMS)
    output = foreign()
    assert "spider_train" in output and "spider_encode" not in output  # made without them, by `prepared`
    assert foreign.verdict("results") == ("good", True)
    snapshot = yaml.safe_load((foreign.results / "config.yaml").read_text())
    assert snapshot == {**foreign.config, "results": "results"}

    assert "Nothing to be done" in foreign("--dry-run")
    foreign.say()  # neither do the same rules under their own names find anything to do
    assert "Nothing to be done" in foreign("--dry-run")
    alone = Workflow(foreign.folder)
    alone.config = foreign.config
    # What the foreign workflow has no use for is all that is left to do without it.
    assert alone.planned() == {"sample": 1, "draw": 1, "compare": 1, "report": 1}

    before = foreign.receipt("first")["weights"]
    foreign.run["stages"][0]["lr"] = 5e-4  # the jobs read what changed
    foreign.config["tracking"] = {"enabled": True}
    foreign("results/runs/small/first/train.json")
    assert foreign.receipt("first")["weights"] != before
    assert foreign.recorded() == {"train"}


def test_a_prefix_moves_all_that_is_made(foreign):
    foreign.config["datasets"]["text"]["ngram"] = 0.3
    foreign.say(prefix="byte", results="byte/results")
    foreign.config["tracking"] = {"enabled": True}
    assert "rule encode_with_ngrams:" in foreign("datasets/text")
    assert (foreign.folder / "byte/results/shards/text/ngram/000.bin").stat().st_size
    assert foreign.recorded("byte/results") == {"download", "encode", "index"}
    foreign.config["tracking"] = {"enabled": False}
    foreign("target")
    assert foreign.verdict("byte/results") == ("good", True)
    assert not foreign.results.exists()
    assert (foreign.folder / "byte/results/logs/train/small/first.log").exists()
    assert "Nothing to be done" in foreign("--dry-run")


def test_a_prefix_before_an_absolute_path_is_refused(foreign):
    foreign.config["results"] = str(foreign.folder / "elsewhere")
    said = foreign.say(prefix="byte")("--dry-run", fails=True)
    assert "is absolute, and a module's `prefix:` cannot move it" in said
