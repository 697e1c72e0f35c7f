"""Files of a hub on loopback that are not parquet: imported like own files."""

from __future__ import annotations

import gzip
import io
import json

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hub_server import reached, serving
from test_take import configuration, fails, fetch, parquet

from spider.config import ConfigError, load_config
from spider.data import chat
from spider.data.documents import read_documents, row_counts

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
    "data/c.jsonl.zst": pa.compress(LINES, "zstd", asbytes=True),
    "data/d.arrow": streamed(TABLE),
    "data/e.feather": feathered(TABLE),
    "data/f.parquet": parquet("data/f.parquet"),
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(FILES, small={"data/a.jsonl"}) as server:
        reached(server, monkeypatch)
        yield server


def test_a_file_of_any_kind_becomes_the_same_parquet(hub, tmp_path):
    dataset = load_config(configuration(files=list(FILES))).datasets["texts"]
    items = dataset.source.items()
    assert dataset.source.probe(items, dataset) == sum(map(len, FILES.values()))
    for part, name in enumerate([name for name in FILES if "parquet" not in name]):
        hub.cut = 1
        fetch(tmp_path / "out", f"{part:03d}", files=list(FILES))
        assert pq.read_table(tmp_path / "out").to_pylist() == ROWS, name
    assert not list(tmp_path.glob(".out*imported"))


@pytest.mark.parametrize("take", [None, "100%"])
def test_conversations_of_parquet_are_lists_or_json(hub, tmp_path, take):
    talk = [{"role": "user", "content": "Hi “you”"}, {"role": "assistant", "content": "Ho"}]
    rows = [[*talk, *talk], talk]
    for name, values in {"lists": rows, "json": [*map(json.dumps, rows)]}.items():
        pq.write_table(pa.table({"messages": values}), sink := io.BytesIO())
        hub.files[f"{name}.parquet"] = sink.getvalue()
    read = []
    for name in ("lists.parquet", "json.parquet"):
        plain = configuration(files=[name], take=take)
        plain["datasets"]["texts"] = {
            "source": plain["datasets"]["texts"]["source"],
            "format": "chat",
            "text_column": "messages",
        }
        dataset = load_config(plain).datasets["texts"]
        assert dataset.source.probe(dataset.source.items(), dataset) == len(hub.files[name])
        dataset.source.fetch("000", tmp_path / name, dataset)
        (batch,) = read_documents(tmp_path / name, dataset, row_counts())
        read.append([chat.parse(text) for text in batch.texts.to_pylist()])
    assert read[0] == read[1] == [chat.parse(json.dumps(row)) for row in rows]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("bad.jsonl.gz", gzip.compress(LINES)[:-20], "the gzip file is truncated"),
        ("bad.arrow", streamed(TABLE.select(["id"])), "no column 'text' (there are: id); set text_column"),
        ("cut.arrow", streamed(TABLE)[:3000], "not a complete arrow or feather file"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_address(hub, tmp_path, name, content, problem):
    hub.files = {**FILES, name: content}
    error = fails(tmp_path / "out", files=[name])
    assert error.startswith(f"{name} of {hub.repo}@") and problem in error
    served = hub.content_requests
    fails(tmp_path / "out", files=[name])
    assert hub.content_requests == served, "a second attempt downloads nothing"


@pytest.mark.parametrize(("kind", "reader"), [("hub", "take"), ("stream", "a stream")])
def test_only_parquet_files_have_row_groups(kind, reader):
    config = configuration(files=["data/f.parquet", "data/c.jsonl.gz"])
    config["datasets"]["texts"]["source"] |= {"kind": kind} | ({"take": "1 MB"} if kind == "hub" else {})
    with pytest.raises(ConfigError, match=rf"source.files: {reader} reads only parquet .*gz\); "):
        load_config(config)
