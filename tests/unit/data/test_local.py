"""Import of a user's own files as parquet: contents, errors and memory."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard

from spider.config import ConfigError, load_config
from spider.data.encode import encode_part
from spider.data.sources import local
from spider.data.sources.local import LocalSource, import_local
from spider.tokens import BYTES
from tests.unit.small_datasets import dataset, is_validation

ROOT = Path(__file__).parents[3]


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


@pytest.mark.parametrize("compressed", [False, True])
def test_jsonl_keeps_text_ids_and_nulls(tmp_path, compressed):
    lines = [
        {"text": "één", "id": "a", "x": [1]},
        {"text": None, "id": 7},
        {"text": ""},
        {"text": "two\nlines"},
    ]
    data = "\n\n".join(map(json.dumps, lines)).encode()
    source = tmp_path / ("a.jsonl.zst" if compressed else "a.jsonl")
    if compressed:  # two frames, as a concatenation of two files has
        data = b"".join(zstandard.compress(part) for part in (data[:20], data[20:]))
    source.write_bytes(data)
    import_local(source, tmp_path / "o.parquet", dataset())
    assert rows_of(tmp_path / "o.parquet") == [
        {"text": "één", "id": "a"},
        {"text": None, "id": "7"},
        {"text": "", "id": None},
        {"text": "two\nlines", "id": None},
    ]


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


def test_an_unreadable_file_is_an_error_and_leaves_no_file(tmp_path):
    output = tmp_path / "out/o.parquet"
    (tmp_path / "a.docx").write_text("x")
    (tmp_path / "torn.json.gz").write_bytes(gzip.compress(json.dumps(os.urandom(5000).hex()).encode())[:-20])
    (tmp_path / "plain.csv.gz").write_bytes(b"not compressed at all")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no end")
    (tmp_path / "torn.jsonl.zst").write_bytes(zstandard.compress(os.urandom(5000).hex().encode())[:-20])
    (tmp_path / "plain.arrow").write_bytes(b"no arrow at all")
    (tmp_path / "plain.jsonl.zst").write_bytes(b"not compressed at all")
    cases = {
        "missing.jsonl": "no such file or folder",
        "a.docx": "unknown kind of file; give .parquet, .arrow, .feather, .jsonl",
        "torn.json.gz": "the gzip file is truncated",
        "plain.csv.gz": "not a valid gzip file",
        "torn.parquet": "not a complete parquet file",
        "torn.jsonl.zst": "truncated",
        "plain.arrow": "not a complete arrow or feather file",
        "plain.jsonl.zst": "not a valid zstd file",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            import_local(tmp_path / name, output, dataset())
        assert name in str(error.value)
        assert not output.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b""),
        ("a.jsonl", b"\n \n"),
        ("a.jsonl", "\ufeff".encode()),
        ("a.json", b"[]"),
        ("a.csv", b""),
        ("a.csv", b"text,id\n"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
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


@pytest.mark.parametrize(
    ("name", "coding"),
    [
        ("a.txt", "utf-16"),
        ("a.jsonl", "utf-16-le"),
        ("a.json", "utf-16-be"),
        ("a.csv", "utf-32"),
        ("a.jsonl.gz", "utf-32-le"),
        ("a.txt.zst", "utf-16-le"),
    ],
)
def test_another_coding_than_utf8_is_refused(tmp_path, name, coding):
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    source = tmp_path / name
    source.write_bytes(packed('[{"text": "één"}]'.encode(coding)))
    with pytest.raises(ValueError, match=rf"{source.name}: is UTF-16 or UTF-32; export it as UTF-8"):
        import_local(source, tmp_path / "o.parquet", dataset())
    mine = LocalSource(kind="local", files=[str(source)])
    with pytest.raises(ValueError, match="is UTF-16 or UTF-32"):
        mine.probe(mine.items(), dataset())


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t/a.txt").write_bytes("\ufeffone".encode())
    for source in (tmp_path / "t", tmp_path / "t/a.txt"):
        import_local(source, tmp_path / "o.parquet", dataset())
        assert rows_of(tmp_path / "o.parquet") == [{"text": "one", "id": "a.txt"}]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
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


@pytest.mark.parametrize("compressed", [False, True])
def test_a_single_text_is_one_document(tmp_path, compressed):
    data = b"Zeile\n\xff"
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(data))
    source = tmp_path / ("a.txt.gz" if compressed else "a.txt")
    import_local(source, tmp_path / "o.parquet", dataset())
    assert rows_of(tmp_path / "o.parquet") == [{"text": "Zeile\n\ufffd", "id": source.name}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": ', "line 2: not valid JSON"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"body": "x", "n": 1}',
            "line 2: has no 'text' .keys: 'body', 'n'.; set text_",
        ),
        ("a.jsonl", '{"text": "a"}\n"text"', "line 2: must be an object with a 'text' key .got str"),
        ("a.jsonl", '{"text": "a"}\n{"text": 5}', "line 2: 'text' must be text or null .got int"),
        ("a.json", '[{"text": "a"},\n {"text" 5}]', "line 2: not valid JSON .*delimiter at column 10"),
        ("a.json", '[{"text": "a"}\n {"text": "b"}]', "line 2: not valid JSON .*',' delimiter at column 2"),
        ("a.json", '[\n{"text": "a"},\n', "line 3: not valid JSON .*at column 1"),
        ("a.json", '[{"text": "a"}]\n{}', "line 2: not valid JSON .*Extra data at column 1"),
        ("a.json", '[{"text": "a"},\n5]', "element 2: must be an object with a 'text' key .got int"),
        ("a.json", '[{"text": "a"},\n{"body": 1}]', "element 2: has no 'text' .keys: 'body'"),
        ("a.json", '{\n"text": "a"}', "line 1: not valid JSON .*at column 2.*an array of objects, or one"),
        ("a.csv", "text,id\na,b\nc,d,e\n", "line 3: has 3 fields, the first line has 2"),
        ("a.csv", "text,id\na\n", "line 2: has 1 field, the first line has 2"),
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


def test_a_large_array_is_refused_with_the_command_that_makes_lines_of_it(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text(json.dumps(DOCUMENTS))
    monkeypatch.setattr(local, "MOST_ARRAY", 100)
    with pytest.raises(ValueError, match=r"a\.json: .*one object a line, as `jq -c '\.\[\]'` does"):
        import_local(tmp_path / "a.json", tmp_path / "o.parquet", dataset())


def packages(tmp_path: Path, name: str) -> list[tuple[str, str, str]]:
    """Write a file of documents and return them as (text, id, package)."""
    rows = [(f"text {i}", f"id-{i}", f"package{i % 17}") for i in range(200)]
    dicts = [dict(zip(("text", "id", "pkg"), row, strict=True)) for row in rows]
    if name.endswith("csv"):
        with open(tmp_path / name, "w", newline="") as f:
            writer = csv.DictWriter(f, dicts[0])
            writer.writeheader()
            writer.writerows(dicts)
    else:
        (tmp_path / name).write_text("\n".join(map(json.dumps, dicts)))
    return rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_users_column_decides_the_split(tmp_path, name):
    rows = packages(tmp_path, name)
    settings = dataset(validation=0.3, split_by={"column": "pkg"})
    import_local(tmp_path / name, tmp_path / "o.parquet", settings)
    assert rows_of(tmp_path / "o.parquet")[0] == {"text": "text 0", "id": "id-0", "pkg": "package0"}
    records = encode_part(tmp_path / "o.parquet", tmp_path, "000", settings)
    held_out = [text for text, _, package in rows if is_validation(package.encode(), 0.3)]
    ids = (tmp_path / "validation/000.bin").read_bytes()
    decoded = BYTES.decode(memoryview(ids).cast("H").tolist())
    assert 0 < records["validation"]["documents"] == len(held_out) < 200
    assert decoded == "".join(held_out)


def test_a_list_is_a_conversation_but_not_a_text(tmp_path):
    turns = [{"role": "user", "content": "Hé?"}, {"role": "assistant", "content": "Ja."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": turns, "id": "a"}))
    import_local(tmp_path / "a.jsonl", tmp_path / "o.parquet", dataset(format="chat"))
    assert json.loads(rows_of(tmp_path / "o.parquet")[0]["text"]) == turns
    with pytest.raises(ValueError, match=r"line 1: 'text' must be text or null \(got list\)"):
        import_local(tmp_path / "a.jsonl", tmp_path / "o.parquet", dataset())


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


def test_a_column_that_no_line_has_is_an_error_with_its_setting(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"text": "x", "pkg": null}\n{"text": "y", "n": 1}\n')
    wrong = dataset(split_by={"column": "url"})
    message = r"a.jsonl: no line has 'url' \(keys: 'n', 'pkg', 'text'\); set split_by.column to .*, or leave"
    with pytest.raises(ValueError, match=message):
        import_local(tmp_path / "a.jsonl", tmp_path / "o.parquet", wrong)
    import_local(tmp_path / "a.jsonl", tmp_path / "o.parquet", dataset())
    assert "a.jsonl: no line has 'id', the text itself decides the split" in caplog.text
    (tmp_path / "a.jsonl").write_text('{"text": "x", "pkg": ["a"]}\n')
    with pytest.raises(ValueError, match=r"line 1: 'pkg' must be text, a number or null \(got list\)"):
        import_local(tmp_path / "a.jsonl", tmp_path / "o.parquet", dataset(split_by={"column": "pkg"}))


def test_texts_of_a_folder_are_split_by_their_path(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        (tmp_path / "in" / folder / "x.txt").write_text(folder)
    by_folder = dataset(split_by={"column": "id", "pattern": "([^/]+)/"})
    import_local(tmp_path / "in", tmp_path / "o.parquet", by_folder)
    assert rows_of(tmp_path / "o.parquet")[1] == {"text": "b", "id": "b/x.txt"}
    with pytest.raises(ValueError, match=r"in: a text has no column 'url'.*split_by.column to 'id'"):
        import_local(tmp_path / "in", tmp_path / "o.parquet", dataset(split_by={"column": "url"}))


def test_the_shipped_configuration_reads_a_users_jsonl_or_names_the_conflicting_key(tmp_path):
    """The test replaces only `source` in config.yaml, like a new user."""
    import yaml

    plain = yaml.safe_load((ROOT / "config.yaml").read_text())
    name = "pydocs"
    rows = [{"text": f"Document {i}.", "file_path": f"package{i % 40}/file"} for i in range(400)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plain["datasets"][name]["source"] = {"kind": "local", "files": [str(tmp_path / "own.jsonl")]}
    settings = load_config(plain).datasets[name]
    import_local(tmp_path / "own.jsonl", tmp_path / "o.parquet", settings)
    records = encode_part(tmp_path / "o.parquet", tmp_path, "000", settings)
    assert sum(record["documents"] for record in records.values()) == 400

    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"text": row["text"]}) for row in rows))
    with pytest.raises(
        ValueError, match=r"no line has .file_path. .*set split_by.column to .*, or leave split_by out"
    ):
        import_local(tmp_path / "own.jsonl", tmp_path / "o.parquet", settings)
    del plain["datasets"][name]["split_by"]
    with pytest.raises(ConfigError, match=r"largest_group: needs groups .*split_by, or leave it out"):
        load_config(plain)
    for run in plain["runs"].values():
        run["evaluation"].pop("largest_group", None)  # the runs share one block
    settings = load_config(plain).datasets[name]
    import_local(tmp_path / "own.jsonl", tmp_path / "o.parquet", settings)
    assert sum(
        r["documents"] for r in encode_part(tmp_path / "o.parquet", tmp_path, "000", settings).values()
    )


def peak_of_import(folder: Path, name: str, documents: int) -> int:
    """Return the peak memory in kB of a process that imports so many documents of half a megabyte."""
    with (folder / name).open("w") as f:
        for i in range(documents):
            f.write(json.dumps({"text": f"{i} " + "x" * 500_000, "id": str(i)}) + "\n")
    code = (
        "import re, sys; from pathlib import Path; from spider.config import Dataset;"
        "from spider.data.sources.local import import_local; dataset = Dataset(source={'kind': 'pydocs'});"
        "folder = Path(sys.argv[1]); import_local(folder / sys.argv[2], folder / 'o.parquet', dataset);"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), name], capture_output=True, text=True, check=True
    )
    assert pq.read_metadata(folder / "o.parquet").num_rows == documents
    return int(done.stdout)


def test_memory_does_not_grow_with_the_file(tmp_path):
    small, large = (peak_of_import(tmp_path, "big.jsonl", documents) for documents in (50, 200))
    assert large - small < 40_000, "100 MB against 25 MB of text"
