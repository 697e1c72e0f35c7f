"""The n-gram index in the workflow: what is counted again after a change, and what its jobs request."""

import re

import pytest

from spider import requests
from spider.config.ngram import NgramConfig
from spider.files import read_json

NGRAM = {"orders": [1, 2, 4, 6], "rare": 5, "match_orders": [2, 4], "hidden": 8, "state": 8}


@pytest.fixture
def remembering(workflow):
    """A workflow of two toy stages that read an n-gram index."""
    workflow.config["datasets"]["text"]["ngram"] = 0.5
    workflow.run["model"] = {"family": "tests.families.toy", "width": 8, "ngram": NGRAM}
    for stage in workflow.run["stages"]:
        stage["max_steps"] = 10
    return workflow


def indexes(workflow) -> list[str]:
    """Return both indexes of the dataset, as targets."""
    folder = f"results/ngram/text/{NgramConfig.model_validate(NGRAM).counted}"
    return [f"{folder}/{text}/index.json" for text in ("split", "full")]


def test_another_run_that_reads_the_index_does_not_count_again(remembering):
    """The index is one for all runs that count the same, whichever comes first and whatever it is called."""
    targets, runs = indexes(remembering), remembering.config["runs"]
    remembering(*targets)
    remembering.config["runs"] = {"earlier": runs["small"], **runs}
    assert remembering.planned(*targets) == {}
    remembering.config["runs"] = {"renamed": runs["small"]}
    assert remembering.planned(*targets) == {}


def test_requests_follow_from_the_size_of_the_text(remembering):
    """They are estimated from the files while there is no index, and grow with each attempt."""

    def requested(rule: str) -> list[tuple[int, int]]:
        said = remembering("--dry-run", "--quiet", "progress", "--forceall", *indexes(remembering))
        found = re.findall(rf"^rule {rule}:$.*?^    resources: (.*?)$", said, re.M | re.S)
        resources = [dict(one.split("=") for one in line.split(", ")) for line in found]
        return sorted((int(one["mem_mb"]), int(one["runtime"])) for one in resources)

    size = (remembering.folder / "text.jsonl").stat().st_size
    assert requested("count_ngrams") == [requests.counting(3 * size, 4)]
    remembering("datasets/text")
    splits = read_json(remembering.results / "shards/text/metadata.json")["splits"]
    memory, train = splits["ngram"]["tokens"], splits["train"]["tokens"]
    assert requested("count_ngrams") == [requests.counting(memory + train, 4)]
    both = [requests.merging(memory, 4, 2), requests.merging(memory + train, 4, 2)]
    assert requested("build_ngrams") == both
