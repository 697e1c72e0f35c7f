"""Wrong settings of an n-gram index are refused with the path of the key and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from spider.config import ConfigError, load_config
from spider.config.model import LONGEST_ORDER, STRUCTURES, NgramConfig, kind_of, name_of


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
        ({"matches": [2, "2"]}, "demo.model.ngram.matches: must not repeat a kind"),
        ({"contexts": [*range(1, 26)]}, "demo.model.ngram.contexts: must have at most 24 kinds (got 25)"),
        ({"contexts": [1, 65]}, "demo.model.ngram.contexts[1]: 65 is not a kind of context; there are"),
    ],
)
def test_a_wrong_setting_of_an_index_is_named_by_its_key(ngram, message):
    with pytest.raises(ConfigError) as error:
        load_config(config(ngram))
    assert message in str(error.value)


def test_the_digest_of_an_index_depends_on_the_counted_contexts_only():
    whole = load_config(config({})).runs["demo"].model.ngram
    assert whole == NgramConfig()
    of_head = {"matches": [4], "counts": [1], "hidden": 5, "state": 7}
    assert NgramConfig.model_validate(of_head).counted == whole.counted
    others = [
        NgramConfig.model_validate(change).counted
        for change in ({"contexts": [1, 2]}, {"rare": 3}, {"contexts": [1, "words1"]})
    ]
    assert len({whole.counted, *others}) == 4
    assert load_config(config(None, share=0)).runs["demo"].model.ngram is None


def test_each_kind_of_context_has_its_own_number():
    orders = map(str, range(1, LONGEST_ORDER + 1))
    names = [*orders, *(f"words{n}" for n in range(9)), *STRUCTURES]
    kinds = list(map(kind_of, names))
    assert len(set(kinds)) == len(names) and list(map(name_of, kinds)) == names
