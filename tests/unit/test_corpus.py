"""The synthetic text that measures the removal of duplicates."""

import hashlib
from collections import Counter

import pyarrow.parquet as pq
import pytest

DOCUMENTS = 2000


@pytest.fixture
def corpus(gpu_benchmarks):
    import corpus

    return corpus


@pytest.fixture
def folder(corpus, tmp_path):
    corpus.write(tmp_path / "corpus", corpus.Corpus(DOCUMENTS), processes=2)
    return tmp_path / "corpus"


def texts(folder):
    tables = [pq.read_table(file) for file in sorted((folder / "parts").iterdir())]
    return [text for table in tables for text in table["text"].to_pylist()]


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*.*")}


def test_the_seed_decides_the_text_for_any_number_of_processes_and_parts(corpus, folder, tmp_path):
    corpus.write(tmp_path / "again", corpus.Corpus(DOCUMENTS), processes=1)
    assert digests(folder) == digests(tmp_path / "again")
    corpus.write(tmp_path / "seven", corpus.Corpus(DOCUMENTS, parts=7), processes=1)
    assert texts(tmp_path / "seven") == texts(folder)
    corpus.write(tmp_path / "other", corpus.Corpus(DOCUMENTS, seed=1), processes=1)
    assert not set(texts(tmp_path / "other")) & set(texts(folder))


def test_the_truth_holds_by_brute_force(corpus, folder):
    text = texts(folder)
    truth = pq.read_table(folder / "truth.parquet").to_pylist()
    plan = corpus.Corpus(DOCUMENTS)
    place = {row["id"]: i for i, row in enumerate(truth)}
    counts = Counter(row["kind"] for row in truth)
    assert counts["template"] == 400 and counts["exact"] + counts["edited"] == 600
    assert {row["source"] for row in truth} == set(range(10))
    for at, row in enumerate(truth):
        if row["original"] is None:
            continue
        original = place[row["original"]]
        assert original < at
        if truth[original]["kind"] in ("template", "code"):
            copied, first = plan.document(at).own, plan.document(original).own
        else:
            copied, first = text[at], text[original]
        after, before = corpus.grams(copied), corpus.grams(first)
        assert row["containment"] == len(after & before) / len(after)
        assert row["jaccard"] == len(after & before) / len(after | before)
        assert row["jaccard"] == 1 if row["kind"] == "exact" else 0.7 <= row["jaccard"] <= 0.98
