"""What keeps a run from having the memory that it asks for, with the path of the key and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from spider.config import ConfigError, load_config
from spider.config.memory import MemoryConfig


def config(memory: Any, share: float = 0.5, stage: dict[str, Any] | None = None) -> dict[str, Any]:
    data = {"source": {"kind": "pydocs"}}
    return {
        "datasets": {"docs": data | {"memory": share}, "other": data},
        "runs": {
            "demo": {
                "data": "docs",
                "model": {"preset": "tiny", "memory": memory},
                "defaults": {"seq_len": 128, "micro_batch": 4, "lr": 1e-3},
                "stages": [{"name": "a", "max_steps": 2, **(stage or {})}],
            }
        },
    }


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"orders": [1, 3, 2]}, "runs.demo.model.memory.orders: must rise, each once (got [1, 3, 2])"),
        ({"pointers": [2, 2]}, "runs.demo.model.memory.pointers: must rise, each once (got [2, 2])"),
        ({"orders": [*range(1, 18)]}, "runs.demo.model.memory.orders: must be 16 orders at most (got 17)"),
        ({"orders": [1, 65]}, "runs.demo.model.memory.orders[1]: must be at most 64 (got 65)"),
        ({"orders": [0, 1]}, "runs.demo.model.memory.orders[0]: must be at least 1 (got 0)"),
        ({"orders": []}, "runs.demo.model.memory.orders: "),
        ({"words": [2, 1]}, "runs.demo.model.memory.words: must rise, each once (got [2, 1])"),
        ({"words": [9]}, "runs.demo.model.memory.words[0]: must be at most 8 (got 9)"),
        ({"candidates": 65}, "runs.demo.model.memory.candidates: must be at most 64 (got 65)"),
        ({"rare": 0}, "runs.demo.model.memory.rare: must be positive (got 0)"),
        ({"pointer": [2]}, 'runs.demo.model.memory.pointer: unknown key; did you mean "pointers"?'),
    ],
)
def test_what_no_memory_can_be_is_named_by_its_key(memory, message):
    with pytest.raises(ConfigError) as error:
        load_config(config(memory))
    assert message in str(error.value)


def test_a_dataset_must_keep_documents_for_it():
    with pytest.raises(ConfigError) as error:
        load_config(config({}, share=0))
    assert (
        "runs.demo.model.memory: datasets.docs.memory is 0, no document is kept for it; set that to the "
        "share of documents to count, such as 0.8"
    ) in str(error.value)


def test_a_model_with_one_is_not_pressed():
    plain = config({})
    plain["runs"]["demo"]["compress"] = {}
    with pytest.raises(ConfigError, match=r"runs.demo.compress: the model reads a memory"):
        load_config(plain)


def test_no_stage_trains_on_another_dataset():
    with pytest.raises(ConfigError) as error:
        load_config(config({}, stage={"data": "other"}))
    assert (
        "runs.demo.stages[0].data: its documents (other) may be in the memory, which is of docs; train the "
        "stage on that dataset, or leave model.memory out"
    ) in str(error.value)


def test_a_memory_is_known_by_what_is_counted_and_nothing_else():
    whole = load_config(config({})).runs["demo"].model.memory
    assert whole == MemoryConfig()
    of_head = {"pointers": [4], "candidates": 3, "hidden": 5, "state": 7}
    assert MemoryConfig.model_validate(of_head).counted == whole.counted
    others = [
        MemoryConfig.model_validate(change).counted
        for change in ({"orders": [1, 2]}, {"rare": 3}, {"words": [1]})
    ]
    assert len({whole.counted, *others}) == 4
    assert load_config(config(None, share=0)).runs["demo"].model.memory is None
