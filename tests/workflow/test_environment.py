"""What the environment of `snakemake` may decide about a training: nothing."""

from __future__ import annotations

from spider.checkpoints.records import read_manifest
from spider.config import load_config


def test_the_seeds_variables_do_not_reach_the_jobs_of_a_workflow(trained):
    """`SEEDS_VARIABLES` were set when it was made."""
    made = read_manifest(trained.stage("first") / trained.receipt("first")["checkpoint"])
    assert made.identity == load_config(trained.config).stage("small", "first").identity
    said = (trained.results / "logs/train/small/first.log").read_text()
    assert said.count("SEQ_LEN, LR: set in the environment and ignored") == 1
