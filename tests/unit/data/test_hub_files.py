"""Files of a hub on loopback that are not parquet: imported like own files, with a lock or without."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hub_server import serving
from test_take import configuration, environment, fails, fetch, parquet, resolve

from spider.common.files import read_json
from spider.config import ConfigError, load_config
from tests.forkserver import python

ROWS = [{"text": f"Document {i}. " + "words " * 40, "id": f"<{i}>"} for i in range(300)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def streamed(table: pa.Table) -> bytes:
    with (sink := io.BytesIO()), pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
        writer.close()
        return sink.getvalue()


def feathered(table: pa.Table) -> bytes:
    feather.write_feather(table, sink := io.BytesIO(), chunksize=70)
    return sink.getvalue()


TABLE = pa.Table.from_pylist(ROWS)
FILES = {
    "data/a.jsonl": LINES,
    "data/b.jsonl.gz": gzip.compress(LINES),
    "data/c.jsonl.zst": pa.compress(LINES, "zstd", asbytes=True),
    "data/d.arrow": streamed(TABLE),
    "data/e.feather": feathered(TABLE),
    "data/f.parquet": parquet("data/f.parquet"),
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(FILES, small={"data/a.jsonl"}) as server:
        yield server


@pytest.mark.parametrize("name", [name for name in FILES if "parquet" not in name])
def test_a_file_of_any_kind_becomes_the_same_parquet(hub, tmp_path, name):
    hub.cut = 1
    fetch(hub, tmp_path / "out", files=[name])
    assert pq.read_table(tmp_path / "out").to_pylist() == ROWS
    assert not list(tmp_path.glob(".out*imported"))


def test_a_lock_holds_files_of_several_kinds(hub, tmp_path):
    assert resolve(hub, files=["data/*"], revision="main")[0] == 0
    lock = read_json(Path("texts.lock.json"))
    assert [file["name"] for file in lock["files"]] == list(FILES)
    assert [bool(file["rows"]) for file in lock["files"]] == [False] * 5 + [True]
    source = {"files": ["data/*"], "lock": "texts.lock.json", "revision": "main"}
    dataset = load_config(configuration(**source)).datasets["texts"]
    assert dataset.source.identity("data/a.jsonl", dataset)["hash"] == lock["files"][0]["hash"]
    for part in ("000", "003"):
        fetch(hub, tmp_path / "out", part=part, **source)
        assert pq.read_table(tmp_path / "out").to_pylist() == ROWS
    with pytest.raises(ConfigError, match=r"source.files: take reads only parquet .*data/a.jsonl"):
        load_config(configuration(**source, take="1 kB")).datasets["texts"].source.files_of_parts()
    hub.files = {**FILES, "data/a.jsonl": LINES + LINES}
    assert "has another content than when the lock file was written" in fails(hub, tmp_path / "no", **source)


def test_the_columns_decide_an_imported_file_and_not_a_parquet_file(hub):
    config = configuration(files=list(FILES))
    config["datasets"]["texts"]["text_column"] = "id"
    dataset = load_config(config).datasets["texts"]
    decides = {name: dataset.source.identity(name, dataset) for name in FILES}
    assert decides["data/a.jsonl"]["columns"] == ["id"] and "columns" not in decides["data/f.parquet"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("bad.jsonl", LINES + b'{"text": "cut', "bad.jsonl, line 301: not valid JSON"),
        ("bad.jsonl.gz", gzip.compress(LINES)[:-20], "the gzip file is truncated"),
        ("bad.arrow", streamed(TABLE.select(["id"])), "no column 'text' (there are: id); set text_column"),
        ("bad.feather", feathered(TABLE)[:-30], "not a complete arrow or feather file"),
        ("cut.arrow", streamed(TABLE)[:3000], "not a complete arrow or feather file"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_address(hub, tmp_path, name, content, problem):
    hub.files = {**FILES, name: content}
    error = fails(hub, tmp_path / "out", files=[name])
    assert error.startswith(f"{name} of {hub.repo}@") and problem in error
    served = hub.content_requests
    fails(hub, tmp_path / "out", files=[name])
    assert hub.content_requests == served, "a second attempt downloads nothing"


@pytest.mark.parametrize("kind", ["hub", "stream"])
def test_only_parquet_files_have_row_groups(kind):
    config = configuration(files=["data/f.parquet", "data/*.jsonl.gz"], lock="texts.lock.json")
    config["datasets"]["texts"]["source"] |= {"kind": kind} | ({"take": "1 MB"} if kind == "hub" else {})
    reader = "a stream" if kind == "stream" else "take"
    with pytest.raises(ConfigError, match=rf"source.files: {reader} reads only parquet .*gz\); "):
        load_config(config)


def test_the_first_parquet_file_is_looked_at(hub, tmp_path):
    script = "import json, sys; from spider.config import load_config\n"
    script += "one = load_config(json.loads(sys.argv[1])).datasets['texts']\n"
    script += "print(one.source.probe(one.source.items(), one))"
    command = [python(), "-c", script, json.dumps(configuration(files=list(FILES)))]
    done = subprocess.run(command, env=environment(hub, tmp_path), capture_output=True, text=True)
    assert done.stdout.strip() == str(sum(map(len, FILES.values()))), done.stderr
