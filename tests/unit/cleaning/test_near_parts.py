"""Near duplicates by the commands: over parts and datasets, with templates."""

import json
import random

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from spider.cli import cli
from spider.data.cleaning import evidence, near
from spider.data.cleaning.drop import drop


def prose(seed, count):
    """Return made-up words."""
    one = random.Random(seed)
    return ["".join(one.choices("abcdefghijkl", k=one.randint(2, 7))) for _ in range(count)]


def edited(found, place):
    return [*found[:place], "changed", *found[place + 1 :]]


def written(found, width=8):
    return "\n".join(" ".join(found[i : i + width]) for i in range(0, len(found), width))


class Corpus:
    """Datasets of texts by part, and the commands on them."""

    def __init__(self, folder):
        self.folder = folder
        self.results = folder / "results"
        self.config = {"results": str(self.results), "datasets": {}}
        self.config["runs"] = {
            "r": {"data": "mine", "model": "tiny", "stages": [{"name": "main", "max_steps": 1}]}
        }

    def add(self, name, parts, **cleaning):
        files = []
        for number, texts in enumerate(parts):
            files.append(str(self.folder / f"{name}-{number}.jsonl"))
            rows = [json.dumps({"id": f"{name}-{number}-{i}", "text": text}) for i, text in enumerate(texts)]
            (self.folder / f"{name}-{number}.jsonl").write_text("\n".join(rows))
        source = {"kind": "local", "files": files}
        self.config["datasets"][name] = {"source": source, "validation": 0.5, "cleaning": cleaning or None}

    def __call__(self, *words):
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.config))
        cli(["--config", str(path), "data", *map(str, words)], standalone_mode=False)

    def clean(self, name):
        """Make all files of the cleaning of a dataset, and return its evidence."""
        parts = [f"{i:03d}" for i in range(len(self.config["datasets"][name]["source"]["files"]))]
        for part in parts:
            self("download", name, part, "--output", self.results / f"raw/{name}/{part}.parquet")
            self("signatures", name, part)
        for part in parts if self.config["datasets"][name]["cleaning"] else ():
            self("candidates", name, part)
            self("verify-pairs", name, part)
            self("drop", name, part)
        files = sorted((self.results / f"cleaning/{name}/removed").glob("*.parquet"))
        return [row for file in files for row in evidence.read(file).to_pylist()]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    return Corpus(tmp_path)


def pairs(rows):
    return {row["id"]: (row["reason"], row["kept_id"]) for row in rows}


def test_copies_in_all_parts_and_datasets_repeat_the_first_one_that_is_kept(corpus, monkeypatch, capsys):
    first, second, third = (prose(seed, 60) for seed in range(3))
    near_first, near_second = edited(first, 0), edited(second, 59)
    corpus.add("other", [[written(first), written(prose(9, 60))]])
    longer = prose(7, 20) + edited(second, 30) + prose(8, 30)
    again = written(near_first, width=5)
    corpus.add(
        "mine",
        [
            [written(near_first), written(second), again],
            [written(third), written(longer), written(near_second)],
            [again],
        ],
        exact=True,
        against=["other"],
        near=0.8,
    )
    corpus.clean("other")
    rows = corpus.clean("mine")
    assert pairs(rows) == {
        "mine-0-0": ("near", "other-0-0"),
        "mine-0-2": ("near", "other-0-0"),  # as its exact duplicate, which was removed
        "mine-1-2": ("near", "mine-0-1"),
        "mine-2-0": ("near", "other-0-0"),
    }
    assert {row["rule"] for row in rows} == {"near/1"}
    assert [row["containment"] for row in rows] == pytest.approx([55 / 56, 55 / 56, 55 / 56, 55 / 56])

    before = {file: file.read_bytes() for file in sorted(corpus.results.glob("cleaning/**/*.parquet"))}
    monkeypatch.setattr(near, "BLOCK", 1)
    corpus.clean("mine")
    assert {file: file.read_bytes() for file in before} == before
    capsys.readouterr()
    corpus("removed", "mine", "mine-1-2")
    assert "near, 98%, repeats mine-0-1 of mine" in capsys.readouterr().out


def test_pages_of_a_template_are_kept_in_all_parts_and_their_copies_are_not(corpus):
    menu = prose(100, 120)
    pages = [prose(seed, 24) for seed in range(30)]
    parts = [[written(menu + page) for page in pages[:25]], [written(menu + page) for page in pages[25:]]]
    parts[1].append(written(menu + edited(pages[3], 0)))
    corpus.add("mine", parts, near=0.8)
    assert pairs(corpus.clean("mine")) == {"mine-1-5": ("near", "mine-0-3")}
    # Half of a page's 5-grams are those of the template, so pages that are compared whole would be removed.
    assert len(pq.read_table(corpus.results / "cleaning/mine/candidates/001.parquet")) > 6


def test_signatures_of_a_dataset_without_near_duplicates_have_no_bands(corpus):
    corpus.add("mine", [["a", "a"]], exact=True)
    corpus("download", "mine", "000", "--output", corpus.results / "raw/mine/000.parquet")
    corpus("signatures", "mine", "000")
    path = corpus.results / "cleaning/mine/signatures/000.parquet"
    assert pq.read_schema(path).names == ["row", "id", "bytes", "hash", "hash2"]
    with pytest.raises(ValueError, match=r"cleaning\.near: is null, so there are no pairs to verify"):
        corpus("verify-pairs", "mine", "000")


def test_parts_without_documents_or_without_pairs_have_empty_evidence(corpus):
    corpus.add("mine", [["", ""], ["short"], [written(prose(1, 60))]], near=0.8)
    assert corpus.clean("mine") == []


def test_the_best_pair_with_a_document_that_is_kept_is_the_evidence():
    columns = {"row": [1, 2, 2, 3], "kept_row": [0, 1, 0, 1]}
    arrays = {name: evidence.pa.array(values, evidence.pa.uint32()) for name, values in columns.items()}
    shares = np.array([0.9, 0.95, 0.85, 0.9])
    same = {"part": "000", "kept_dataset": "d", "kept_part": "000", "removed": True, "reason": "near"}
    found = evidence.table({**arrays, **same, "containment": shares}, 4)
    chosen = drop("d", "000", found, lambda *part: evidence.SCHEMA.empty_table())
    assert chosen.select(["row", "kept_row", "containment"]).to_pylist() == [
        {"row": 1, "kept_row": 0, "containment": 0.9},
        {"row": 2, "kept_row": 0, "containment": 0.85},
    ]
