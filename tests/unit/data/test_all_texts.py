"""All texts of a file are read, whatever its kind and its columns."""

import gzip
import json

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from spider.data.sources.local import all_texts, files_of

LONG = "one two three four five six seven eight"
ROW = {"id": 7, "question": LONG, "choices": {"text": ["no", f"{LONG} nine"], "label": ["A", "B"]}}


def test_strings_of_any_column_and_depth_are_read_from_each_kind_of_file(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n\n" + json.dumps({"question": "short"}))
    (tmp_path / "b.json").write_text(json.dumps([ROW]))
    (tmp_path / "c.csv").write_text(f"x,y\nshort,{LONG}\n")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(LONG.encode()))
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "e.parquet")
    feather.write_feather(pa.Table.from_pylist([ROW]), str(tmp_path / "f.feather"))
    (tmp_path / "weights.bin").write_bytes(b"?")
    found = {file.name: list(all_texts(file, 8)) for file in files_of(tmp_path)}
    both = [LONG, f"{LONG} nine"]
    assert found == {
        "a.jsonl": [("line 1", both), ("line 3", [])],
        "b.json": [("element 1", both)],
        "c.csv": [("line 2", [LONG])],
        "d.txt.gz": [("text", [LONG])],
        "e.parquet": [("row 0", both)],
        "f.feather": [("row 0", both)],
    }
    with pytest.raises(ValueError, match=r"c.csv: holds no text of 9 words or more"):
        list(all_texts(tmp_path / "c.csv", 9))
