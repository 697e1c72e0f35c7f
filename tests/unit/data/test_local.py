"""Import of a user's own files as parquet: contents, errors and memory."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard

from spider.data.encode import encode_part
from spider.data.sources import local
from spider.data.sources.local import import_local
from tests.unit.small_datasets import dataset


def rows_of(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_parquet_is_linked_not_copied(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "mine.parquet")
    monkeypatch.chdir(tmp_path)
    import_local(Path("mine.parquet"), Path("raw/000.parquet"), dataset())
    link = tmp_path / "raw/000.parquet"
    assert link.is_symlink() and link.readlink() == tmp_path / "mine.parquet"
    import_local(tmp_path / "mine.parquet", link, dataset())
    assert len(rows_of(link)) == 2


def test_jsonl_keeps_text_ids_and_nulls(tmp_path):
    lines = [{"text": "één", "id": "a", "x": [1]}, {"text": None, "id": 7}, {"text": ""}]
    data = "\n\n".join(map(json.dumps, lines)).encode()
    # two frames, as a concatenation of two files has
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(data[:20]) + zstandard.compress(data[20:]))
    import_local(tmp_path / "a.jsonl.zst", tmp_path / "o.parquet", dataset())
    found = [(row["text"], row["id"]) for row in rows_of(tmp_path / "o.parquet")]
    assert found == [("één", "a"), (None, "7"), ("", None)]


def test_invalid_utf8_is_replaced_with_one_warning(tmp_path, caplog):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "ok"}\n{"text": "a\xff"}\n{"text": "\\ud800"}\n{"text": "\xfe\xfe"}\n')
    with caplog.at_level(logging.WARNING):
        import_local(source, tmp_path / "o.parquet", dataset())
    assert [r["text"] for r in rows_of(tmp_path / "o.parquet")] == ["ok", "a\ufffd", "\ufffd", "\ufffd\ufffd"]
    (message,) = (message for message in caplog.messages if "UTF-8" in message)
    assert "3 documents had invalid UTF-8" in message and "first: line 2" in message


def test_a_folder_of_texts_has_one_document_per_file(tmp_path, caplog):
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/z.txt").write_text("last", encoding="utf-8")
    (tmp_path / "in/deep/a.txt").write_bytes(b"first \xff")
    (tmp_path / "in/ignored.md").write_text("no")
    import_local(tmp_path / "in", tmp_path / "o.parquet", dataset())
    expected = [{"text": "first \ufffd", "id": "deep/a.txt"}, {"text": "last", "id": "z.txt"}]
    assert rows_of(tmp_path / "o.parquet") == expected
    assert "deep/a.txt" in caplog.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"\n \n"),
        ("a.jsonl", "\ufeff".encode()),
        ("a.json", b"[]"),
        ("a.csv", b"text,id\n"),
        ("a.json.zst", zstandard.compress(b"")),
    ],
)
def test_a_file_without_documents_is_a_note(tmp_path, caplog, name, content):
    (tmp_path / name).write_bytes(content)
    by_url = dataset(split_by={"column": "url"})
    import_local(tmp_path / name, tmp_path / "o.parquet", by_url)
    assert pq.read_table(tmp_path / "o.parquet").column_names == ["text", "id", "url"]
    assert rows_of(tmp_path / "o.parquet") == []
    assert f"{name}: holds no documents" in caplog.text
    assert encode_part(tmp_path / "o.parquet", tmp_path / "out", "000", by_url)["train"]["documents"] == 0


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize(
    ("separator", "text", "expected"),
    [
        ("\n\n", "\ufeffone\n\ntwo\nlines\n\n\n\n \n\nthrée\n", ["one", "two\nlines", "thrée\n"]),
        ("\n\n", "one\r\n\r\ntwo\r\nlines\r\n\r\n", ["one", "two\r\nlines"]),
        ("<|endoftext|>", "a<|endoftext|>b < c | d<|endoftext|>", ["a", "b < c | d"]),
        ("\n---\n", "a\n---\nb---\n", ["a", "b---\n"]),
        ("§", "one", ["one"]),
    ],
)
def test_a_text_is_cut_at_a_separator(tmp_path, monkeypatch, chunk, separator, text, expected):
    monkeypatch.setattr(local, "CHUNK", chunk)
    cut = dataset(separator=separator)
    (tmp_path / "t/deep").mkdir(parents=True)
    (tmp_path / "t/deep/a.txt").write_bytes(text.encode())
    (tmp_path / "t/b.txt.gz").write_bytes(
        gzip.compress(b"\xff" + text.encode().removeprefix(b"\xef\xbb\xbf"))
    )
    import_local(tmp_path / "t/deep/a.txt", tmp_path / "o.parquet", cut)
    rows = [{"text": one, "id": f"a.txt#{i}"} for i, one in enumerate(expected, 1)]
    assert rows_of(tmp_path / "o.parquet") == rows
    import_local(tmp_path / "t", tmp_path / "o.parquet", cut)
    ids = [f"{name}#{row['id'].partition('#')[2]}" for name in ("b.txt.gz", "deep/a.txt") for row in rows]
    assert [row["id"] for row in rows_of(tmp_path / "o.parquet")] == ids
    assert rows_of(tmp_path / "o.parquet")[0]["text"] == "\ufffd" + expected[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_odd_values_in_a_field_that_nobody_reads(tmp_path, name):
    digits, lines = "7" * 5000, ["{%s}", '{"text": "two", "id": 2}']
    lines[0] %= f'"text": "one", "id": {digits}, "n": {digits}, "m": -{digits}, "x": [1e999, 1.{digits}, NaN]'
    write = "\n".join if name == "a.jsonl" else lambda rows: f"[{','.join(rows)}]"
    (tmp_path / name).write_text(write(lines))
    import_local(tmp_path / name, tmp_path / "o.parquet", dataset())
    assert rows_of(tmp_path / "o.parquet") == [{"text": "one", "id": digits}, {"text": "two", "id": "2"}]
    nested = '{"text": "deep", "x": %s}' % ("[" * 100_000 + "]" * 100_000)
    (tmp_path / name).write_text(write([*lines, nested]))
    where = "line 3" if name == "a.jsonl" else "line 1"
    with pytest.raises(
        ValueError, match=rf"{name}, {where}: not valid JSON \(too many brackets in each other"
    ):
        import_local(tmp_path / name, tmp_path / "o.parquet", dataset())


DOCUMENTS = [
    {"text": 'one, "quoted"', "id": "a", "score": "1"},
    {"text": "två\nrader 🙂", "id": "b", "score": "2"},
    {"text": "", "id": "c", "score": "3"},
]


def as_csv() -> str:
    table = io.StringIO()
    writer = csv.DictWriter(table, ["score", "text", "id"])
    writer.writeheader()
    writer.writerows(DOCUMENTS)
    return table.getvalue()


WRITTEN = {
    "a.jsonl": "\n".join(map(json.dumps, DOCUMENTS)),
    "lines.json": "\n".join(map(json.dumps, DOCUMENTS)),
    "array.json": json.dumps(DOCUMENTS),
    "indented.json": "\n " + json.dumps(DOCUMENTS, indent=2, ensure_ascii=False) + "\n\n",
    "a.csv": as_csv(),
}


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("compressed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_same_documents_in_any_kind_of_file(tmp_path, name, compressed, mark):
    data = (mark + WRITTEN[name]).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compressed]
    (tmp_path / f"{name}{compressed}").write_bytes(pack(data))
    import_local(tmp_path / f"{name}{compressed}", tmp_path / "o.parquet", dataset())
    assert rows_of(tmp_path / "o.parquet") == [{"text": d["text"], "id": d["id"]} for d in DOCUMENTS]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": ', "line 2: not valid JSON"),
        ("a.jsonl", '{"text": "a"}\n{"body": "x"}', "line 2: has no 'text' .keys: 'body'.; set text_"),
        ("a.jsonl", '{"text": "a"}\n"text"', "line 2: must be an object with a 'text' key .got str"),
        ("a.jsonl", '{"text": "a"}\n{"text": [5]}', "line 2: 'text' must be text or null .got list"),
        ("a.json", '[{"text": "a"},\n {"text" 5}]', "line 2: not valid JSON .*delimiter at column 10"),
        ("a.json", '[{"text": "a"},\n5]', "element 2: must be an object with a 'text' key .got int"),
        ("a.json", '{\n"text": "a"}', "line 1: not valid JSON .*at column 2.*an array of objects, or one"),
        ("a.csv", "text,id\na,b\nc,d,e\n", "line 3: has 3 fields, the first line has 2"),
        ("a.csv", 'text,id\na,b\n"c"d,e\n', "line 3: not valid CSV"),
        ("a.csv", "body,id\na,b\n", "line 2: has no 'text' .keys: 'body', 'id'.; set text_column"),
        ("a.csv", "text,id,text\na,b,c\n", "line 1: names 'text' twice"),
    ],
)
def test_errors_name_the_line_of_a_malformed_file(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}, {message}"):
        import_local(tmp_path / name, tmp_path / "out/o.parquet", dataset())
    assert list((tmp_path / "out").iterdir()) == []


def test_an_arrow_file_may_hold_conversations_and_ids_of_another_kind(tmp_path):
    turns = [{"role": "user", "content": "Hé?"}, {"role": "assistant", "content": "Ja."}]
    feather.write_feather(pa.table({"text": [turns], "id": [7], "other": [[1.5]]}), tmp_path / "a.feather")
    chat = dataset(format="chat")
    import_local(tmp_path / "a.feather", tmp_path / "o.parquet", chat)
    (row,) = rows_of(tmp_path / "o.parquet")
    assert json.loads(row.pop("text")) == turns and row == {"id": "7"}
    with pytest.raises(ValueError, match=r"a\.feather: column 'text' holds list<.*>, not strings; set"):
        import_local(tmp_path / "a.feather", tmp_path / "o.parquet", dataset())
    with pytest.raises(
        ValueError, match=r"no column 'turns' \(there are: text, id, other\); set text_column"
    ):
        import_local(
            tmp_path / "a.feather", tmp_path / "o.parquet", chat.model_copy(update={"text_column": "turns"})
        )


def test_memory_does_not_grow_with_the_file(tmp_path):
    for name, documents in (("small", 40), ("large", 110)):
        lines = (json.dumps({"text": f"{i} " + "x" * 500_000, "id": str(i)}) + "\n" for i in range(documents))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    code = f"""
import re
from pathlib import Path
from spider.config import Dataset
from spider.data.sources.local import import_local
folder = Path({str(tmp_path)!r})
for name in ("small", "large"):
    import_local(folder / f"{{name}}.jsonl", folder / name, Dataset(source={{"kind": "pydocs"}}))
    print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert large - small < 20_000, "55 MB against 20 MB of text"
