"""The key `take` of a source: which amounts are refused, and what it changes."""

from __future__ import annotations

from typing import Any

import pytest

from spider.config import Config, ConfigError, load_config
from spider.config.block import identity

HUB = {"kind": "hub", "repo": "x/y", "revision": "r", "files": ["a.parquet", "b.parquet"]}


def config(source: dict[str, Any]) -> Config:
    stages = [{"name": "a", "max_steps": 2, "seq_len": 256}]
    runs = {"r": {"data": "texts", "model": "tiny", "stages": stages, "evaluation": {"data": "held"}}}
    held = {"source": {"kind": "mock"}}
    return load_config({"datasets": {"texts": {"source": source}, "held": held}, "runs": runs})


@pytest.mark.parametrize(
    ("take", "problem"),
    [
        ("30", "must be a size or a share, such as 30 MB, 10 GB or 5% (got '30')"),
        (30_000_000, "must be a size or a share"),
        ("-5 MB", "must be above 0 (got '-5 MB')"),
        ("0%", "must be above 0"),
        ("0.1 B", "must be at least 1 B"),
        ("101%", "must be at most 100%"),
    ],
)
def test_what_is_no_amount_is_refused_by_its_key(take, problem):
    with pytest.raises(ConfigError) as error:
        config(HUB | {"take": take})
    assert str(error.value).startswith("datasets.texts.source.take: ") and problem in str(error.value)


def test_it_is_a_part_of_the_identity_and_changes_nothing_when_absent():
    plain, taken = (config(source).datasets["texts"] for source in (HUB, HUB | {"take": "5%"}))
    assert identity(plain.changed()) != identity(taken.changed())
    assert plain.changed()["source"] == HUB
    assert plain.source.identity("a.parquet", plain) == {
        "kind": "hub",
        "repo": "x/y",
        "revision": "r",
        "item": "a.parquet",
    }
    (item,) = taken.source.items()
    assert item == "row groups with 5% of the rows"
    decides = taken.source.identity(item, taken)
    assert decides["of"] == HUB["files"] and decides["columns"] == ["text", "id"]
