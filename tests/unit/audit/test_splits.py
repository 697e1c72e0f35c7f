"""Held-out text in the training text is found, and clean datasets of all kinds give no alarm."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from spider.audit.copies import by_chance
from spider.audit.splits import check
from spider.cleaning.evidence import table, write_removed
from spider.evaluation.result import Result
from spider.ngram.store import open_index
from tests.unit.audit.small_claims import (
    World,
    conversation,
    documents,
    edited,
    held_out,
    is_held_out,
    learned,
    named,
    rows,
)


def found(world, quick=False):
    finding = check(world.claim, quick)
    return finding.status, finding.reason, finding.details


def passes(world):
    for quick in (True, False):
        status, reason, details = found(world, quick)
        assert (status, details) == ("passed", []), reason
    return reason


# ------------------------------------------------------------------------------------------ clean datasets


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ngram": 0.3},
        {"max_document_bytes": 300},
        {"cleaning": {"filters": ["bytes >= 400"]}},
        {"split_by": {"column": "package", "pattern": "[^/]+", "salt": 3}},
        {"tokenizer": "bpe"},
        {"format": "chat"},
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


def test_a_mixture_with_templates_and_licences_gives_no_alarm(tmp_path):
    """Copies that a hash put on both sides are normal."""
    pages = [(f"page-{n}", f"Station {n}. " + documents()[n % 7]) for n in range(300)]
    world = World(
        tmp_path,
        {"text": {}, "pages": {}},
        data={"mix": {"text": 1, "pages": 1}},
        evaluation={"max_bytes": 60_000, "data": "pages"},
    )
    world.raw(rows())
    world.raw(pages, "pages")
    world.encode()
    world.encode("pages")
    world.evaluate()
    assert "have a copy in the training text, no more than training documents have" in passes(world)


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


def test_without_raw_files_the_rest_is_checked(tmp_path):
    world = World(tmp_path).make()
    shutil.rmtree(tmp_path / "results/raw")
    assert "the rule could not be computed again for 2 parts, whose raw text is not here" in passes(world)
    world.make([*rows(), *learned()])
    shutil.rmtree(tmp_path / "results/raw")
    status, reason, _ = found(world)
    assert status == "failed" and "100% of the" in reason


# ------------------------------------------------------------------------------------------------- frauds


@pytest.mark.parametrize("tokenizer", [None, "bpe"])
@pytest.mark.parametrize("in_raw", [True, False])
def test_held_out_documents_that_were_trained_on(tmp_path, in_raw, tokenizer):
    world = World(tmp_path, {"text": {"tokenizer": tokenizer} if tokenizer else {}})
    count = round(0.8 * len(held_out()))
    world.make([*rows(), *learned(count=count)])
    if not in_raw:
        world.raw(rows())
    status, reason, details = found(world)
    assert status == "failed"
    assert f"held-out documents are in the training text ({count}" in reason
    assert details


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (
            lambda text: edited(text, 0.05),
            "near copies in the training text, with about ",
        ),
        (lambda text: text.upper(), "in another normalization of the text"),
        (lambda text: re.sub(r"[.,:;()']", "  ", text), "in another normalization of the text"),
    ],
)
def test_changed_copies(tmp_path, change, phrase):
    world = World(tmp_path).make([*rows(), *learned(change)])
    for quick in (True, False):
        status, reason, details = found(world, quick)
        assert status == "failed" and phrase in reason, reason
        assert "text/train/00" in details[0] and "of its raw file" in details[0]


def test_a_split_made_a_chunk_at_a_time(tmp_path):
    """The first fifth of each part was held out, or each document was cut before the split."""
    world = World(tmp_path).make()
    half = len(rows()) // 2
    chunked = [named(text, n % half < half // 5, id) for n, (id, text) in enumerate(rows())]
    world.make(chunked)
    world.raw(rows())
    reason = found(world)[1]
    assert (
        "as if it were made a chunk at a time" in reason
        and "held-out documents are in the training text" in reason
    )
    pieces = [(f"{id}/{at}", text[at : at + 400]) for id, text in rows() for at in range(0, len(text), 400)]
    world.make(pieces)
    world.raw(rows())
    assert "pieces of raw documents, as of a split made a chunk at a time" in found(world)[1]


def test_an_oversampled_source(tmp_path):
    world = World(tmp_path).make([*rows(), *(rows()[:60] * 2)])
    world.raw(rows())
    assert "stand more often in a split than in the raw text, as of an oversampled source" in found(world)[1]


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (str.upper, "have the words of the raw text in another normalization"),
        (lambda text: text[::-1], "have a text that their raw file does not have, as of a stale shard"),
    ],
)
def test_shards_of_another_text(tmp_path, change, phrase):
    world = World(tmp_path).make([(id, change(text)) for id, text in rows()])
    world.raw(rows())
    status, reason, details = found(world)
    assert status == "failed" and f"{len(rows())} documents {phrase}" in reason
    assert re.match(r"text, part 000, row \d+, id 'doc-\d+': document 0 of train, ", details[0])


def test_a_part_that_the_source_does_not_have(tmp_path):
    world = World(tmp_path).make()
    world.written["datasets"]["text"]["source"]["files"].pop()
    assert "has shards of parts that its source does not have: 001" in found(world)[1]


def test_a_cropped_held_out_text(tmp_path):
    world = World(tmp_path).make()
    whole = world.claim.evaluation.bytes
    world.evaluate(bytes=30_000, targets={"byte": 30_000, "eos": 10, "bos": 10})
    assert f"30,000 of {whole:,} held-out bytes were scored, as of a cropped held-out text" in found(world)[1]
    world.evaluate(text_sha256="b" * 64)
    assert "not the one that the settings give" in found(world)[1]


def test_a_wrong_overlap(tmp_path):
    world = World(tmp_path).make()
    metrics = {"overlap/share": 0.9, "overlap/searched": 1.0}
    world.evaluate(results={"overlap": Result(title="Overlap", metrics=metrics)})
    assert "records an overlap of 90.0% with the training text, but it is" in found(world)[1]


def test_held_out_text_in_the_ngram_index(tmp_path):
    ngram = {"contexts": [1, 2], "matches": [2], "counts": [1], "candidates": 2, "hidden": 8, "state": 12}
    model = {"preset": "tiny", "ngram": ngram}
    world = World(tmp_path, {"text": {"ngram": 0.3}}, model=model).make()
    index = world.index()
    passes(world)
    counted = np.load(index / "split/text.npy")
    more = np.concatenate(
        [counted, np.frombuffer("".join(text for _, text in held_out()).encode(), np.uint8)]
    )
    assert open_index(index / "split").description.bytes == len(counted)
    np.save(index / "split/text.npy", more)
    record = json.loads((index / "split/index.json").read_text())
    record["files"]["text.npy"]["size"] = (index / "split/text.npy").stat().st_size
    (index / "split/index.json").write_text(json.dumps(record))
    reason = found(world)[1]
    assert "n-gram index counts another text than the splits ngram, with 100% of the" in reason


def most_of(what, reason):
    """Return whether a reason counts at least nine of ten; the texts differ between versions of Python."""
    counted = re.search(rf"(\d+) of (\d+) {what}", reason)
    return counted and int(counted[1]) >= 0.9 * int(counted[2])


def test_questions_that_were_learned_or_that_hold_their_answers(tmp_path):
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for _, text in held_out()]
    asked = [{"query": a, "choices": [b, halves[n - 1][1]], "gold": 0} for n, (a, b) in enumerate(halves)]
    file = tmp_path / "questions.jsonl"

    def write(questions):
        file.write_text("".join(json.dumps(one) + "\n" for one in questions))

    task = {"evaluation": {"max_bytes": 60_000, "tasks": {"own": {"kind": "jsonl", "file": str(file)}}}}
    world = World(tmp_path, **task).make()
    write(asked)
    passes(world)
    write([{**one, "query": f"{one['query']} {one['choices'][0]} Which?"} for one in asked])
    assert most_of(r"questions of the task own hold the text of the right answer", found(world)[1])
    train = [text for id, text in rows() if not is_held_out((id, text))]
    write([{"query": text[:150], "choices": [text[150:300], "no"], "gold": 0} for text in train[:50]])
    assert most_of(r"questions stand with their answers in the training text", found(world)[1])


def test_what_cannot_be_searched_is_skipped(tmp_path):
    world = World(tmp_path)
    assert found(world) == ("skipped", "text has no shards here.", [])


def test_the_difference_that_chance_gives():
    assert by_chance(0, 100, 0, 1000) and by_chance(5, 122, 26, 1000) and by_chance(100, 100, 1000, 1000)
    assert not by_chance(80, 100, 0, 100) and not by_chance(6, 100, 0, 1000)
