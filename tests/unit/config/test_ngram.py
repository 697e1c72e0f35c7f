"""Wrong settings of an n-gram index are refused with the path of the key and the remedy."""

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
        ({"orders": [1, 3, 2]}, "runs.demo.model.ngram.orders: must be ascending, without repetition"),
        (
            {"match_orders": [2, 2]},
            "demo.model.ngram.match_orders: must be ascending, without repetition",
        ),
        ({"orders": [*range(1, 18)]}, "runs.demo.model.ngram.orders: must have at most 16 orders (got 17)"),
        ({"orders": [1, 65]}, "runs.demo.model.ngram.orders[1]: must be at most 64 (got 65)"),
        ({"orders": [0, 1]}, "runs.demo.model.ngram.orders[0]: must be at least 1 (got 0)"),
        ({"orders": []}, "runs.demo.model.ngram.orders: "),
        ({"words": [2, 1]}, "runs.demo.model.ngram.words: must be ascending, without repetition"),
        ({"words": [9]}, "runs.demo.model.ngram.words[0]: must be at most 8 (got 9)"),
        ({"candidates": 65}, "runs.demo.model.ngram.candidates: must be at most 64 (got 65)"),
        ({"rare": 0}, "runs.demo.model.ngram.rare: must be positive (got 0)"),
        (
            {"match_order": [2]},
            'demo.model.ngram.match_order: unknown key; did you mean "match_orders"?',
        ),
    ],
)
def test_a_wrong_setting_of_an_index_is_named_by_its_key(ngram, message):
    with pytest.raises(ConfigError) as error:
        load_config(config(ngram))
    assert message in str(error.value)


def test_an_index_needs_documents_of_its_dataset():
    with pytest.raises(ConfigError) as error:
        load_config(config({}, share=0))
    assert (
        "runs.demo.model.ngram: datasets.docs.ngram is 0, so the n-gram index has no documents; set that to "
        "the share of documents to count, such as 0.8"
    ) in str(error.value)


def test_a_model_with_an_index_cannot_be_compressed():
    plain = config({})
    plain["runs"]["demo"]["compress"] = {}
    with pytest.raises(ConfigError, match=r"runs.demo.compress: the model needs its n-gram index"):
        load_config(plain)


def test_a_stage_on_another_dataset_than_that_of_the_index_is_refused():
    with pytest.raises(ConfigError) as error:
        load_config(config({}, stage={"data": "other"}))
    assert (
        "runs.demo.stages[0].data: its documents (other) may be in the n-gram index, which is of docs; train "
        "the stage on that dataset, or leave model.ngram out"
    ) in str(error.value)


def test_the_digest_of_an_index_depends_on_the_counted_contexts_only():
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
