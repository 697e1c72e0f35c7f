"""A user's own files, made into parquet: what is kept, what is refused, and what that costs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from spider.data.local import import_local
from tests.unit.small_datasets import dataset


def rows_of(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_parquet_is_linked_not_copied(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "mine.parquet")
    monkeypatch.chdir(tmp_path)
    record = import_local(Path("mine.parquet"), Path("raw/000.parquet"), dataset())
    assert record == {
        "name": "000.parquet",
        "documents": 2,
        "bytes": (tmp_path / "mine.parquet").stat().st_size,
    }
    link = tmp_path / "raw/000.parquet"
    assert link.is_symlink() and link.readlink() == tmp_path / "mine.parquet"
    assert import_local(tmp_path / "mine.parquet", link, dataset())["documents"] == 2


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


def test_invalid_utf8_is_replaced_counted_and_said_once(tmp_path, caplog):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "ok"}\n{"text": "a\xff"}\n{"text": "\\ud800"}\n{"text": "\xfe\xfe"}\n')
    with caplog.at_level(logging.WARNING):
        import_local(source, tmp_path / "o.parquet", dataset())
    assert [r["text"] for r in rows_of(tmp_path / "o.parquet")] == ["ok", "a\ufffd", "\ufffd", "\ufffd\ufffd"]
    assert len(caplog.messages) == 1
    assert "3 documents held invalid UTF-8" in caplog.messages[0] and "first: line 2" in caplog.messages[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"a\.jsonl, line 2: not valid JSON"),
        ('{"body": "x", "n": 1}', r"line 2: has no 'text' \(keys: 'body', 'n'\); set text_column"),
        ('"text"', r"line 2: must be an object with a 'text' key \(got str\)"),
        ('{"text": 5}', r"line 2: 'text' must be text or null \(got int\)"),
    ],
)
def test_a_bad_line_is_named_and_leaves_no_file(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        import_local(tmp_path / "a.jsonl", tmp_path / "out/o.parquet", dataset())
    assert list((tmp_path / "out").iterdir()) == []


def test_folder_of_texts_is_one_document_a_file(tmp_path, caplog):
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/z.txt").write_text("last", encoding="utf-8")
    (tmp_path / "in/deep/a.txt").write_bytes(b"first \xff")
    (tmp_path / "in/ignored.md").write_text("no")
    import_local(tmp_path / "in", tmp_path / "o.parquet", dataset())
    expected = [{"text": "first \ufffd", "id": "deep/a.txt"}, {"text": "last", "id": "z.txt"}]
    assert rows_of(tmp_path / "o.parquet") == expected
    assert "deep/a.txt" in caplog.text


def test_other_columns_can_hold_text_and_id(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x", "key": 1}\n')
    import_local(tmp_path / "a.jsonl", tmp_path / "o.parquet", dataset(text_column="body", id_column="key"))
    assert rows_of(tmp_path / "o.parquet") == [{"body": "x", "key": "1"}]


def test_what_cannot_be_read_is_said_and_leaves_no_file(tmp_path):
    output = tmp_path / "out/o.parquet"
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no end")
    (tmp_path / "torn.jsonl.zst").write_bytes(zstandard.compress(os.urandom(5000).hex().encode())[:-20])
    (tmp_path / "plain.jsonl.zst").write_bytes(b"not compressed at all")
    cases = {
        "missing.jsonl": "no such file or folder",
        "empty": "holds no documents",
        "blank.jsonl": "holds no documents",
        "a.csv": "unknown kind of file; give .parquet, .jsonl, .jsonl.zst or a folder of .txt",
        "torn.parquet": "not a whole parquet file",
        "torn.jsonl.zst": "truncated",
        "plain.jsonl.zst": "not a valid zstd file",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            import_local(tmp_path / name, output, dataset())
        assert name in str(error.value)
        assert not output.exists()


def peak_of_import(folder: Path, documents: int) -> int:
    """Peak memory in kB of a process that imports so many documents of half a megabyte."""
    with (folder / "big.jsonl").open("w") as f:
        for i in range(documents):
            f.write(json.dumps({"text": f"{i} " + "x" * 500_000, "id": str(i)}) + "\n")
    code = (
        "import re, sys; from pathlib import Path; from spider.config import Dataset;"
        "from spider.data.local import import_local; dataset = Dataset(source={'kind': 'pydocs'});"
        "folder = Path(sys.argv[1]); import_local(folder / 'big.jsonl', folder / 'o.parquet', dataset);"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert pq.read_metadata(folder / "o.parquet").num_rows == documents
    return int(done.stdout)


def test_memory_does_not_grow_with_the_file(tmp_path):
    small, large = peak_of_import(tmp_path, 50), peak_of_import(tmp_path, 200)
    assert large - small < 20_000, "100 MB against 25 MB of text"
