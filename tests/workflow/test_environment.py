"""Environment variables of `snakemake` change no training."""

from __future__ import annotations

from spider.checkpoints.records import read_manifest
from spider.config import load_config


def test_options_in_the_environment_do_not_reach_the_jobs_of_a_workflow(trained):
    """`TRAIN_VARIABLES` were set when the folder was made."""
    made = read_manifest(trained.stage("first") / trained.receipt("first")["checkpoint"])
    assert made.identity == load_config(trained.config).stage("small", "first").identity
    log = (trained.results / "logs/train/small/first.log").read_text()
    assert log.count("SEQ_LEN, LR: set in the environment and ignored") == 1
