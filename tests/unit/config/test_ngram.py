"""What keeps a run from having the n-gram index that it asks for, with the path of the key and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from spider.config import ConfigError, load_config
from spider.config.ngram import NgramConfig


def config(ngram: Any, share: float = 0.5, stage: dict[str, Any] | None = None) -> dict[str, Any]:
    data = {"source": {"kind": "pydocs"}}
    return {
        "datasets": {"docs": data | {"ngram": share}, "other": data},
        "runs": {
            "demo": {
                "data": "docs",
                "model": {"preset": "tiny", "ngram": ngram},
                "defaults": {"seq_len": 128, "micro_batch": 4, "lr": 1e-3},
                "stages": [{"name": "a", "max_steps": 2, **(stage or {})}],
            }
        },
    }


@pytest.mark.parametrize(
    ("ngram", "message"),
    [
        ({"orders": [1, 3, 2]}, "runs.demo.model.ngram.orders: must rise, each once (got [1, 3, 2])"),
        ({"match_orders": [2, 2]}, "runs.demo.model.ngram.match_orders: must rise, each once (got [2, 2])"),
        ({"orders": [*range(1, 18)]}, "runs.demo.model.ngram.orders: must be 16 orders at most (got 17)"),
        ({"orders": [1, 65]}, "runs.demo.model.ngram.orders[1]: must be at most 64 (got 65)"),
        ({"orders": [0, 1]}, "runs.demo.model.ngram.orders[0]: must be at least 1 (got 0)"),
        ({"orders": []}, "runs.demo.model.ngram.orders: "),
        ({"words": [2, 1]}, "runs.demo.model.ngram.words: must rise, each once (got [2, 1])"),
        ({"words": [9]}, "runs.demo.model.ngram.words[0]: must be at most 8 (got 9)"),
        ({"candidates": 65}, "runs.demo.model.ngram.candidates: must be at most 64 (got 65)"),
        ({"rare": 0}, "runs.demo.model.ngram.rare: must be positive (got 0)"),
        ({"match": [2]}, 'runs.demo.model.ngram.match: unknown key; did you mean "match_orders"?'),
    ],
)
def test_what_no_index_can_be_is_named_by_its_key(ngram, message):
    with pytest.raises(ConfigError) as error:
        load_config(config(ngram))
    assert message in str(error.value)


def test_a_dataset_must_keep_documents_for_it():
    with pytest.raises(ConfigError) as error:
        load_config(config({}, share=0))
    assert (
        "runs.demo.model.ngram: datasets.docs.ngram is 0, no document is kept for it; set that to the "
        "share of documents to count, such as 0.8"
    ) in str(error.value)


def test_a_model_with_one_is_not_pressed():
    plain = config({})
    plain["runs"]["demo"]["compress"] = {}
    with pytest.raises(ConfigError, match=r"runs.demo.compress: the model reads an n-gram index"):
        load_config(plain)


def test_no_stage_trains_on_another_dataset():
    with pytest.raises(ConfigError) as error:
        load_config(config({}, stage={"data": "other"}))
    assert (
        "runs.demo.stages[0].data: its documents (other) may be in the index, which is of docs; train the "
        "stage on that dataset, or leave model.ngram out"
    ) in str(error.value)


def test_an_index_is_known_by_what_is_counted_and_nothing_else():
    whole = load_config(config({})).runs["demo"].model.ngram
    assert whole == NgramConfig()
    of_head = {"match_orders": [4], "candidates": 3, "hidden": 5, "state": 7}
    assert NgramConfig.model_validate(of_head).counted == whole.counted
    others = [
        NgramConfig.model_validate(change).counted
        for change in ({"orders": [1, 2]}, {"rare": 3}, {"words": [1]})
    ]
    assert len({whole.counted, *others}) == 4
    assert load_config(config(None, share=0)).runs["demo"].model.ngram is None
