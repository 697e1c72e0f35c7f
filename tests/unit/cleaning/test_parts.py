"""Duplicates by the commands, over parts and datasets: the first by order is kept, with evidence."""

import json
import random

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from spider.cli import cli
from spider.common.files import read_json
from spider.data.cleaning import evidence, pairs
from spider.data.cleaning.evidence import drop

RUN = {"data": "first", "model": "tiny", "stages": [{"name": "main", "max_steps": 1}]}


class Corpus:
    """Datasets of jsonl files, and the commands on them."""

    jobs = 1

    def __init__(self, folder):
        self.folder = folder
        self.results = folder / "results"
        self.config = {"results": str(self.results), "datasets": {}, "runs": {"r": RUN}}
        self.add("first", [["a", "b"]])

    def add(self, name, parts, **cleaning):
        files = []
        for number, texts in enumerate(parts):
            files.append(self.folder / f"{name}-{number}.jsonl")
            rows = [json.dumps({"id": f"{name}-{number}-{i}", "text": text}) for i, text in enumerate(texts)]
            files[-1].write_text("\n".join(rows))
        source = {"kind": "local", "files": list(map(str, files))}
        self.config["datasets"][name] = {"source": source, "validation": 0.5, "cleaning": cleaning or None}

    def __call__(self, *words):
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.config))
        cli(["--config", str(path), "data", *map(str, words)], standalone_mode=False)

    def raw(self, name, part):
        return self.results / f"raw/{name}/{part}.parquet"

    def clean(self, *names):
        """Make all files of the cleaning of datasets, and return the evidence of the last."""
        for name in names:
            parts = [f"{i:03d}" for i in range(len(self.config["datasets"][name]["source"]["files"]))]
            for part in parts:
                self("download", name, part, "--output", self.raw(name, part))
                self("signatures", name, part)
            if self.config["datasets"][name]["cleaning"]:
                folders = [self.results / f"buckets/{bucket}" for bucket in range(self.jobs)]
                for bucket, folder in enumerate(folders):
                    share = ("--share", bucket, self.jobs)
                    self("buckets", name, parts[0], parts[-1], *share, "--output", folder)
                for part in parts:
                    self("pairs", name, part, *folders)
                self("drop", name, parts[0], parts[-1])
        files = [self.results / f"cleaning/{names[-1]}/removed/{part}.parquet" for part in parts]
        return [row for file in files for row in evidence.read(file).to_pylist()]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    return Corpus(tmp_path)


def named(rows):
    return {row["id"]: (row["reason"], row["kept_id"]) for row in rows}


def test_white_space_and_composition_do_not_matter_and_all_else_does(corpus):
    texts = ["x = 1\n\ty  = 2 ", "x = 1 y = 2", "X = 1 y = 2", "x = 1 y = 2.", "caf\u00e9", "cafe\u0301"]
    corpus.add("one", [[*texts, "x=1 y=2"]], exact=True)
    first, second = corpus.clean("one")
    assert second["row"] == 5 and first == {
        **{"part": "000", "row": 1, "id": "one-0-1", "bytes": 11, "reason": "exact"},
        **{"kept_dataset": "one", "kept_part": "000", "kept_row": 0, "kept_id": "one-0-0"},
        **{"containment": 1.0, "words": None, "matches": None, "rule": "exact/1"},
    }
    signatures = pq.read_schema(corpus.results / "cleaning/one/signatures/000.parquet")
    assert signatures.names == ["row", "id", "bytes", "hash", "hash2"]


def test_the_first_by_order_is_kept_over_parts_and_datasets(corpus):
    corpus.add("other", [["c", "c"], ["d", "a"]], exact=True, against=["first"])
    corpus.add("mine", [["e", "d", "a"], ["e", "f", "f", "a"]], exact=True, against=["other"])
    # `a` is removed from `other` for the sake of `first`, so the first one of `mine` is kept.
    assert named(corpus.clean("first", "other", "mine")) == {
        "mine-0-1": ("exact", "other-1-0"),
        "mine-1-0": ("exact", "mine-0-0"),
        "mine-1-2": ("exact", "mine-1-1"),
        "mine-1-3": ("exact", "mine-0-2"),
    }


def test_encoding_leaves_out_what_was_removed_and_the_dataset_says_so(corpus, capsys):
    corpus.add("one", [["a", "b", "a"], ["b", "c", ""]], exact=True, filters=["text != c"])
    corpus.config["datasets"]["tokens"] = {"like": "one"}
    corpus.clean("one")
    shards = corpus.results / "shards/tokens"
    for part in ("000", "001"):
        corpus("encode", "tokens", part, corpus.raw("one", part))
    corpus("index", "tokens", "--output", shards / "metadata.json")
    described = read_json(shards / "metadata.json")
    assert described["left_out"] == {"text != c": 1, "exact": 2}
    assert sum(split["documents"] for split in described["splits"].values()) == 2
    rows = [np.fromfile(path, "<u4").tolist() for path in sorted(shards.rglob("000.rows"))]
    assert sorted(rows[0] + rows[1]) == [0, 1]
    corpus("inspect", shards)
    assert "left_out:\n  text != c: 1\n  exact: 2\n" in capsys.readouterr().out


def test_evidence_that_was_edited_is_refused(corpus):
    corpus.add("one", [["a", "a"]], exact=True)
    corpus.clean("one")
    path = corpus.results / "cleaning/one/removed/000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(ValueError, match=r"removed/000\.parquet: was changed since it was written"):
        corpus("encode", "one", "000", corpus.raw("one", "000"))
    path.unlink()
    with pytest.raises(ValueError, match=r"removed/000\.parquet: is missing"):
        corpus("encode", "one", "000", corpus.raw("one", "000"))


