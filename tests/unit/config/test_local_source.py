"""A local source: which files are its parts, and what decides the content of an imported part."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spider.config import Config, ConfigError, Dataset, load_config
from spider.data.listing import matches
from spider.data.sources.local import LocalSource
from spider.data.sources.tokens import TokensSource

HUB = {"kind": "hub", "repo": "x/y", "revision": "r", "files": ["a.parquet"]}
LOCAL = {"kind": "local", "files": ["a.jsonl"]}


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def config(**dataset: Any) -> Config:
    stages = [{"name": "a", "max_steps": 2}]
    runs = {"r": {"data": "mine", "model": "tiny", "stages": stages}}
    return load_config({"datasets": {"mine": dataset}, "runs": runs})


def parts(*files: str | Path) -> dict[str, str]:
    return config(source={"kind": "local", "files": list(map(str, files))}).parts("mine")


def test_each_file_of_a_folder_is_a_part(tmp_path):
    touch(
        tmp_path,
        "b/1.jsonl.gz",
        "a.parquet",
        "c.csv",
        "d.json.zst",
        "README.md",
        ".cache/x.jsonl",
        "b/.y.csv",
    )
    expected = [str(tmp_path / name) for name in ("a.parquet", "b/1.jsonl.gz", "c.csv", "d.json.zst")]
    assert parts(tmp_path) == {f"{i:03d}": path for i, path in enumerate(expected)}
    assert list(parts(tmp_path / "*", "own.jsonl").values())[-1] == "own.jsonl"


def test_a_folder_of_texts_is_one_part(tmp_path):
    touch(tmp_path, "b/1.txt", "a.txt.gz", "README.md", ".z.txt")
    assert parts(f"{tmp_path}/") == {"000": f"{tmp_path}/"}
    source = config(source={"kind": "local", "files": [str(tmp_path)]}).datasets["mine"].source
    assert source.own_files(str(tmp_path)) == [str(tmp_path / "a.txt.gz"), str(tmp_path / "b/1.txt")]
    assert source.own_files("a.jsonl") == ["a.jsonl"]


SHELL = "shopt -s globstar nullglob; printf '%s\\n' {} | LC_ALL=C sort -u"


@pytest.mark.parametrize(
    "pattern",
    [
        "g/**/a*/*.jsonl",
        "./**/c.jsonl",
        "g/**/**/c.jsonl",
        "g/[^t]*.jsonl",
        "g/.*.jsonl",
        "{here}/g/**/*.jsonl",
        "x[v]/*.jsonl",
    ],
)
def test_a_glob_means_what_a_shell_with_globstar_means(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(
        touch(tmp_path, "g/top.jsonl", "g/a/b/c.jsonl", "g/ab/d.jsonl", "g/.h/e.jsonl", "xv/v.jsonl")
    )
    touch(tmp_path, "g/.f.jsonl", "g/i.jsonl", "c.jsonl", "g/n.txt")
    (tmp_path / "g/loop").symlink_to("..")
    pattern = pattern.format(here=tmp_path)
    printed = subprocess.run(
        ["bash", "-c", SHELL.format(pattern)], capture_output=True, text=True, check=True
    )
    assert matches("files", pattern) == printed.stdout.splitlines() != []


def test_a_name_that_exists_is_no_glob(tmp_path, monkeypatch):
    monkeypatch.chdir(touch(tmp_path, "corpus [v].jsonl", "corpus v.jsonl", "x[1]/a.jsonl", "x1/b.jsonl"))
    assert list(parts("corpus [v].jsonl").values()) == ["corpus [v].jsonl"]
    assert list(parts("x[1]/*.jsonl").values()) == ["x[1]/a.jsonl"]
    Path("x[1]/a.jsonl").rename("x1/a.jsonl")
    Path("x[1]").rmdir()
    assert list(parts("x[1]/*.jsonl").values()) == ["x1/a.jsonl", "x1/b.jsonl"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["g/*.jsonl", "g", "g/top.jsonl"], ["g/top.jsonl", "g/a/b.jsonl"]),
        (["g/top.jsonl", "./g/top.jsonl", "{here}/g/top.jsonl", "link.jsonl"], ["g/top.jsonl"]),
        (["g", "linked"], ["g/a/b.jsonl", "g/top.jsonl"]),
        (["t", "t/", "t/s", "t/s/b.txt"], ["t"]),
    ],
)
def test_a_file_counts_once(tmp_path, monkeypatch, files, expected):
    monkeypatch.chdir(touch(tmp_path, "g/top.jsonl", "g/a/b.jsonl", "t/a.txt", "t/s/b.txt"))
    (tmp_path / "link.jsonl").symlink_to("g/top.jsonl")
    (tmp_path / "linked").symlink_to("g")
    assert list(parts(*(name.format(here=tmp_path) for name in files)).values()) == expected
    tokens = TokensSource(
        kind="tokens", train=["g/*.jsonl", "g/top.jsonl"], validation=["t/a.txt"], model="m", vocab_size=300
    )
    assert tokens.items() == ["g/top.jsonl", "t/a.txt"] and tokens.split("001") == "validation"
    with pytest.raises(ConfigError, match=r"link.jsonl is both in source.train and in source.validation"):
        tokens.model_copy(update={"validation": ["link.jsonl"]}).items()
    assert config(source=HUB | {"files": ["a.parquet", "b.parquet", "a.parquet"]}).parts("mine") == {
        "000": "a.parquet", "001": "b.parquet",
    }  # fmt: skip


def test_a_text_is_in_the_first_part_that_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(touch(tmp_path, "t/a.txt", "t/s/b.txt", "t/s/c.txt"))
    source = LocalSource(kind="local", files=["t/s/c.txt", "t/s", "t"])
    found = {item: source.own_files(item) for item in source.items()}
    assert found == {"t/s/c.txt": ["t/s/c.txt"], "t/s": ["t/s/b.txt"], "t": ["t/a.txt"]}
    Path("t/a.txt").write_text("a")
    source.fetch("002", Path("o.parquet"), Dataset.model_validate({"source": source}))
    assert pq.read_table("o.parquet").to_pylist() == [{"text": "a", "id": "a.txt"}]


def test_other_endings_are_read_or_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(
        touch(tmp_path, "g/a.ndjson", "g/b.JSONL", "g/c.Csv.GZ", "g/README.md", "g/.x.csv", "g/d.ndjson.zst")
    )
    touch(tmp_path, "g/.git/config", "elsewhere/e.csv")
    (tmp_path / "g/more").symlink_to("../elsewhere")
    left_out = {
        "hidden": ["g/.git", "g/.x.csv"],
        "of another kind": ["g/README.md"],
        "a link to a folder": ["g/more"],
    }
    for files, but in ((["g"], set()), (["g", "g/.x.csv", "g/more"], {"g/.x.csv", "g/more"})):
        source = LocalSource(kind="local", files=files)
        assert source.items()[:4] == ["g/a.ndjson", "g/b.JSONL", "g/c.Csv.GZ", "g/d.ndjson.zst"]
        expected = {reason: sorted({*paths} - but) for reason, paths in left_out.items()}
        assert {reason: sorted(paths) for reason, paths in source.left_out().items()} == {
            reason: paths for reason, paths in expected.items() if paths
        }
    assert LocalSource(kind="local", files=["g/*.*"]).left_out() == {"of another kind": ["g/README.md"]}
    with pytest.raises(ConfigError, match=r"source.files: g/\*.md holds no file of a known kind; give"):
        LocalSource(kind="local", files=["g/*.ndjson", "g/*.md"]).items()


def identity(item: str = "a.jsonl", **dataset: Any) -> dict[str, Any]:
    made = Dataset.model_validate({"source": LOCAL, **dataset})
    return made.source.identity(item, made)


def test_the_columns_of_an_imported_file_belong_to_its_identity():
    plain = identity()
    assert plain == {"kind": "local", "item": "a.jsonl"}
    assert identity(id_column="url") == {**plain, "columns": ["text", "url"]}
    assert identity(text_column="body") == {**plain, "columns": ["body", "id"]}
    assert identity(split_by={"column": "url"}) == {**plain, "columns": ["text", "id", "url"]}
    assert identity(format="chat") == {**plain, "format": "chat"}
    for same in (
        {"split_by": {"column": "id"}},
        {"validation": 0.5, "ngram": 0.1},
        {"max_document_bytes": 9},
    ):
        assert identity(**same) == plain
    by_site = identity(split_by={"column": "url", "pattern": "//([^/]+)"})
    assert by_site == identity(split_by={"column": "url"})


def test_files_that_are_kept_whole_are_not_fetched_again_for_other_columns():
    other = {"id_column": "url", "text_column": "body", "split_by": {"column": "site"}}
    assert identity("a.parquet", **other) == identity("a.parquet")
    assert identity("a.parquet", source=HUB, **other) == {
        "kind": "hub", "repo": "x/y", "revision": "r", "item": "a.parquet",
    }  # fmt: skip
