"""What the environment of `snakemake` may decide about a training: nothing."""

from __future__ import annotations

from spider.checkpoints.records import read_manifest
from spider.config import load_config


def test_the_seeds_variables_do_not_reach_the_jobs_of_a_workflow(prepared):
    prepared.run["stages"] = [{"name": "first", "max_steps": 2}]
    prepared("results/runs/small/first/train.json", LR="0.5", SEQ_LEN="no number")
    trained = read_manifest(prepared.stage("first") / prepared.receipt("first")["checkpoint"])
    assert trained.identity == load_config(prepared.config).stage("small", "first").identity
    said = (prepared.results / "logs/train/small/first.log").read_text()
    assert said.count("SEQ_LEN, LR: set in the environment and ignored") == 1