def test_removed_documents_are_listed_and_shown_with_what_they_repeat(corpus, capsys):
    corpus.add("one", [["a text\nof two lines", "b"], ["a  text of two lines"]], exact=True)
    corpus.clean("one")
    capsys.readouterr()
    corpus("removed", "one")
    listed = capsys.readouterr().out.splitlines()
    assert listed == ["exact: 1 removed", "one-1-0 (001/0): exact, 100%, repeats one-0-0 of one"]
    for name in ("one-1-0", "001/0"):
        corpus("removed", "one", name)
        removed, _, repeated = capsys.readouterr().out.partition("\n\nwhat it repeats:\n")
        assert removed.endswith("\n\nremoved:\na  text of two lines") and repeated == "a text\nof two lines\n"
    with pytest.raises(ValueError, match="no document 'one-0-1' was removed; `spider data removed one`"):
        corpus("removed", "one", "one-0-1")
    corpus.raw("one", "000").unlink()
    with pytest.raises(ValueError, match=r"raw/one/000\.parquet: no such file; download it first"):
        corpus("removed", "one", "one-1-0")
    with pytest.raises(ValueError, match=r"datasets\.first\.cleaning: compares no documents"):
        corpus("removed", "first")


# ------------------------------------------------------------------------------------- near duplicates


def prose(seed, count):
    """Return made-up words."""
    one = random.Random(seed)
    return ["".join(one.choices("abcdefghijkl", k=one.randint(2, 7))) for _ in range(count)]


def edited(found, place):
    return [*found[:place], "changed", *found[place + 1 :]]


def written(found, width=8):
    return "\n".join(" ".join(found[i : i + width]) for i in range(0, len(found), width))


def test_copies_in_all_parts_and_datasets_repeat_the_first_one_that_is_kept(corpus, monkeypatch, capsys):
    first, second, third = (prose(seed, 60) for seed in range(3))
    near_first, near_second = edited(first, 0), edited(second, 59)
    longer = prose(7, 20) + edited(second, 30) + prose(8, 30)
    again = written(near_first, width=5)
    corpus.add("other", [[written(first), written(prose(9, 60))]])
    parts = [
        [written(near_first), written(second), again],
        [written(third), written(longer), written(near_second)],
        [again],
    ]
    corpus.add("mine", parts, exact=True, against=["other"], near=0.8)
    rows = corpus.clean("other", "mine")
    assert named(rows) == {
        "mine-0-0": ("near", "other-0-0"),
        "mine-0-2": ("near", "other-0-0"),  # as its exact duplicate, which was removed
        "mine-1-2": ("near", "mine-0-1"),
        "mine-2-0": ("near", "other-0-0"),
    }
    assert [(row["rule"], row["containment"]) for row in rows] == [("near/1", pytest.approx(55 / 56))] * 4

    steps = ("signatures", "pairs", "removed")
    evidence_of = [file for step in steps for file in corpus.results.glob(f"cleaning/*/{step}/*.parquet")]
    before = {file: file.read_bytes() for file in evidence_of}
    monkeypatch.setattr(pairs, "BLOCK", 1)
    corpus.clean("mine")
    assert {file: file.read_bytes() for file in before} == before
    for corpus.jobs in (7, 50):  # most of these have no key
        corpus.clean("mine")
        assert {file: file.read_bytes() for file in before} == before
    capsys.readouterr()
    corpus("removed", "mine", "mine-1-2")
    assert "near, 98%, repeats mine-0-1 of mine" in capsys.readouterr().out


def test_pages_of_a_template_are_kept_in_all_parts_and_their_copies_are_not(corpus):
    """Half of a page's 5-grams are those of the template, so whole pages would be removed."""
    menu = prose(100, 120)
    pages = [prose(seed, 24) for seed in range(30)]
    parts = [[written(menu + page) for page in pages[:25]], [written(menu + page) for page in pages[25:]]]
    parts[1].append(written(menu + edited(pages[3], 0)))
    corpus.add("mine", parts, near=0.8)
    assert named(corpus.clean("mine")) == {"mine-1-5": ("near", "mine-0-3")}


def test_the_best_pair_with_a_document_that_is_kept_is_the_evidence():
    """Documents 3 and 4 repeat only documents that are removed. The reason that comes first counts."""
    columns = {"row": [1, 2, 2, 3, 4, 1], "kept_row": [0, 1, 0, 1, 2, 9]}
    arrays = {name: evidence.pa.array(values, evidence.pa.uint32()) for name, values in columns.items()}
    reasons = evidence.pa.array(["near"] * 5 + ["contaminated"])
    shares = np.array([0.9, 0.95, 0.85, 0.9, 0.9, 1.0])
    same = {"part": "000", "kept_dataset": "d", "kept_part": "000", "reason": reasons}
    found = evidence.table({**arrays, **same, "containment": shares}, 6)
    ((_, chosen),) = drop("d", ["000"], lambda part, columns=None: found, [])
    assert chosen.select(["row", "kept_row", "containment"]).to_pylist() == [
        {"row": 1, "kept_row": 9, "containment": 1.0},
        {"row": 2, "kept_row": 0, "containment": 0.85},
    ]


# --------------------------------------------------------------------------------------------- refused
