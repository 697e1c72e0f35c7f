"""Held-out text in the training text is found, and clean datasets of all kinds give no alarm."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from spider_trust.copies import by_chance
from spider_trust.splits import check

from spider.evaluation.result import Result
from tests.unit.verify.small_claims import (
    World,
    documents,
    edited,
    found_by,
    held_out,
    is_held_out,
    learned,
    passes_by,
    rows,
)

found, passes = partial(found_by, check), partial(passes_by, check)


# ------------------------------------------------------------------------------------------ clean datasets


def test_a_mixture_with_templates_and_licences_gives_no_alarm(tmp_path):
    """Copies that a hash put on both sides are normal."""
    pages = [(f"page-{n}", f"Station {n}. " + documents()[n % 7]) for n in range(150)]
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


# ------------------------------------------------------------------------------------------------- frauds


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda text: edited(text, 0.05), "near copies in the training text, with about "),
        (lambda text: re.sub(r"[.,:;()']", "  ", text.upper()), "in another normalization of the text"),
    ],
)
def test_changed_copies(tmp_path, change, phrase):
    world = World(tmp_path).make([*rows(), *learned(change)])
    for quick in (True, False):
        status, reason, details = found(world, quick)
        assert status == "failed" and phrase in reason, reason
        assert "text/train/00" in details[0] and "of its raw file" in details[0]


def test_a_wrong_overlap(tmp_path):
    world = World(tmp_path).make()
    metrics = {"overlap/share": 0.9, "overlap/searched": 1.0}
    world.evaluate(results={"overlap": Result(title="Overlap", metrics=metrics)})
    assert "records an overlap of 90.0% with the training text, but it is" in found(world)[1]


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

    task = {"evaluation": {"max_bytes": 60_000, "tasks": {"own": {"file": str(file)}}}}
    world = World(tmp_path, **task).make()
    write(asked)
    passes(world)
    write([{**one, "query": f"{one['query']} {one['choices'][0]} Which?"} for one in asked])
    assert most_of(r"questions of the task own hold the text of the right answer", found(world)[1])
    train = [text for id, text in rows() if not is_held_out((id, text))]
    write([{"query": text[:150], "choices": [text[150:300], "no"], "gold": 0} for text in train[:50]])
    assert most_of(r"questions stand with their answers in the training text", found(world)[1])


def test_the_difference_that_chance_gives():
    assert by_chance(0, 100, 0, 1000) and by_chance(5, 122, 26, 1000) and by_chance(100, 100, 1000, 1000)
    assert not by_chance(80, 100, 0, 100) and not by_chance(6, 100, 0, 1000)
