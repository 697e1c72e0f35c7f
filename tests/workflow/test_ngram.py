"""Runs share an n-gram index, and its jobs request memory and time by the size of the text."""

import re

import pytest

from spider.config.model import NgramConfig

NGRAM = {"contexts": [1, 2, 4, 6], "rare": 5, "matches": [2, 4], "hidden": 8, "state": 8}


@pytest.fixture
def with_index(workflow):
    """Return a workflow whose model reads an n-gram index."""
    workflow.config["datasets"]["text"]["ngram"] = 0.5
    workflow.run["model"] = {"family": "tests.families.toy", "width": 8, "ngram": NGRAM}
    for stage in workflow.run["stages"]:
        stage["max_steps"] = 10
    return workflow


def indexes(workflow) -> list[str]:
    """Return both indexes of the dataset, as targets."""
    folder = f"results/ngram/text/{NgramConfig.model_validate(NGRAM).counted}"
    return [f"{folder}/{text}/index.json" for text in ("split", "full")]


def requested(workflow, rule: str) -> list[tuple[int, int]]:
    """Return the megabytes and minutes that the jobs of a rule request in a plan."""
    plan = workflow("--dry-run", "--quiet", "progress", "--forceall", *indexes(workflow))
    found = re.findall(rf"^rule {rule}:$.*?^    resources: (.*?)$", plan, re.M | re.S)
    resources = [dict(one.split("=") for one in line.split(", ")) for line in found]
    return sorted((int(one["mem_mb"]), int(one["runtime"])) for one in resources)


def test_jobs_request_memory_by_the_size_of_the_text_and_runs_share_their_index(with_index):
    workflow, targets = with_index, indexes(with_index)
    ((estimate, minutes),) = requested(workflow, "count_ngrams")
    assert estimate > 400 and minutes == 30
    workflow(*targets)
    assert 400 < requested(workflow, "count_ngrams")[0][0] < estimate  # By the size of the encoded text.
    split, full = requested(workflow, "build_ngrams")
    assert split < full

    run = workflow.config["runs"]["small"]
    for runs in ({"earlier": run, "small": run}, {"renamed": run}):
        workflow.config["runs"] = runs
        assert workflow.planned(*targets) == {}
