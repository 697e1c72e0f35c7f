"""A memory through the real workflow: counted, read in training and after, never of what is trained on."""

import base64
import json
import re
import shutil
from pathlib import Path

import pytest

from spider import load_model, requests
from spider.config.memory import MemoryConfig
from spider.errors import CheckpointError
from spider.evaluation.bpb import clip_stream, score
from spider.evaluation.held_out import validation_stream
from spider.files import read_json
from spider.memory.store import open_memory

MEMORY = {"orders": [1, 2, 4, 6], "rare": 5, "pointers": [2, 4], "hidden": 8, "state": 8}


@pytest.fixture
def remembering(workflow):
    """A workflow of two toy stages that read a memory."""
    workflow.config["datasets"]["text"]["memory"] = 0.5
    workflow.run["model"] = {"family": "tests.families.toy", "width": 8, "memory": MEMORY}
    for stage in workflow.run["stages"]:
        stage["max_steps"] = 10
    return workflow


def memories(workflow) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in workflow.results.glob("memory/*/*/*/memory.json")}


def test_text_is_counted_trained_with_and_read_with(remembering, monkeypatch):
    root = Path(__file__).parents[2]
    remembering(PYTHONPATH=str(root))
    monkeypatch.chdir(remembering.folder)
    made = {name: open_memory(folder) for name, folder in memories(remembering).items()}
    assert set(made) == {"memory", "folded"}
    assert made["memory"].description.splits == ["memory"]
    assert made["folded"].description.splits == ["memory", "train"]
    assert not list(remembering.results.glob("memory/*/*/counts/*")), "what was merged is not kept"

    checkpoint = (
        remembering.stage("second") / read_json(remembering.stage("second") / "train.json")["checkpoint"]
    )
    manifest = read_json(checkpoint / "manifest.json")
    assert manifest["memory"] == made["memory"].description.digest
    assert manifest["folded"] == made["folded"].description.digest
    evaluated = read_json(remembering.stage("second") / "evaluation.json")
    assert evaluated["memory"] == manifest["folded"]
    assert "Nothing to be done" in remembering("--dry-run", PYTHONPATH=str(root))

    # The figure is the model's with that memory, and not without what it knows.
    model, _ = load_model(remembering.stage("second"), family_module="tests.families.toy")
    tokens_N, _ = validation_stream(remembering.results / "shards/text", 4000)
    assert score(model, clip_stream(tokens_N, 4000), seq_len=32).bpb == pytest.approx(
        evaluated["bpb"], abs=1e-3
    )
    model.proposer = None
    with pytest.raises(ValueError, match="reads a memory"):
        score(model, tokens_N, seq_len=32)

    # Another memory, or none, is not read in its place.
    shutil.rmtree(memories(remembering)["folded"])
    with pytest.raises(CheckpointError, match="no memory lies there"):
        load_model(remembering.stage("second"), family_module="tests.families.toy")
    shutil.copytree(memories(remembering)["memory"], made["folded"].folder)
    with pytest.raises(CheckpointError, match="another memory"):
        load_model(remembering.stage("second"), family_module="tests.families.toy")


def indexes(workflow) -> list[str]:
    """Return both indexes of the dataset, as targets."""
    folder = f"results/memory/text/{MemoryConfig.model_validate(MEMORY).counted}"
    return [f"{folder}/{text}/memory.json" for text in ("memory", "folded")]


def test_another_run_that_reads_the_index_does_not_count_again(remembering):
    """The index is one for all runs that count the same, whichever comes first and whatever it is called."""
    targets, runs = indexes(remembering), remembering.config["runs"]
    remembering(*targets)
    remembering.config["runs"] = {"earlier": runs["small"], **runs}
    assert remembering.planned(*targets) == {}
    remembering.config["runs"] = {"renamed": runs["small"]}
    assert remembering.planned(*targets) == {}


def test_what_was_counted_when_the_run_was_recorded_is_not_counted_again(remembering):
    """Before, Snakemake's record of an index held the name of the first run that read it."""
    targets, runs = indexes(remembering), remembering.config["runs"]
    remembering(*targets)
    for target, folded in zip(targets, ("''", "'--folded'"), strict=True):
        record = (
            remembering.folder / ".snakemake/metadata" / base64.urlsafe_b64encode(target.encode()).decode()
        )
        record.write_text(json.dumps(read_json(record) | {"params": [folded, "'small'"]}))
    remembering.config["runs"] = {"earlier": runs["small"], **runs}
    assert remembering.planned(*targets) == {}


def test_requests_follow_from_the_size_of_the_text(remembering):
    """They are estimated from the files while there is no index, and grow with each attempt."""

    def requested(rule: str) -> list[tuple[int, int]]:
        said = remembering("--dry-run", "--quiet", "progress", "--forceall", *indexes(remembering))
        found = re.findall(rf"^rule {rule}:$.*?^    resources: (.*?)$", said, re.M | re.S)
        resources = [dict(one.split("=") for one in line.split(", ")) for line in found]
        return sorted((int(one["mem_mb"]), int(one["runtime"])) for one in resources)

    size = (remembering.folder / "text.jsonl").stat().st_size
    assert requested("count") == [requests.counting(3 * size, 4)]
    remembering("datasets/text")
    splits = read_json(remembering.results / "shards/text/metadata.json")["splits"]
    memory, train = splits["memory"]["tokens"], splits["train"]["tokens"]
    assert requested("count") == [requests.counting(memory + train, 4)]
    both = [requests.merging(memory, 4, 2), requests.merging(memory + train, 4, 2)]
    assert requested("memory") == both
