"""The synthetic text that measures the removal of duplicates."""

import hashlib
from collections import Counter

import numpy as np
import pyarrow as pa
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


def test_documents_that_are_no_copies_have_little_in_common(corpus, folder):
    plan = corpus.Corpus(DOCUMENTS)
    truth = pq.read_table(folder / "truth.parquet").to_pylist()
    distinct = [at for at, row in enumerate(truth) if row["original"] is None]
    owners: dict[tuple, set[int]] = {}
    for at in distinct:
        for gram in corpus.grams(plan.document(at).own):
            owners.setdefault(gram, set()).add(at)
    for at in distinct:
        grams = corpus.grams(plan.document(at).own)
        common = Counter(other for gram in grams for other in owners[gram] if other < at)
        assert max(common.values(), default=0) < 0.7 * len(grams), truth[at]


def test_half_or_more_of_a_page_is_its_template(corpus):
    plan = corpus.Corpus(DOCUMENTS)
    for number in range(400):
        page, _, _ = plan.distinct(number)
        sizes = [(len(list(filter(None, block.words))), block.own) for block in page]
        assert 2 * sum(size for size, own in sizes if not own) >= sum(size for size, _ in sizes)


def evidence(plan, pairs):
    """Return evidence from pairs of places."""
    removed, kept = np.array(pairs).T
    columns = {}
    for name, places in ("", removed), ("kept_", kept):
        parts = np.searchsorted(plan.starts, places, side="right") - 1
        columns[f"{name}part"] = [f"{part:03d}" for part in parts]
        columns[f"{name}row"] = pa.array(places - plan.starts[parts], pa.uint32())
    return pa.table(columns)


def test_removals_of_copies_are_right_and_those_of_pages_of_one_template_false(
    gpu_benchmarks, corpus, folder
):
    import data

    plan = corpus.Corpus(DOCUMENTS)
    truth = pq.read_table(folder / "truth.parquet")
    rows = truth.to_pylist()
    place = {row["id"]: at for at, row in enumerate(rows)}
    right = [(at, place[row["original"]]) for at, row in enumerate(rows) if row["original"]]
    table = data.Table()
    data.score(plan, truth, evidence(plan, right), table)
    assert table.figures["recall of copies with containment of 0.95"] == 1
    assert table.figures["false removals, of all removals"] == 0
    assert table.figures["left of each source"] == [1] * 10

    pages = [at for at, row in enumerate(rows) if row["kind"] == "template"]
    groups = plan.groups[plan.numbers[pages]]
    first = {group: page for page, group in reversed(list(zip(pages, groups, strict=True)))}
    wrong = [(page, first[group]) for page, group in zip(pages, groups, strict=True) if page != first[group]]
    copies = [pair for pair in right[::2] if pair[1] not in dict(wrong)]
    table = data.Table()
    data.score(plan, truth, evidence(plan, copies + wrong), table)
    assert 0.2 < table.figures["recall of copies with containment of 0.95"] < 0.6
    assert table.figures["false removals, of all removals"] == len(wrong) / (len(copies) + len(wrong))
    assert min(table.figures["left of each source"]) < 0.9
