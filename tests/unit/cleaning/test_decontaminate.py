"""Documents that share a sequence of words with a protected text are found, and no others."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from spider.config import Dataset
from spider.data.cleaning.decontaminate import (
    SCHEMA,
    Protected,
    find_contaminated,
    write_held_out,
    write_protected,
)


def protected(*texts, held_out=True, length=13, shortest=8, common=10):
    names = [f"p{number}" for number in range(len(texts))]
    rows = [["d"] * len(texts), names, list(texts), [held_out] * len(texts)]
    return Protected(pa.table(rows, schema=SCHEMA), length, shortest, common)


def searched(known, texts, batch=2):
    for at in range(0, len(texts), batch):
        known.search(pa.array(texts[at : at + batch], pa.large_string()))
    return list(known.matches())


def numbered(first, count, word="w"):
    return " ".join(f"{word}{number}" for number in range(first, first + count))


HELD_OUT = numbered(0, 100)


def test_a_match_is_13_words_whatever_the_case_and_the_punctuation():
    texts = [
        f"before it {numbered(30, 13)} after it",
        f"before it {numbered(30, 12)} after it",
        numbered(10, 20).upper().replace(" ", ",\n ("),
        numbered(0, 13, "other"),
    ]
    first, second = searched(protected("nothing of this", HELD_OUT), texts)
    assert (first.document, first.source, first.text_document) == (0, "d", "p1")
    assert (first.words, first.sequences, first.share) == (numbered(30, 13), 1, 1 / 88)
    assert (second.document, second.words, second.sequences) == (2, numbered(10, 20), 8)


def test_a_match_does_not_reach_over_two_documents():
    halves = [numbered(0, 7), numbered(7, 7) + " and"]
    assert not searched(protected(numbered(0, 14)), halves)
    # The documents of a batch lie beside each other in memory, so words at their border are not one word.
    assert not searched(protected(f"{numbered(0, 12)} endbegin"), [f"{numbered(0, 12)} end", "begin"])
    assert searched(protected(f"{numbered(0, 12)} end"), [f"{numbered(0, 12)} end", "begin"])


def test_a_short_text_counts_as_a_whole_and_a_shorter_one_does_not():
    whole, short = "What is the capital of the old country?", "What is the capital of it?"
    known = protected(whole, short, held_out=False)
    (match,) = searched(known, [f"Quiz. {whole.lower()} Paris", whole[:-9], f"Quiz. {short}"])
    assert (match.document, match.share, match.words) == (0, 1.0, whole[:-1])


def test_what_many_documents_hold_counts_only_in_questions_and_files():
    license = numbered(0, 20, "license")
    texts = [f"{license} {numbered(1000 + 10 * i, 5)}" for i in range(11)]
    known = protected(f"{license} {HELD_OUT}")
    assert not searched(known, [*texts, texts[0]])
    assert known.common() == 8
    (match,) = searched(protected(f"{license} {HELD_OUT}"), [*texts, f"{license} {numbered(50, 13)}"])
    assert (match.document, match.words) == (11, numbered(50, 13))
    assert len(searched(protected(license), texts[:10])) == 10
    assert len(searched(protected(license, held_out=False), texts)) == 11
    assert len(searched(protected(license, common=None), texts)) == 11


WORDS = st.lists(st.sampled_from(["a", "b", "É", "ça", "c2"]), max_size=24)


@settings(max_examples=60)
@given(st.lists(WORDS, max_size=4), st.lists(WORDS, max_size=6), st.sampled_from([" ", "\n", "., "]))
def test_the_documents_found_are_those_of_plain_python(texts, searching, separator):
    known = protected(*map(" ".join, texts), length=6, shortest=3, common=None)
    found = [match.document for match in searched(known, [separator.join(one) for one in searching])]
    wanted = {
        tuple(text[i : i + size])
        for text in texts
        for size in [min(len(text), 6)]
        for i in range(len(text) - size + 1)
        if size >= 3
    }
    held = [
        {tuple(one[i : i + size]) for size in range(3, 7) for i in range(len(one) - size + 1)}
        for one in searching
    ]
    assert found == [number for number, one in enumerate(held) if one & wanted]


def test_conversations_are_compared_without_their_form_and_documents_without_an_id_have_a_place(tmp_path):
    def conversation(text):
        turns = [("user", text.replace(" ", "\n")), ("assistant", "Yes.")]
        return json.dumps([{"role": role, "content": content} for role, content in turns])

    texts = [conversation(numbered(100 * i, 30)) for i in range(40)]
    dataset = Dataset(source={"kind": "mock"}, format="chat", validation=0.2)
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "raw/000.parquet")
    count = write_held_out(tmp_path / "raw/000.parquet", tmp_path / "000.parquet", "talk", dataset)
    held_out = pq.read_table(tmp_path / "000.parquet").to_pylist()
    assert 0 < len(held_out) == count < 40
    row = int(held_out[0]["document"].removeprefix("000/"))
    copies = conversation(f"{numbered(100 * row, 30)} and more")
    pq.write_table(pa.table({"text": [*texts, copies]}), tmp_path / "raw/001.parquet")
    write_protected(tmp_path / "protected.parquet", [], [tmp_path / "000.parquet"], 8)
    found, common = find_contaminated(
        tmp_path / "raw/001.parquet", "001", dataset, tmp_path / "protected.parquet"
    )
    assert common == 0 and len(found) == 1
    (evidence,) = found.select(["row", "id", "kept_id", "matches"]).to_pylist()
    assert evidence == {"row": 40, "id": None, "kept_id": f"000/{row}", "matches": 18}
