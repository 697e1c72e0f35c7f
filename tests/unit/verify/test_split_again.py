"""Documents in another split than the rule gives are found, and clean datasets of all kinds give no alarm."""

from __future__ import annotations

import re
import shutil
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest

from spider.data.cleaning.evidence import table, write_removed
from spider.verify.splits import check
from tests.unit.verify.small_claims import (
    World,
    conversation,
    found_by,
    held_out,
    learned,
    passes_by,
    rows,
)

found, passes = partial(found_by, check), partial(passes_by, check)


@pytest.mark.parametrize(
    "settings",
    [
        {"ngram": 0.3, "max_document_bytes": 300},
        {"cleaning": {"filters": ["bytes >= 400"]}},
        {"split_by": {"column": "package", "pattern": "[^/]+", "salt": 3}},
        {"format": "chat", "tokenizer": "bpe"},
    ],
    ids=lambda one: ", ".join(one) or "plain",
)
def test_a_clean_dataset_gives_no_alarm(tmp_path, settings):
    world = World(tmp_path, {"text": settings})
    packages = [f"package{number // 20}/module.py" for number in range(len(rows()))]
    chat = settings.get("format") == "chat"
    found = [(id, conversation(text) if chat else text) for id, text in rows()]
    reason = passes(world.make(found, **({"package": packages} if "split_by" in settings else {})))
    assert "Each document of 2 parts is in the split that the rule gives" in reason


def test_documents_that_cleaning_removed_are_not_missed(tmp_path):
    world = World(tmp_path, {"text": {"cleaning": {"exact": True}}})
    world.raw(rows())
    for part in ("000", "001"):
        raw = world.claim.results.raw("text", part)
        removed = {"row": np.array([1, 4], np.uint32), "removed": True, "reason": "exact"}
        write_removed(world.claim.results.cleaning("text", "removed", part), part, table(removed, 2))
    world.encode()
    world.evaluate()
    passes(world)
    held = pq.read_table(raw)["id"][1].as_py()
    write_removed(world.claim.results.cleaning("text", "removed", part), part, table(removed, 2).slice(1))
    assert f"row 1, id {held!r}: not in the" in found(world)[2][0]


def test_without_raw_files_nothing_is_said_of_the_rule(tmp_path):
    world = World(tmp_path)
    assert found(world) == ("skipped", "text has no shards here.", [])
    world.make()
    shutil.rmtree(tmp_path / "results/raw")
    assert "the rule could not be computed again for 2 parts, whose raw text is not here" in passes(world)


def test_held_out_documents_that_were_trained_on(tmp_path):
    world = World(tmp_path, {"text": {"tokenizer": "bpe"}})
    count = round(0.8 * len(held_out()))
    world.make([*rows(), *learned(count=count)])
    world.raw(rows())
    for quick in (True, False):
        status, reason, details = found(world, quick)
        assert status == "failed" and "held-out documents are in the training text" in reason
        assert re.match(r"text, part 00\d, row \d+, id 'doc-\d+': validation by the rule, ", details[0])
    assert f"({count})" in reason


def test_oversampled_stale_and_unknown_shards(tmp_path):
    world = World(tmp_path).make([*rows(), *(rows()[:60] * 2)])
    world.raw(rows())
    assert "stand more often in a split than in the raw text, as of an oversampled source" in found(world)[1]
    world.make([(id, text[::-1]) for id, text in rows()])
    world.raw(rows())
    status, reason, details = found(world)
    phrase = "have a text that their raw file does not have, as of a stale shard"
    assert status == "failed" and f"{len(rows())} documents {phrase}" in reason
    assert re.match(r"text, part 000, document 0 of train, row \d+", details[0])
    world.make()
    world.written["datasets"]["text"]["source"]["files"].pop()
    assert "has shards of parts that its source does not have: 001" in found(world)[1]
