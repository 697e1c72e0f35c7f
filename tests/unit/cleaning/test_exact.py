"""Exact duplicates by the commands: the first by order is kept, with evidence to read and check."""

import hashlib
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from spider.cli import cli
from spider.common.files import read_json
from spider.config import load_config
from spider.data.cleaning import evidence
from spider.data.cleaning.drop import drop

RUN = {"data": "first", "model": "tiny", "stages": [{"name": "main", "max_steps": 1}]}


class Corpus:
    """Datasets of jsonl files, and the commands on them."""

    def __init__(self, folder):
        self.folder = folder
        self.config = {"results": str(folder / "results"), "datasets": {}, "runs": {"r": RUN}}
        self.add("first", [["a", "b"]])

    def add(self, name, parts, **settings):
        files = []
        for number, texts in enumerate(parts):
            files.append(self.folder / f"{name}-{number}.jsonl")
            rows = [json.dumps({"id": f"{name}-{number}-{i}", "text": text}) for i, text in enumerate(texts)]
            files[-1].write_text("\n".join(rows))
        source = {"kind": "local", "files": list(map(str, files))}
        self.config["datasets"][name] = {"source": source, "validation": 0.5, **settings}

    def __call__(self, *words):
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.config))
        cli(["--config", str(path), "data", *map(str, words)], standalone_mode=False)

    def raw(self, name, part):
        return self.folder / f"results/raw/{name}/{part}.parquet"

    def clean(self, *names):
        """Make all files of the cleaning of datasets, and return the removed rows of the last by part."""
        for name in names:
            parts = [f"{i:03d}" for i in range(len(self.config["datasets"][name]["source"]["files"]))]
            for part in parts:
                self("download", name, part, "--output", self.raw(name, part))
                self("signatures", name, part)
            for part in parts if self.config["datasets"][name].get("cleaning") else ():
                self("candidates", name, part)
                self("drop", name, part)
        return {part: self.removed(names[-1], part)["row"].to_pylist() for part in parts}

    def removed(self, name, part):
        return evidence.read(self.folder / f"results/cleaning/{name}/removed/{part}.parquet")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    return Corpus(tmp_path)


def test_white_space_and_composition_do_not_matter_and_all_else_does(corpus):
    texts = [
        "x = 1\n\ty  = 2 ",
        "x = 1 y = 2",
        "X = 1 y = 2",
        "x = 1 y = 2.",
        "caf\u00e9",
        "cafe\u0301",
        "x=1 y=2",
    ]
    corpus.add("one", [texts], cleaning={"exact": True})
    assert corpus.clean("one") == {"000": [1, 5]}
    (first, _) = corpus.removed("one", "000").to_pylist()
    assert first == {
        **{"part": "000", "row": 1, "id": "one-0-1", "bytes": 11, "reason": "exact", "removed": True},
        **{"kept_dataset": "one", "kept_part": "000", "kept_row": 0, "kept_id": "one-0-0"},
        **{"containment": 1.0, "words": None, "matches": None, "rule": "exact/1", "split": None},
    }


def test_the_first_by_order_is_kept_over_parts_and_datasets(corpus):
    corpus.add("other", [["c", "c"], ["d", "a"]], cleaning={"exact": True, "against": ["first"]})
    corpus.add(
        "mine", [["e", "d", "a"], ["e", "f", "f", "a"]], cleaning={"exact": True, "against": ["other"]}
    )
    # `a` is removed from `other` for the sake of `first`, so the first one of `mine` is kept.
    assert corpus.clean("first", "other", "mine") == {"000": [1], "001": [0, 2, 3]}
    kept = corpus.removed("mine", "001").select(["kept_dataset", "kept_id"]).to_pylist()
    assert [tuple(row.values()) for row in kept] == [
        ("mine", "mine-0-0"),
        ("mine", "mine-1-1"),
        ("mine", "mine-0-2"),
    ]
    files = sorted((corpus.folder / "results/cleaning").rglob("*.parquet"))
    before = {file: file.read_bytes() for file in files}
    corpus.clean("first", "other", "mine")
    assert {file: file.read_bytes() for file in files} == before and len(files) == 1 + 2 * 6


def test_a_document_that_is_left_out_by_a_filter_removes_no_other(corpus):
    corpus.add("one", [["a", "bb", " a", "a"], ["bb"]], cleaning={"exact": True, "filters": ["bytes >= 2"]})
    assert corpus.clean("one") == {"000": [], "001": [0]}


def test_encoding_leaves_out_what_was_removed_and_the_dataset_says_so(corpus, capsys):
    corpus.add("one", [["a", "b", "a"], ["b", "c", ""]], cleaning={"exact": True, "filters": ["text != c"]})
    corpus.add("tokens", [])
    corpus.config["datasets"]["tokens"] = {"like": "one"}
    corpus.clean("one")
    shards = corpus.folder / "results/shards/tokens"
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

    # Without the block, nothing is left out, and the description has no such key.
    corpus.config["datasets"]["first"]["cleaning"] = {}
    corpus("download", "first", "000", "--output", corpus.raw("first", "000"))
    corpus("encode", "first", "000", corpus.raw("first", "000"))
    record = read_json(corpus.folder / "results/shards/first/train/000.json")
    assert "left_out" not in record["rows"]


