"""A local source: which files are its parts, and what decides the content of an imported part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spider.config import Config, ConfigError, Dataset, load_config
from spider.config.data import SplitBy

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


def test_what_has_no_parts_is_refused_by_the_name_of_its_dataset(tmp_path):
    with pytest.raises(ConfigError, match=r"datasets.mine.source.files: no file matches 'none/\*.jsonl'"):
        parts("none/*.jsonl")
    with pytest.raises(ConfigError, match=r"mine.source.files: .* holds no file of a known kind; give"):
        parts(touch(tmp_path / "empty", "README.md"))
    with pytest.raises(
        ConfigError, match=r"holds texts \(README.txt\) and other files \(a.csv\); name the f"
    ):
        parts(touch(tmp_path / "both", "README.txt", "a.csv"))


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


def test_every_setting_that_names_a_column_is_kept_and_documented():
    """`docs/data.md` lists the settings; in a block of a dataset their keys end in `column`."""
    settings = {name for name in Dataset.model_fields if name.endswith("column")}
    settings |= {f"split_by.{name}" for name in SplitBy.model_fields if name.endswith("column")}
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    table = page.split("These settings of a dataset name columns.")[1].split("\n\n")[1]
    assert set(re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE)) == settings
    named = {"text_column": "a", "id_column": "b", "split_by": {"column": "c"}}
    named |= {"answer_column": "d", "format": "chat"}
    assert Dataset.model_validate({"source": LOCAL, **named}).columns == ("a", "b", "c", "d")
    assert len(settings) == 4