def test_a_dataset_of_copies_only_is_not_indexed(corpus):
    corpus.add("copy", [["a", "b"]], cleaning={"exact": True, "against": ["first"]})
    assert corpus.clean("first", "copy") == {"000": [0, 1]}
    corpus("encode", "copy", "000", corpus.raw("copy", "000"))
    with pytest.raises(
        ValueError, match=r"datasets\.copy\.cleaning: leaves out all documents \(2 by exact\)"
    ):
        corpus("index", "copy", "--output", corpus.folder / "results/shards/copy/metadata.json")


def test_evidence_that_was_edited_is_refused(corpus):
    corpus.add("one", [["a", "a"]], cleaning={"exact": True})
    corpus.clean("one")
    path = corpus.folder / "results/cleaning/one/removed/000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(ValueError, match=r"removed/000\.parquet: was changed since it was written"):
        corpus("encode", "one", "000", corpus.raw("one", "000"))
    path.unlink()
    with pytest.raises(ValueError, match=r"removed/000\.parquet: is missing"):
        corpus("encode", "one", "000", corpus.raw("one", "000"))


def test_removed_documents_are_listed_and_shown_beside_what_they_repeat(corpus, capsys):
    corpus.add("one", [["a text\nof two lines", "b"], ["a  text of two lines"]], cleaning={"exact": True})
    corpus.clean("one")
    capsys.readouterr()
    corpus("removed", "one")
    listed = capsys.readouterr().out.splitlines()
    assert listed == ["exact: 1 removed", "one-1-0 (001/0): exact, 100%, repeats one-0-0 of one"]
    for name in ("one-1-0", "001/0"):
        corpus("removed", "one", name)
        lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
        assert [line[0].strip() for line in lines] == ["a  text of two lines", ""]
        assert [line[1] for line in lines] == ["a text", "of two lines"]
    with pytest.raises(
        ValueError, match="no document 'one-0-1' was removed; `spider data removed one` lists"
    ):
        corpus("removed", "one", "one-0-1")
    corpus.raw("one", "000").unlink()
    with pytest.raises(ValueError, match=r"raw/one/000\.parquet: this raw text is deleted, so it cannot be"):
        corpus("removed", "one", "one-1-0")
    with pytest.raises(ValueError, match=r"datasets\.first\.cleaning: compares no documents"):
        corpus("removed", "first")


def test_a_pair_with_a_removed_document_removes_nothing():
    """A chain of near duplicates, in which only the middle one repeats the first."""
    pairs = {
        "row": [3, 1, 2, 2],
        "kept_row": [2, 0, 1, 9],
        "reason": ["near", "near", "near", "contaminated"],
    }
    columns = {name: evidence.SCHEMA.field(name).type for name in pairs}
    rows = {name: evidence.pa.array(values, columns[name]) for name, values in pairs.items()}
    same = {"part": "001", "kept_dataset": "d", "kept_part": "001", "removed": True, "rule": "near/1"}
    found = evidence.table({**rows, **same}, 4)
    found = found.set_column(11, "removed", evidence.pa.array([True, True, True, False]))
    chosen = drop("d", "001", found, lambda *part: evidence.NO_ROWS)
    assert chosen.select(["row", "removed"]).to_pylist() == [
        {"row": 1, "removed": True},
        {"row": 2, "removed": False},
        {"row": 3, "removed": True},
    ]


@pytest.mark.parametrize(
    ("mine", "problem"),
    [
        ({"exact": True, "against": ["none"]}, r"no dataset 'none'"),
        ({"exact": True, "against": ["stream"]}, r"'stream' has no stored text to compare with"),
        ({"exact": True, "against": ["mine"]}, r"documents of 'mine' would come before themselves"),
        ({"exact": True, "against": ["like"]}, r"'like' has the text of 'mine'; name that"),
        ({"exact": True, "against": ["other"]}, r"would come before themselves; leave 'other' out"),
        ({"against": ["first"]}, r"needs exact: true, or near"),
    ],
)
def test_datasets_that_cannot_come_first_are_refused(corpus, mine, problem):
    corpus.add("mine", [["a"]], cleaning=mine)
    corpus.add("other", [["a"]], cleaning={"exact": True, "against": ["mine"]})
    corpus.config["datasets"]["like"] = {"like": "mine"}
    stream = {
        "kind": "stream",
        "repo": "a/b",
        "revision": hashlib.sha1(b"").hexdigest(),
        "files": ["a.parquet"],
    }
    corpus.config["datasets"]["stream"] = {"source": stream}
    with pytest.raises(ValueError, match=rf"datasets\.mine\.cleaning\.against: .*{problem}"):
        load_config(corpus.config)


def test_a_stream_and_published_shards_cannot_be_cleaned(corpus):
    stream = {"kind": "stream", "repo": "a/b", "revision": "c" * 40, "files": ["a.parquet"]}
    tokens = {"kind": "tokens", "train": ["a.bin"], "validation": ["b.bin"], "model": "m", "vocab_size": 300}
    for source, problem in (
        (stream, "a stream is not stored, so it cannot be"),
        (tokens, "published shards"),
    ):
        corpus.config["datasets"]["first"] = {"source": source, "cleaning": {"exact": True}}
        with pytest.raises(ValueError, match=rf"datasets\.first\.cleaning: {problem}"):
            load_config(corpus.config)
